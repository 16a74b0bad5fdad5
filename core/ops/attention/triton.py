"""Triton kernels for attention over pages. Their maths and arguments are in ``paged``.

A program attends with some tokens of one sequence, by all query heads that share a key head: keys and values are read
once for them. It finds its sequence by bisection, so that the host, which launches from shapes alone, waits for no
length. One pass over the keys keeps scores and sums in float32 (online softmax, arXiv:1805.02867). Where a batch has
too few programs to fill a GPU, several divide the keys of one among them, and a second kernel adds their parts up, as
flash decoding does. Rows of codes are decoded as they are read. Nothing is specialised on numbers that change from
step to step, so that a step seldom waits for a compilation.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from opgraft.ops.attention import paged as definitions
from opgraft.ops.attention.codes import LARGEST_CODES, SCALE_BYTES
from opgraft.ops.quantization.triton import supports
from opgraft.ops.triton_launch import Tile, as_rows, entries_apart, launch, power_of_two, replaces
from opgraft.ops.triton_segments import block_of_segment, blocks_at_most
from torch import Tensor

__all__ = ["paged_attention", "write_kv_cache"]

PROGRAMS = 512
"""Programs that fill any GPU. A batch that has fewer divides its keys."""

PART = 256
"""Keys that are worth a program of their own."""

MOST_PARTS = 64
"""Programs that divide the keys of one among them: their results are added up at once."""

WIDEST_HEAD = 1024
"""Bytes of a head, beyond which tiles of keys and values do not fit into the shared memory of some GPUs, 64 KiB."""

UNBOUNDED = 2**31 - 1
"""The window where there is none."""

LOWEST = tl.constexpr(-3.0e38)  # finite, as the difference of two infinities is NaN
LOG2_E = tl.constexpr(1.4426950408889634)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
# Added and taken away it rounds a small number to nearest even.
_TO_WHOLE = tl.constexpr(1.5 * 2**23)


@triton.jit
def block_of_queries(index, starts, lengths, sequences, queries):
    """Find a block's sequence, its first token, how many it has, and the first one's position in the sequence."""
    sequence, first, end = block_of_segment(index, starts, sequences, queries)
    return (
        sequence,
        first,
        tl.minimum(queries, end - first),
        tl.load(lengths + sequence) - end + first,
    )


@triton.jit
def part_of_keys(first, end, window, part, parts, tile_keys: tl.constexpr):
    """Give the bounds of a part of the keys that tokens at positions from ``first`` to before ``end`` see."""
    lowest = tl.maximum(first - window + 1, 0)
    size = tl.cdiv(tl.cdiv(end - lowest, tile_keys), parts) * tile_keys
    return lowest + part * size, tl.minimum(lowest + (part + 1) * size, end)


@triton.jit
def loaded_rows(rows, exists, head_size, dtype: tl.constexpr, tile_columns: tl.constexpr):
    """Load the rows that exist in ``dtype``; others are zero. Every dtype holds codes exactly."""
    column = tl.arange(0, tile_columns)[None, :]
    x = tl.load(rows + column, exists & (column < head_size), 0)
    if x.dtype == tl.uint8:
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif x.dtype == tl.int8:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _loaded_scales(rows, exists, head_size, scale_bytes: tl.constexpr):
    """Load the scales that lie behind the codes of rows, ``[1, rows]``; 1 for rows of elements."""
    scales = 1.0
    if scale_bytes > 0:
        byte = tl.arange(0, _SCALE_BYTES)[None, :]
        bits = (tl.load(rows + head_size + byte, exists, 0).to(tl.int32) & 0xFF) << (8 * byte)
        scales = tl.trans(tl.sum(bits, 1, keep_dims=True).to(tl.float32, bitcast=True))
    return scales


@triton.jit
def key_places(
    table, key, end, key_head, head_stride, row_size, block_stride, block_size: tl.constexpr
):
    """Find the elements of a cache from which on the keys before ``end`` lie, in the blocks of a row of the table."""
    block = tl.load(table + key // block_size, key < end, 0).to(tl.int64)
    return (block * block_stride + key_head * head_stride + key % block_size * row_size)[:, None]


@triton.jit
def _first_sums(sinks, head, counted, has_sinks: tl.constexpr):
    """Begin the highest score and the sum of weights with those of the sinks, where they are to be counted."""
    sink = tl.full(head.shape, float("-inf"), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head, counted, float("-inf")).to(tl.float32) * LOG2_E
    highest = tl.maximum(sink, LOWEST)
    return highest, tl.exp2(sink - highest)


@triton.jit
def _scores(q, keys, key, end, position, window, scale, cap: tl.constexpr):
    """Compute scores in units of log 2; those of keys that a position does not see are minus infinity."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if cap > 0.0:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / cap))))
    visible = (key < end) & (key <= position) & (key > position - window)
    return tl.where(visible, scores * LOG2_E, float("-inf"))


