"""Attention over latents in pages, of ranks that 64 divides.

What the kernel does not take is computed by the native definition.
"""

from __future__ import annotations

from opgraft.functional import mla_paged_attention as form
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op

COLUMNS = 64
"""Elements of a latent that are taken at once."""


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


_attend = op("mla_paged_attention")
