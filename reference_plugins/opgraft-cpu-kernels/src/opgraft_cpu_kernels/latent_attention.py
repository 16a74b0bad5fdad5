"""Attention over latents in pages, and the products by head before and after.

The kernel takes latents whose rank is a multiple of 64. In all other cases opgraft's native
definition runs.
"""

from __future__ import annotations

from collections.abc import Callable

from opgraft.functional import mla_paged_attention as form
from opgraft.kernels import gradient_required
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.library import path_or_none

COLUMNS = 64
"""Elements of a latent that the kernel takes at once."""

FEW = {"amx": 16, "avx512_bf16": 16, "avx512": 4, "avx2": 4}
"""Path → the most tokens for products by head. With more tokens, torch is faster.

Measured on two cores of Zen 4, with 16 heads, 128 inputs and 512 outputs of a head.
"""


def mla_paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    """Compute ``opgraft.functional.mla_paged_attention``."""
    taken = query.dtype in DTYPES and query.is_cpu
    # Compiled code cannot catch the error of an op. So it asks for all arguments beforehand.
    if taken and is_dynamo_compiling():
        fits = kv_lora_rank % COLUMNS == 0 and cache.shape[-1] % (COLUMNS // 2) == 0
        taken = fits and not refusal(form.name, {"query": query, "cache": cache})
    if taken:
        try:
            return _attend(
                query, cache, block_table, query_start_loc, seq_lens, kv_lora_rank, scale
            )
        except REFUSED:
            pass
    return form.native(query, cache, block_table, query_start_loc, seq_lens, kv_lora_rank, scale)


def by_heads(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return the products of ``MLAAttention.by_heads``, or None if torch has to compute them.

    Args:
        x: ``[tokens, heads, inputs]``.
        weight: ``[heads, inputs, outputs]``.

    Returns:
        ``[tokens, heads, outputs]``, or None.
    """
    if len(x) > FEW.get(path_or_none(), 0):
        return None
    if is_dynamo_compiling() or gradient_required((x, weight), {}):
        return None
    try:
        return _by_heads(x, weight.transpose(1, 2))
    except REFUSED:
        return None


_attend: Callable[..., Tensor] = op("mla_paged_attention")
_by_heads: Callable[..., Tensor] = op("linear_by_heads")