@triton.jit
def added_keys(attended, highest, total, scores, values, scales=1.0):
    """Add a tile of keys to the sums of values and of weights, relative to the highest score so far.

    Values are codes if they have ``scales``: rounded are the weights, as they are beside plain values.
    """
    higher = tl.maximum(highest, tl.max(scores, 1, keep_dims=True))
    weights, fading = tl.exp2(scores - higher), tl.exp2(highest - higher)
    shares = (weights * scales).to(values.dtype)
    attended = tl.dot(shares, values, attended * fading, input_precision="ieee")
    return attended, higher, total * fading + tl.sum(weights, 1, keep_dims=True)


@triton.jit
def store_part(out, log_sums, place, exists, attended, highest, total, head_size, parts):
    """Store rows of a result, or of one of several parts of it and how much it counts."""
    column = tl.arange(0, attended.shape[1])[None, :]
    attended /= tl.where(total == 0.0, 1.0, total)  # a part of which nothing is visible is zero
    tl.store(
        out + place * head_size + column,
        attended.to(out.dtype.element_ty),
        exists & (column < head_size),
    )
    if parts > 1:
        tl.store(log_sums + place, highest + tl.log2(total), exists)


@triton.jit(do_not_specialize=["sequences", "parts", "table_stride"])
def paged_attention_kernel(
    query,
    cache,
    block_table,
    starts,
    lengths,
    sinks,
    out,
    log_sums,
    sequences,
    heads,
    group,
    parts,
    head_size,
    scale,
    window,
    query_stride,
    table_stride,
    block_stride,
    scale_bytes: tl.constexpr,
    block_size: tl.constexpr,
    cap: tl.constexpr,
    has_sinks: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    part, block, key_heads = tl.program_id(0) % parts, tl.program_id(0) // parts, heads // group
    block, key_head = block // key_heads, block % key_heads
    sequence, first, tokens, position = block_of_queries(
        block, starts, lengths, sequences, tile_rows // group
    )
    if tokens <= 0:
        return
    begin, end = part_of_keys(position, position + tokens, window, part, parts, tile_keys)
    row, row_size = tl.arange(0, tile_rows)[:, None], head_size + scale_bytes
    token, head, exists = (
        (first + row // group).to(tl.int64),
        key_head * group + row % group,
        row < tokens * group,
    )
    query += token * query_stride + head * head_size
    q = loaded_rows(query, exists, head_size, query.dtype.scalar.element_ty, tile_columns)
    position += row // group
    highest, total = _first_sums(sinks, head, exists & (part == 0), has_sinks)
    attended = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(begin, end, tile_keys):
        key, table = start + tl.arange(0, tile_keys), block_table + sequence * table_stride
        rows = cache + key_places(
            table, key, end, key_head, block_size * row_size, row_size, block_stride, block_size
        )
        there = (key < end)[:, None]
        keys = loaded_rows(rows, there, head_size, q.dtype, tile_columns)
        key_scales = scale * _loaded_scales(rows, there, head_size, scale_bytes)
        rows += key_heads * block_size * row_size
        values = loaded_rows(rows, there, head_size, q.dtype, tile_columns)
        scales = _loaded_scales(rows, there, head_size, scale_bytes)
        scores = _scores(q, keys, key[None, :], end, position, window, key_scales, cap)
        attended, highest, total = added_keys(attended, highest, total, scores, values, scales)
    place = (token * heads + head) * parts + part
    store_part(out, log_sums, place, exists, attended, highest, total, head_size, parts)


@triton.jit(do_not_specialize=["count"])
def added_parts_kernel(
    parts,
    log_sums,
    out,
    count,
    width,
    most: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Add up the ``count`` parts of a row, each weighted by the sum of its weights."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, most)[:, None], tl.arange(0, tile_columns)[None, :]
    log_sum = tl.load(log_sums + row * count + part, part < count, float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum))
    x = tl.load(
        parts + (row * count + part) * width + column, (part < count) & (column < width), 0.0
    )
    result = tl.sum(x * weights, 0, keep_dims=True) / tl.sum(weights)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), column < width)


