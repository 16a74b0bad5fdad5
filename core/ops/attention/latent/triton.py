"""Triton kernels for attention over latents in pages. ``functional`` has the maths.

A program attends with some tokens of one sequence, as in attention over pages. If a batch has too
few programs to fill a GPU, several divide the keys of one. All heads share one row per key, and the
latent of the row is the value, too. So a program takes as many heads as its tile has rows, reads a
latent once, and multiplies the latent twice.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from opgraft.ops.activation.triton import tile_at
from opgraft.ops.attention.latent import functional as definitions
from opgraft.ops.attention.triton import (
    LOG2_E,
    LOWEST,
    UNBOUNDED,
    add_parts,
    added_keys,
    heads_together,
    key_places,
    loaded_rows,
    part_of_keys,
    parts_of_keys,
    rows_of_queries,
    share_of_program,
    store_part,
)
from opgraft.ops.triton_launch import (
    Tile,
    as_rows,
    entries_apart,
    launch,
    power_of_two,
    replaces,
    tile_of,
)
from opgraft.ops.triton_segments import blocks_at_most
from torch import Tensor

__all__ = ["concat_and_cache_mla", "mla_paged_attention"]

WIDEST_LATENT = 1024
"""Bytes of the widest latent. Some GPUs have 64 KiB of shared memory for tiles."""

ROWS = 16
"""Rows of a program, heads of tokens: the fewest for a product, as each row sums a whole latent."""

KEYS = 32
"""Keys of one step of a program."""


@triton.jit
def _loaded_pair(
    rows,
    exists,
    rank,
    rope,
    dtype: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_rope: tl.constexpr,
):
    """Load the latents of existing rows, and the rotated parts behind them, in ``dtype``."""
    latents = loaded_rows(rows, exists, rank, dtype, tile_columns)
    rotated = loaded_rows(rows + rank, exists, rope, dtype, tile_rope)
    return latents, rotated


@triton.jit
def _scores(q, rotated_q, latents, rotated, key, end, position, scale):
    """Return scores in units of log 2; minus infinity for a key outside the view of a position."""
    scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
    scores = tl.dot(rotated_q, tl.trans(rotated), scores, input_precision="ieee")
    scores = scores * (scale * LOG2_E)

    key = key[None, :]
    visible = (key < end) & (key <= position)
    return tl.where(visible, scores, float("-inf"))


@triton.jit(do_not_specialize=["sequences", "parts", "table_stride"])
def mla_paged_attention_kernel(
    query,
    cache,
    block_table,
    starts,
    lengths,
    out,
    log_sums,
    sequences,
    heads,
    group,
    parts,
    rank,
    rope,
    scale,
    query_stride,
    table_stride,
    block_stride,
    window: tl.constexpr,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_rope: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    part, head_block, sequence, first, count, position = share_of_program(
        starts, lengths, sequences, parts, tl.cdiv(heads, group), tile_rows // group
    )
    if count <= 0:
        return

    begin, end = part_of_keys(position, count, window, part, parts, tile_keys)
    offset, token, head, exists = rows_of_queries(first, count, head_block, group, tile_rows)
    exists &= head < heads
    position += offset

    row_size = rank + rope
    query += token * query_stride + head * row_size
    q, rotated_q = _loaded_pair(
        query, exists, rank, rope, query.dtype.scalar.element_ty, tile_columns, tile_rope
    )

    highest = tl.full((tile_rows, 1), LOWEST, tl.float32)
    total = tl.zeros((tile_rows, 1), tl.float32)
    attended = tl.zeros((tile_rows, tile_columns), tl.float32)

    table = block_table + sequence * table_stride
    for start in range(begin, end, tile_keys):
        key = start + tl.arange(0, tile_keys)
        rows = cache + key_places(table, key, end, row_size, block_stride, block_size)
        latents, rotated = _loaded_pair(
            rows, (key < end)[:, None], rank, rope, q.dtype, tile_columns, tile_rope
        )
        scores = _scores(q, rotated_q, latents, rotated, key, end, position, scale)
        attended, highest, total = added_keys(attended, highest, total, scores, latents)

    store_part(
        out, log_sums, token * heads + head, part, parts, exists, attended, highest, total, rank
    )


@triton.jit(do_not_specialize=["tokens"])
def concat_and_cache_mla_kernel(
    kv_c,
    k_pe,
    cache,
    slots,
    tokens,
    rank,
    width,
    latent_stride,
    rotated_stride,
    block_stride,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    token, column, inside = tile_at(tl.program_id(0), tokens, width, tile_rows, tile_columns)
    slot = tl.load(slots + token, token < tokens, 0).to(tl.int64)

    is_latent = column < rank
    latent = tl.load(kv_c + token * latent_stride + column, inside & is_latent, 0.0)
    rotated = tl.load(k_pe + token * rotated_stride + column - rank, inside & (column >= rank), 0.0)

    place = slot // block_size * block_stride + slot % block_size * width + column
    tl.store(cache + place, tl.where(is_latent, latent, rotated), inside)


@replaces(definitions.concat_and_cache_mla)
def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    definitions.expect_writable(kv_c, k_pe, cache, slots)
    fits = entries_apart(cache) and kv_c.dtype == k_pe.dtype == cache.dtype
    if not (fits and kv_c.numel() and k_pe.numel()):
        definitions.concat_and_cache_mla.native(kv_c, k_pe, cache, slots)
        return

    tokens, rank = kv_c.shape
    _, block_size, width = cache.shape
    latents = as_rows(kv_c, rank)
    rotated = as_rows(k_pe, width - rank)
    tile = tile_of(width, 1024, 1024)

    launch(
        concat_and_cache_mla_kernel,
        triton.cdiv(tokens, tile.rows) * triton.cdiv(width, tile.columns),
        tile,
        latents,
        rotated,
        cache,
        slots.contiguous(),
        tokens,
        rank,
        width,
        latents.stride(0),
        rotated.stride(0),
        cache.stride(0),
        block_size=block_size,
    )


def _kernel_takes(query: Tensor, cache: Tensor, rank: int) -> bool:
    """Return True if the kernel takes the cache and the queries; else the native form runs."""
    if cache.dtype != query.dtype or rank * query.element_size() > WIDEST_LATENT:
        return False
    return entries_apart(cache)


@replaces(definitions.mla_paged_attention)
def mla_paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    definitions.expect_latents(query, cache, block_table, query_start_loc, seq_lens, kv_lora_rank)
    if not _kernel_takes(query, cache, kv_lora_rank):
        return definitions.mla_paged_attention.native(
            query, cache, block_table, query_start_loc, seq_lens, kv_lora_rank, scale
        )

    out = query.new_empty((*query.shape[:2], kv_lora_rank))
    if out.numel():
        starts = query_start_loc.contiguous()
        lengths = seq_lens.contiguous()
        _attend(out, query, cache, block_table, starts, lengths, scale)
    return out


def _attend(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
) -> None:
    """Launch the kernel; if several programs divide keys, launch the kernel for their parts too."""
    tokens, heads, rank = out.shape
    sequences = lengths.shape[0]
    block_size = cache.shape[1]
    rope = query.shape[2] - rank
    group = min(heads, ROWS)

    # The product of two tiles needs at least 16 columns.
    tile = Tile(ROWS, max(16, power_of_two(rank)), 4)
    programs = blocks_at_most(tokens, sequences, ROWS // group) * triton.cdiv(heads, group)
    parts = parts_of_keys(programs, block_table.shape[1] * block_size)

    # A kernel needs pointers, and writes no sums for one part alone.
    results = log_sums = out
    if parts > 1:
        results = query.new_empty((tokens, heads, parts, rank), dtype=torch.float32)
        log_sums = query.new_empty((tokens, heads, parts), dtype=torch.float32)

    rows = heads_together(query)
    table = as_rows(block_table, block_table.shape[1])

    launch(
        mla_paged_attention_kernel,
        programs * parts,
        tile,
        rows,
        cache,
        table,
        starts,
        lengths,
        results,
        log_sums,
        sequences,
        heads,
        group,
        parts,
        rank,
        rope,
        scale,
        rows.stride(0),
        table.stride(0),
        cache.stride(0),
        window=UNBOUNDED,
        block_size=block_size,
        tile_keys=KEYS,
        tile_rope=max(16, power_of_two(rope)),
    )
    if parts > 1:
        add_parts(results, log_sums, out, tile, parts)
