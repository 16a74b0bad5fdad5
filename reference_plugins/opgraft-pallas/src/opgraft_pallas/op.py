"""The kernels as torch ops, and the classes that put them in place of the catalogue's attention."""

from __future__ import annotations

import opgraft
import torch
import torch_xla.runtime
from opgraft.kernels import PaddedAttention
from opgraft.ops import Attention, ScaledDotProductAttention
from torch import Tensor
from torch_xla.core.xla_builder import call_jax

from opgraft_pallas import kernel, paged

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("opgraft_pallas::attention", mutates_args=(), device_types="xla")
def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Attend over ``[..., heads, tokens, features]``; on XLA's CPU client Pallas interprets the kernel."""
    interpret = torch_xla.runtime.device_type() == "CPU"
    function = kernel.attention(scale, is_causal, interpret)
    attended: Tensor = call_jax(function, tuple(x.flatten(0, -3) for x in (query, key, value)))
    return attended.reshape(*query.shape[:-1], value.shape[-1])


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@ScaledDotProductAttention.register_oot
class PallasAttention(ScaledDotProductAttention):
    """The kernel where it applies: no mask, no dropout, at most float32, equal batches. Elsewhere the native form."""

    @opgraft.inference_only
    def forward_tpu(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p or not _fits(query, key, value, enable_gqa):
            return self.forward_native(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        attended: Tensor = attention(query, key, value, factor, is_causal)
        return attended


def _fits(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    tensors = (query, key, value)
    if {x.dtype for x in tensors} - {query.dtype} or query.dtype not in DTYPES:
        return False
    if any(x.dim() < 3 or x.dim() != query.dim() or x.numel() == 0 for x in tensors):
        return False
    heads, key_heads = query.shape[-3], key.shape[-3]
    return (
        query.shape[:-3] == key.shape[:-3]
        and query.shape[-1] == key.shape[-1]
        and key.shape[:-1] == value.shape[:-1]
        and (heads % key_heads == 0 if enable_gqa else heads == key_heads)
    )


@torch.library.custom_op("opgraft_pallas::paged_attention", mutates_args=(), device_types="xla")
def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    first: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
) -> Tensor:
    """Attend over pages, as ``PaddedAttention.attend_rows`` does."""
    interpret = torch_xla.runtime.device_type() == "CPU"
    function = paged.paged_attention(
        paged.Settings(scale, sliding_window, logits_soft_cap), interpret
    )
    attended: Tensor = call_jax(function, (query, cache, block_table, first, seq_lens))
    return attended


@paged_attention.register_fake
def _(query: Tensor, *others: object) -> Tensor:
    return torch.empty_like(query)


@Attention.register_oot
class PallasPagedAttention(PaddedAttention):
    """The kernel for a cache of numbers, without sinks. Elsewhere, and over chips of one process, the native form."""

    def attend_rows(
        self, query: Tensor, cache: Tensor, block_table: Tensor, first: Tensor, seq_lens: Tensor
    ) -> Tensor:
        if self.sinks is not None or cache.dtype not in DTYPES or torch_xla.runtime.is_spmd():
            return super().attend_rows(query, cache, block_table, first, seq_lens)
        attended: Tensor = paged_attention(
            query,
            cache,
            block_table,
            first.to(torch.int32),
            seq_lens,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
        )
        return attended