@triton.jit
def _store_row(x, row, exists, head_size, tile_columns: tl.constexpr):
    """Store rows of elements, or as codes with their scale behind them, as ``codes.quantize_rows`` makes them."""
    column = tl.arange(0, tile_columns)[None, :]
    inside = exists & (column < head_size)
    t = tl.load(x + column, inside, 0.0)
    dtype = row.dtype.scalar.element_ty
    if dtype == tl.int8 or dtype == tl.uint8:
        t = t.to(tl.float32)
        largest = tl.max(
            tl.where(tl.abs(t) < float("inf"), tl.abs(t), float("inf")), 1, keep_dims=True
        )
        scale = tl.maximum(tl.div_rn(largest, 127.0 if dtype == tl.int8 else 448.0), _SMALLEST)
        scale = tl.where(largest < float("inf"), scale, float("nan"))
        t = tl.where(largest < float("inf"), tl.div_rn(t, scale), 0.0)
        t = (
            t + _TO_WHOLE - _TO_WHOLE
            if dtype == tl.int8
            else t.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        )
        byte = tl.arange(0, _SCALE_BYTES)[None, :]
        bits = (scale.to(tl.int32, bitcast=True) >> (8 * byte)) & 0xFF
        tl.store(row + head_size + byte, bits.to(dtype), exists)
    tl.store(row + column, t.to(dtype), inside)


