"""Triton kernels for attention over latents in pages. Their maths and arguments are in ``functional``.

As attention over pages does, a program attends with some tokens of one sequence, and where a batch has too few programs
to fill a GPU, several divide the keys. All heads share one row per key, whose latent is its value too: a program has as
many heads as its tile has rows, reads a latent once, and multiplies it twice.
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
    MOST_PARTS,
    UNBOUNDED,
    added_keys,
    added_parts_kernel,
    block_of_queries,
    heads_together,
    key_places,
    loaded_rows,
    part_of_keys,
    parts_of_keys,
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
"""Bytes of a latent, beyond which tiles do not fit into the shared memory of some GPUs, 64 KiB."""

ROWS = 16
"""Rows of a program, heads of tokens: the fewest that can be multiplied, as each has the sums of a whole latent."""

KEYS = 32
"""Keys that a program reads at a time."""


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
    part, block, groups = tl.program_id(0) % parts, tl.program_id(0) // parts, tl.cdiv(heads, group)
    sequence, first, count, position = block_of_queries(
        block // groups, starts, lengths, sequences, tile_rows // group
    )
    if count <= 0:
        return
    begin, end = part_of_keys(position, position + count, window, part, parts, tile_keys)
    row = tl.arange(0, tile_rows)[:, None]
    token, head = (first + row // group).to(tl.int64), block % groups * group + row % group
    exists = (row < count * group) & (head < heads)
    query += token * query_stride + head * (rank + rope)
    q = loaded_rows(query, exists, rank, query.dtype.scalar.element_ty, tile_columns)
    rotated_q = loaded_rows(query + rank, exists, rope, q.dtype, tile_rope)
    highest, total = (
        tl.full((tile_rows, 1), LOWEST, tl.float32),
        tl.zeros((tile_rows, 1), tl.float32),
    )
    attended = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(begin, end, tile_keys):
        key, table = start + tl.arange(0, tile_keys), block_table + sequence * table_stride
        rows = cache + key_places(table, key, end, 0, 0, rank + rope, block_stride, block_size)
        latents = loaded_rows(rows, (key < end)[:, None], rank, q.dtype, tile_columns)
        rotated = loaded_rows(rows + rank, (key < end)[:, None], rope, q.dtype, tile_rope)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotated_q, tl.trans(rotated), scores, input_precision="ieee") * (
            scale * LOG2_E
        )
        visible = (key < end)[None, :] & (key[None, :] <= position + row // group)
        scores = tl.where(visible, scores, float("-inf"))
        attended, highest, total = added_keys(attended, highest, total, scores, latents)
    place = (token * heads + head) * parts + part
    store_part(out, log_sums, place, exists, attended, highest, total, rank, parts)


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
    latent = tl.load(kv_c + token * latent_stride + column, inside & (column < rank), 0.0)
    rotated = tl.load(k_pe + token * rotated_stride + column - rank, inside & (column >= rank), 0.0)
    place = slot // block_size * block_stride + slot % block_size * width + column
    tl.store(cache + place, tl.where(column < rank, latent, rotated), inside)


@replaces(definitions.concat_and_cache_mla)
def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    definitions.expect_writable(kv_c, k_pe, cache, slots)
    fits = entries_apart(cache) and kv_c.dtype == k_pe.dtype == cache.dtype
    if not (fits and kv_c.numel() and k_pe.numel()):
        definitions.concat_and_cache_mla.native(kv_c, k_pe, cache, slots)
    else:
        (tokens, rank), width = kv_c.shape, cache.shape[2]
        latents, rotated, tile = (
            as_rows(kv_c, rank),
            as_rows(k_pe, width - rank),
            tile_of(width, 1024, 1024),
        )
        programs = triton.cdiv(tokens, tile.rows) * triton.cdiv(width, tile.columns)
        sizes = (tokens, rank, width, latents.stride(0), rotated.stride(0), cache.stride(0))
        operands = (rotated, cache, slots.contiguous(), *sizes)
        launch(
            concat_and_cache_mla_kernel,
            programs,
            tile,
            latents,
            *operands,
            block_size=cache.shape[1],
        )


def _fits(query: Tensor, cache: Tensor, rank: int) -> bool:
    """Tell whether the kernel can take a cache and queries; else the native definition does."""
    return (
        cache.dtype == query.dtype
        and rank * query.element_size() <= WIDEST_LATENT
        and entries_apart(cache)
    )


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
    given = (block_table, query_start_loc, seq_lens, kv_lora_rank)
    definitions.expect_latents(query, cache, *given)
    if not _fits(query, cache, kv_lora_rank):
        return definitions.mla_paged_attention.native(query, cache, *given, scale)
    out = query.new_empty((*query.shape[:2], kv_lora_rank))
    if out.numel():
        _attend(
            out,
            query,
            cache,
            block_table,
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            scale,
        )
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
    """Launch the kernel, and the one that adds up parts where the programs are too few to fill a GPU."""
    (tokens, heads, rank), sequences, block_size = out.shape, lengths.shape[0], cache.shape[1]
    group, rope = min(heads, ROWS), query.shape[2] - rank
    columns = max(16, power_of_two(rank))
    tile = Tile(ROWS, columns, 4)
    programs = blocks_at_most(tokens, sequences, ROWS // group) * triton.cdiv(heads, group)
    parts = parts_of_keys(programs, block_table.shape[1] * block_size)
    results, log_sums = out, out
    if parts > 1:
        results = query.new_empty((tokens, heads, parts, rank), dtype=torch.float32)
        log_sums = query.new_empty((tokens, heads, parts), dtype=torch.float32)
    rows, table = heads_together(query), as_rows(block_table, block_table.shape[1])
    operands = (
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
    )
    constants = {"window": UNBOUNDED, "block_size": block_size, "tile_keys": KEYS}
    constants |= {"tile_rope": max(16, power_of_two(rope))}
    strides = (rows.stride(0), table.stride(0), cache.stride(0))
    launch(
        mla_paged_attention_kernel, programs * parts, tile, rows, *operands, *strides, **constants
    )
    if parts > 1:
        one = tile._replace(rows=1)
        launch(
            added_parts_kernel,
            tokens * heads,
            one,
            results,
            log_sums,
            out,
            parts,
            rank,
            most=MOST_PARTS,
        )
