"""Attention over latents in pages, of ranks that 64 divides, and the products by head around it.

What the kernels do not take is computed by the native definition.
"""

from __future__ import annotations

from opgraft.functional import mla_paged_attention as form
from opgraft.kernels import gradient_required
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.library import path_or_none

COLUMNS = 64
"""Elements of a latent that are taken at once."""

FEW = {"amx": 16, "avx512_bf16": 16, "avx512": 4, "avx2": 4}
"""Path → up to how many tokens products by head gain, measured on two cores of Zen 4, with 16 heads, 128 and 512."""


def mla_paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    """Compute the form of that name."""
    taken = query.dtype in DTYPES and query.is_cpu
    if taken and is_dynamo_compiling():  # compiled code cannot catch what an op raises
        taken = kv_lora_rank % COLUMNS == 0 and cache.shape[-1] % (COLUMNS // 2) == 0
        taken = taken and not refusal(form.name, {"query": query, "cache": cache})
    if taken:
        try:
            return _attend(  # type: ignore[no-any-return]
                query, cache, block_table, query_start_loc, seq_lens, kv_lora_rank, scale
            )
        except REFUSED:
            pass
    return form.native(query, cache, block_table, query_start_loc, seq_lens, kv_lora_rank, scale)


def by_heads(x: Tensor, weight: Tensor) -> Tensor | None:
    """Multiply as ``MLAAttention.by_heads`` does, few tokens; ``None`` where torch is to do it."""
    if (
        len(x) > FEW.get(path_or_none(), 0)
        or is_dynamo_compiling()
        or gradient_required((x, weight), {})
    ):
        return None
    try:
        return _by_heads(x, weight.transpose(1, 2))  # type: ignore[no-any-return]
    except REFUSED:
        return None


_attend = op("mla_paged_attention")
_by_heads = op("linear_by_heads")