@triton.jit
def write_kv_cache_kernel(
    key,
    value,
    cache,
    slots,
    heads,
    head_size,
    key_stride,
    value_stride,
    block_stride,
    scale_bytes: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    blocks, row_size = tl.cdiv(heads, tile_rows), head_size + scale_bytes
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * tile_rows + tl.arange(0, tile_rows)[:, None]
    slot = tl.load(slots + token).to(tl.int64)
    row = (
        cache
        + slot // block_size * block_stride
        + (head * block_size + slot % block_size) * row_size
    )
    _store_row(
        key + token * key_stride + head * head_size, row, head < heads, head_size, tile_columns
    )
    row += heads * block_size * row_size
    _store_row(
        value + token * value_stride + head * head_size, row, head < heads, head_size, tile_columns
    )


def _fits(x: Tensor, cache: Tensor) -> bool:
    """Tell whether the kernels can take a cache and heads such as those of ``x``; else the native definition does.

    Heads must be narrow enough, and each block of the cache must be contiguous and share no memory with others.
    """
    if cache.dtype not in (x.dtype, *LARGEST_CODES) or x.shape[2] * x.element_size() > WIDEST_HEAD:
        return False
    if cache.dtype == torch.uint8 and not supports(torch.float8_e4m3fn):
        return False
    return entries_apart(cache)


def heads_together(x: Tensor) -> Tensor:
    """View ``[tokens, heads, head_size]`` as ``[tokens, heads · head_size]`` with adjacent columns, or copy it."""
    return as_rows(x, x.shape[1] * x.shape[2])


def _tile_of_heads(rows: int, head_size: int) -> Tile:
    """Return a tile of that many whole rows."""
    columns = max(16, power_of_two(head_size))  # fewer cannot be multiplied
    return Tile(rows, columns, 4 if rows * columns <= 8192 else 8)


def _tile_of_queries(query: Tensor, group: int, sequences: int) -> Tile:
    """Return a tile for tokens of one sequence, each with the heads of a group: a small one where sequences have few.

    It has at most 16 KiB, so that sums stay in registers, unless one token has more.
    """
    few = query.shape[0] * group <= 32 * sequences
    tile = _tile_of_heads(16, query.shape[2])
    rows = 16 if few else min(64, max(16, 16384 // (tile.columns * query.element_size())))
    return _tile_of_heads(max(rows, power_of_two(group)), query.shape[2])


@replaces(definitions.write_kv_cache)
def write_kv_cache(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    definitions.expect_writable(key, value, cache, slots)
    if not (_fits(key, cache) and value.dtype == key.dtype):
        definitions.write_kv_cache.native(key, value, cache, slots)
    elif key.numel():
        tokens, heads, head_size = key.shape
        keys, values = heads_together(key), heads_together(value)
        tile = _tile_of_heads(min(8, power_of_two(heads)), head_size)
        sizes = (heads, head_size, keys.stride(0), values.stride(0), cache.stride(0))
        constants = {"scale_bytes": cache.shape[4] - head_size, "block_size": cache.shape[3]}
        programs = tokens * triton.cdiv(heads, tile.rows)
        launch(
            write_kv_cache_kernel,
            programs,
            tile,
            keys,
            values,
            cache,
            slots.contiguous(),
            *sizes,
            **constants,
        )


@replaces(definitions.paged_attention)
def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    definitions.expect_pages(query, cache, block_table, query_start_loc, seq_lens)
    definitions.expect_settings(query, sliding_window, logits_soft_cap, sinks)
    if not _fits(query, cache):
        return definitions.paged_attention.native(
            query,
            cache,
            block_table,
            query_start_loc,
            seq_lens,
            scale,
            sliding_window,
            logits_soft_cap,
            sinks,
        )
    out = query.new_empty(query.shape)
    if out.numel():
        places = (block_table, query_start_loc.contiguous(), seq_lens.contiguous())
        window = UNBOUNDED if sliding_window is None else min(sliding_window, UNBOUNDED)
        _attend(out, query, cache, *places, scale, window, logits_soft_cap or 0.0, sinks)
    return out


def _attend(
    out: Tensor,
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    cap: float,
    sinks: Tensor | None,
) -> None:
    """Launch the kernel, and the one that adds up parts where the programs are too few to fill a GPU."""
    tokens, heads, head_size = query.shape
    key_heads, block_size, sequences = cache.shape[2], cache.shape[3], lengths.shape[0]
    group = heads // key_heads
    tile = _tile_of_queries(query, group, sequences)
    programs = blocks_at_most(tokens, sequences, tile.rows // group) * key_heads
    parts = parts_of_keys(programs, min(block_table.shape[1] * block_size, window))
    results, log_sums = out, out
    if parts > 1:
        results = query.new_empty((tokens, heads, parts, head_size), dtype=torch.float32)
        log_sums = query.new_empty((tokens, heads, parts), dtype=torch.float32)
    rows, table = heads_together(query), as_rows(block_table, block_table.shape[1])
    operands = (
        cache,
        table,
        starts,
        lengths,
        query if sinks is None else sinks.contiguous(),
        results,
        log_sums,
    )
    sizes = (sequences, heads, group, parts, head_size, scale, window)
    strides = (rows.stride(0), table.stride(0), cache.stride(0))
    constants = {"scale_bytes": cache.shape[4] - head_size, "block_size": block_size, "cap": cap}
    constants |= {"has_sinks": sinks is not None, "tile_keys": _tile_of_keys(tile, query)}
    launch(
        paged_attention_kernel,
        programs * parts,
        tile,
        rows,
        *operands,
        *sizes,
        *strides,
        **constants,
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
            head_size,
            most=MOST_PARTS,
        )


def parts_of_keys(programs: int, keys: int) -> int:
    """Return how many programs are to divide so many keys among them, where there are so many without that."""
    return max(1, min(MOST_PARTS, PROGRAMS // programs, keys // PART))


def _tile_of_keys(tile: Tile, query: Tensor) -> int:
    """Return how many keys a program reads at a time: 8 KiB of them, but as many as can be multiplied."""
    return min(64, max(16, 8192 // (tile.columns * query.element_size())))
