"""The kernels as torch ops, and the classes that replace the catalogue's attention."""

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
    """Return ``[..., heads, queries, value_size]``.

    Args:
        query: ``[..., heads, queries, size]``.
        key: ``[..., key_heads, keys, size]``.
        value: ``[..., key_heads, keys, value_size]``.
        scale: the factor of scores.
        is_causal: whether a query sees no later keys.
    """
    function = kernel.attention(scale, is_causal, _interpreted())
    # The kernel's grid has one dimension for the heads of all sequences.
    inputs = tuple(x.flatten(0, -3) for x in (query, key, value))
    attended: Tensor = call_jax(function, inputs)
    return attended.reshape(_result_shape(query, value))


def _result_shape(query: Tensor, value: Tensor) -> tuple[int, ...]:
    *leading, _ = query.shape
    return (*leading, value.shape[-1])


def _interpreted() -> bool:
    """Return True on XLA's CPU client, which has no compiler for Pallas."""
    return bool(torch_xla.runtime.device_type() == "CPU")


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> Tensor:
    return query.new_empty(_result_shape(query, value))


@ScaledDotProductAttention.register_oot
class PallasAttention(ScaledDotProductAttention):
    """Attention by the kernel, without mask and dropout. Otherwise the native definition runs."""

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
        """Return ``[..., heads, queries, value_size]``, as ``torch``'s function of this name."""
        taken = _kernel_takes(query, key, value, enable_gqa)
        if attn_mask is not None or dropout_p or not taken:
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


def _kernel_takes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Return True if the kernel takes these dtypes and shapes."""
    if query.dtype not in DTYPES or query.dim() < 3:
        return False
    for x in (query, key, value):
        if x.dtype is not query.dtype or x.dim() != query.dim():
            return False
        # A grid has at least one block.
        if x.numel() == 0:
            return False

    *sequences, heads, _, size = query.shape
    *key_sequences, key_heads, _, key_size = key.shape
    if key_sequences != sequences or key_size != size:
        return False
    if key.shape[:-1] != value.shape[:-1]:
        return False

    if enable_gqa:
        return heads % key_heads == 0
    return heads == key_heads


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
    """Return the result of ``PaddedAttention.attend_rows``, in the shape of ``query``."""
    settings = paged.Settings(scale, sliding_window, logits_soft_cap)
    function = paged.paged_attention(settings, _interpreted())
    attended: Tensor = call_jax(function, (query, cache, block_table, first, seq_lens))
    return attended


@paged_attention.register_fake
def _(query: Tensor, *others: object) -> Tensor:
    return torch.empty_like(query)


@Attention.register_oot
class PallasPagedAttention(PaddedAttention):
    """Attention over pages by the kernel, for a cache of numbers and without sinks.

    Otherwise, and if one process has several chips, the native definition runs.
    """

    def attend_rows(
        self, query: Tensor, cache: Tensor, block_table: Tensor, first: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """Return attention in the shape of ``query``, ``[sequences, tokens, heads, head_size]``."""
        # SPMD is torch_xla's name for one process with several chips.
        taken = self.sinks is None and cache.dtype in DTYPES and not torch_xla.runtime.is_spmd()
        if not taken:
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
