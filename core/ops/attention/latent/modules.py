"""The modules around the forms of ``opgraft.ops.attention.latent.functional``."""

from __future__ import annotations

from typing import Any

from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.attention.latent import functional as forms
from opgraft.ops.on_triton import on_triton
from torch import Tensor

__all__ = ["ConcatAndCacheMLA", "MLAPagedAttention"]

TRITON = on_triton("opgraft.ops.attention.latent.triton")


@CustomOp.register("concat_and_cache_mla")
class ConcatAndCacheMLA(CustomOp):
    """Writes latents and rotated keys of new tokens to a paged cache (arXiv:2405.04434)."""

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON

    @calls_functional
    def forward_native(
        self, kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *, functional: Any = NATIVE
    ) -> None:
        """Write; see ``opgraft.functional.concat_and_cache_mla`` for arguments and errors."""
        functional.concat_and_cache_mla(kv_c, k_pe, cache, slots)


@CustomOp.register("mla_paged_attention")
class MLAPagedAttention(CustomOp):
    """Causal attention over latents in pages: each value is a part of its key (arXiv:2405.04434).

    Args:
        kv_lora_rank: elements of a latent.
        scale: multiplies the scores.

    Raises:
        ValueError: ``kv_lora_rank`` is no positive integer.
    """

    # Makes forward_cuda and forward_xpu.
    functional_cuda = functional_xpu = TRITON

    def __init__(self, kv_lora_rank: int, scale: float) -> None:
        super().__init__()
        forms.expect_rank(kv_lora_rank)
        self.kv_lora_rank = kv_lora_rank
        self.scale = scale

    @calls_functional
    def forward_native(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        *,
        functional: Any = NATIVE,
    ) -> Tensor:
        """Attend; see ``opgraft.functional.mla_paged_attention`` for arguments and errors."""
        attended: Tensor = functional.mla_paged_attention(
            query, cache, block_table, query_start_loc, seq_lens, self.kv_lora_rank, self.scale
        )
        return attended

    def extra_repr(self) -> str:
        return f"kv_lora_rank={self.kv_lora_rank}, scale={self.scale}"
