"""Triton kernels for attention over pages. Their maths and arguments are in ``paged``.

A program attends with some tokens of one sequence, by all query heads of one key head: the program
reads keys and values once for these heads. The program finds the sequence by bisection. So the
host launches from shapes alone and waits for no length. One pass over the keys keeps scores and
sums in float32 (online softmax, arXiv:1805.02867).

If a batch has too few programs to fill a GPU, several programs divide the keys of one, and a second
kernel adds up their parts, as flash decoding does. Rows of codes are decoded as a program reads
them. Nothing is specialised on numbers that change from step to step, so a step seldom waits for a
compilation.
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
"""Programs that fill any GPU. A batch with fewer programs divides its keys."""

PART = 256
"""The fewest keys for a program of their own."""

MOST_PARTS = 64
"""The most programs for the keys of one: the second kernel adds up all the parts at once."""

WIDEST_HEAD = 1024
"""Bytes of the widest head. Some GPUs have 64 KiB of shared memory for tiles of keys and values."""

UNBOUNDED = 2**31 - 1
"""The window of attention without a window."""

# Finite, as the difference of two infinities is NaN.
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
# To add and then subtract this number rounds a small number to nearest even.
_TO_WHOLE = tl.constexpr(1.5 * 2**23)


@triton.jit
def share_of_program(starts, lengths, sequences, parts, groups, queries):
    """Find the share of this program: some tokens of one sequence, by one group of heads.

    Returns:
        The part of the keys, the group of heads, the sequence, its first token, the number of
        tokens, and the position of the first token in the sequence.
    """
    program = tl.program_id(0)
    part = program % parts
    group = program // parts % groups
    block = program // parts // groups

    sequence, first, end = block_of_segment(block, starts, sequences, queries)
    count = tl.minimum(queries, end - first)
    position = tl.load(lengths + sequence) - end + first
    return part, group, sequence, first, count, position


@triton.jit
def part_of_keys(first, count, window, part, parts, tile_keys: tl.constexpr):
    """Return the bounds of one part of the keys for ``count`` tokens from ``first`` on."""
    end = first + count
    lowest = tl.maximum(first - window + 1, 0)
    size = tl.cdiv(tl.cdiv(end - lowest, tile_keys), parts) * tile_keys
    part_end = tl.minimum(lowest + (part + 1) * size, end)
    return lowest + part * size, part_end


@triton.jit
def loaded_rows(rows, exists, head_size, dtype: tl.constexpr, tile_columns: tl.constexpr):
    """Load existing rows in ``dtype``; the rest is zero. Every dtype holds codes exactly."""
    column = tl.arange(0, tile_columns)[None, :]
    x = tl.load(rows + column, exists & (column < head_size), 0)
    if x.dtype == tl.uint8:
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif x.dtype == tl.int8:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _loaded_scales(rows, exists, head_size, scale_bytes: tl.constexpr):
    """Load the scales behind the codes of rows, ``[1, rows]``; 1 for rows of elements."""
    scales = 1.0
    if scale_bytes > 0:
        # Byte by byte, as a row may begin at any address.
        byte = tl.arange(0, _SCALE_BYTES)[None, :]
        loaded = tl.load(rows + head_size + byte, exists, 0)
        bits = (loaded.to(tl.int32) & 0xFF) << (8 * byte)
        scale = tl.sum(bits, 1, keep_dims=True).to(tl.float32, bitcast=True)
        scales = tl.trans(scale)
    return scales


@triton.jit
def _loaded_keys_and_values(
    rows,
    exists,
    to_values,
    head_size,
    scale_bytes: tl.constexpr,
    dtype: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Load existing keys and their scales, then values and theirs, ``to_values`` elements behind.

    Elements without codes have the scale 1.
    """
    exists = exists[:, None]
    keys = loaded_rows(rows, exists, head_size, dtype, tile_columns)
    key_scales = _loaded_scales(rows, exists, head_size, scale_bytes)

    rows += to_values
    values = loaded_rows(rows, exists, head_size, dtype, tile_columns)
    scales = _loaded_scales(rows, exists, head_size, scale_bytes)
    return keys, key_scales, values, scales


@triton.jit
def key_places(table, key, end, row_size, block_stride, block_size: tl.constexpr):
    """Return the first element of each key before ``end``, by the blocks in a row of the table."""
    block = tl.load(table + key // block_size, key < end, 0).to(tl.int64)
    return (block * block_stride + key % block_size * row_size)[:, None]


@triton.jit
def rows_of_queries(first, count, group_of_heads, group, tile_rows: tl.constexpr):
    """Return the tokens and heads of the rows in a tile, ``[rows, 1]`` each.

    Returns:
        The offset of each row's token from ``first``, the token, the head, and true if a token
        exists for the row.
    """
    row = tl.arange(0, tile_rows)[:, None]
    offset = row // group
    token = (first + offset).to(tl.int64)
    head = group_of_heads * group + row % group
    exists = row < count * group
    return offset, token, head, exists


@triton.jit
def _first_sums(sinks, head, counted, has_sinks: tl.constexpr):
    """Return the first highest score and sum of weights: those of the counted sinks."""
    sink = tl.full(head.shape, float("-inf"), tl.float32)
    if has_sinks:
        # The interpreter of Triton 3.9 computes numbers of ``counted``, and takes none for a mask.
        sink = tl.load(sinks + head, counted != 0, float("-inf")).to(tl.float32) * LOG2_E
    highest = tl.maximum(sink, LOWEST)
    return highest, tl.exp2(sink - highest)


@triton.jit
def scores_of(q, keys, key, end, position, window, scale, cap: tl.constexpr):
    """Return scores in units of log 2; minus infinity for a key outside the view of a position."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if cap > 0.0:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / cap))))
    key = key[None, :]
    visible = (key < end) & (key <= position) & (key > position - window)
    return tl.where(visible, scores * LOG2_E, float("-inf"))


@triton.jit
def added_keys(attended, highest, total, scores, values, scales=1.0):
    """Add a tile of keys to the sums of values and weights, relative to the highest score so far.

    With ``scales``, values are codes: the weights are rounded, as they are for plain values.
    """
    higher = tl.maximum(highest, tl.max(scores, 1, keep_dims=True))
    weights = tl.exp2(scores - higher)
    fading = tl.exp2(highest - higher)
    shares = (weights * scales).to(values.dtype)
    attended = tl.dot(shares, values, attended * fading, input_precision="ieee")
    return attended, higher, total * fading + tl.sum(weights, 1, keep_dims=True)


@triton.jit
def store_part(out, log_sums, row, part, parts, exists, attended, highest, total, head_size):
    """Store rows of a result; for one of several parts, store its sum of weights too."""
    place = row * parts + part
    column = tl.arange(0, attended.shape[1])[None, :]

    # A part without a visible key is zero.
    attended /= tl.where(total == 0.0, 1.0, total)
    stored = attended.to(out.dtype.element_ty)
    tl.store(out + place * head_size + column, stored, exists & (column < head_size))
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
    key_heads = heads // group
    part, key_head, sequence, first, count, position = share_of_program(
        starts, lengths, sequences, parts, key_heads, tile_rows // group
    )
    if count <= 0:
        return

    begin, end = part_of_keys(position, count, window, part, parts, tile_keys)
    offset, token, head, exists = rows_of_queries(first, count, key_head, group, tile_rows)
    query += token * query_stride + head * head_size
    q = loaded_rows(query, exists, head_size, query.dtype.scalar.element_ty, tile_columns)
    position += offset

    # One part alone counts the sinks, as parts are added up.
    highest, total = _first_sums(sinks, head, exists & (part == 0), has_sinks)
    attended = tl.zeros((tile_rows, tile_columns), tl.float32)

    table = block_table + sequence * table_stride
    row_size = head_size + scale_bytes
    head_stride = block_size * row_size
    cache += key_head * head_stride
    for start in range(begin, end, tile_keys):
        key = start + tl.arange(0, tile_keys)
        places = key_places(table, key, end, row_size, block_stride, block_size)
        keys, key_scales, values, scales = _loaded_keys_and_values(
            cache + places,
            key < end,
            key_heads * head_stride,
            head_size,
            scale_bytes,
            q.dtype,
            tile_columns,
        )
        scores = scores_of(q, keys, key, end, position, window, scale * key_scales, cap)
        attended, highest, total = added_keys(attended, highest, total, scores, values, scales)

    row = token * heads + head
    store_part(out, log_sums, row, part, parts, exists, attended, highest, total, head_size)


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
    part = tl.arange(0, most)[:, None]
    column = tl.arange(0, tile_columns)[None, :]

    place = row * count + part
    log_sum = tl.load(log_sums + place, part < count, float("-inf"))
    # Relative to the greatest sum, so that no exponential overflows.
    weights = tl.exp2(log_sum - tl.max(log_sum))

    x = tl.load(parts + place * width + column, (part < count) & (column < width), 0.0)
    result = tl.sum(x * weights, 0, keep_dims=True) / tl.sum(weights)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), column < width)


@triton.jit
def _store_row(x, row, exists, head_size, tile_columns: tl.constexpr):
    """Store rows of elements, or of codes with their scale, as ``codes.quantize_rows`` does."""
    column = tl.arange(0, tile_columns)[None, :]
    inside = exists & (column < head_size)
    t = tl.load(x + column, inside, 0.0)

    dtype = row.dtype.scalar.element_ty
    if dtype == tl.int8 or dtype == tl.uint8:
        t, scale = _codes(t.to(tl.float32), dtype == tl.int8)
        byte = tl.arange(0, _SCALE_BYTES)[None, :]
        bits = (scale.to(tl.int32, bitcast=True) >> (8 * byte)) & 0xFF
        tl.store(row + head_size + byte, bits.to(dtype), exists)
    tl.store(row + column, t.to(dtype), inside)


@triton.jit
def _codes(t, is_int8: tl.constexpr):
    """Return the codes of float32 rows, and their scales: NaN for a row with a not finite one."""
    # A comparison with NaN is false, so NaN counts as infinity.
    magnitude = tl.where(tl.abs(t) < float("inf"), tl.abs(t), float("inf"))
    largest = tl.max(magnitude, 1, keep_dims=True)
    is_finite = largest < float("inf")

    scale = tl.maximum(tl.div_rn(largest, 127.0 if is_int8 else 448.0), _SMALLEST)
    scale = tl.where(is_finite, scale, float("nan"))
    quotient = tl.where(is_finite, tl.div_rn(t, scale), 0.0)

    if is_int8:
        codes = quotient + _TO_WHOLE - _TO_WHOLE
    else:
        number = quotient.to(tl.float8e4nv)
        codes = number.to(tl.uint8, bitcast=True)
    return codes, scale


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
    blocks = tl.cdiv(heads, tile_rows)
    row_size = head_size + scale_bytes
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * tile_rows + tl.arange(0, tile_rows)[:, None]
    exists = head < heads

    key += token * key_stride + head * head_size
    value += token * value_stride + head * head_size

    slot = tl.load(slots + token).to(tl.int64)
    row_in_block = head * block_size + slot % block_size
    row = cache + slot // block_size * block_stride + row_in_block * row_size
    _store_row(key, row, exists, head_size, tile_columns)

    # A block holds the values of all heads behind the keys of all heads.
    row += heads * block_size * row_size
    _store_row(value, row, exists, head_size, tile_columns)


def _kernel_takes(x: Tensor, cache: Tensor) -> bool:
    """Return True if the kernels take the cache and heads like those of ``x``.

    Heads must be narrow enough. Each block of the cache must be contiguous, and share no memory
    with another. Otherwise the native definition runs.
    """
    if cache.dtype not in (x.dtype, *LARGEST_CODES):
        return False
    if x.shape[2] * x.element_size() > WIDEST_HEAD:
        return False
    if cache.dtype == torch.uint8 and not supports(torch.float8_e4m3fn):
        return False
    return entries_apart(cache)


def heads_together(x: Tensor) -> Tensor:
    """Return ``[tokens, heads, head_size]`` as ``[tokens, heads · head_size]``: a view or a copy.

    Neighbouring columns lie next to each other in memory.
    """
    return as_rows(x, x.shape[1] * x.shape[2])


def _tile_of_heads(rows: int, head_size: int) -> Tile:
    """Return a tile of ``rows`` whole rows."""
    # The product of two tiles needs at least 16 columns.
    columns = max(16, power_of_two(head_size))
    warps = 4 if rows * columns <= 8192 else 8
    return Tile(rows, columns, warps)


def tile_of_queries(query: Tensor, group: int, sequences: int) -> Tile:
    """Return a tile for tokens of one sequence, each with the heads of a group.

    Sequences with few tokens get a small tile. A tile has at most 16 KiB, so
    that sums stay in registers, unless one token alone has more.
    """
    tokens, _, head_size = query.shape
    has_few = tokens * group <= 32 * sequences
    rows = 16
    if not has_few:
        row_bytes = _tile_of_heads(16, head_size).columns * query.element_size()
        rows = min(64, max(16, 16384 // row_bytes))
    return _tile_of_heads(max(rows, power_of_two(group)), head_size)


@replaces(definitions.write_kv_cache)
def write_kv_cache(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    definitions.expect_writable(key, value, cache, slots)
    if not (_kernel_takes(key, cache) and value.dtype == key.dtype):
        definitions.write_kv_cache.native(key, value, cache, slots)
        return
    if not key.numel():
        return

    tokens, heads, head_size = key.shape
    keys = heads_together(key)
    values = heads_together(value)
    tile = _tile_of_heads(min(8, power_of_two(heads)), head_size)
    launch(
        write_kv_cache_kernel,
        tokens * triton.cdiv(heads, tile.rows),
        tile,
        keys,
        values,
        cache,
        slots.contiguous(),
        heads,
        head_size,
        keys.stride(0),
        values.stride(0),
        cache.stride(0),
        scale_bytes=cache.shape[4] - head_size,
        block_size=cache.shape[3],
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
    if not _kernel_takes(query, cache):
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
    if not out.numel():
        return out

    starts = query_start_loc.contiguous()
    lengths = seq_lens.contiguous()
    window = UNBOUNDED if sliding_window is None else min(sliding_window, UNBOUNDED)
    cap = logits_soft_cap or 0.0

    _attend(out, query, cache, block_table, starts, lengths, scale, window, cap, sinks)
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
    """Launch the kernel; if several programs divide keys, launch the kernel for their parts too."""
    tokens, heads, head_size = query.shape
    _, _, key_heads, block_size, row_size = cache.shape
    sequences = lengths.shape[0]
    group = heads // key_heads

    tile = tile_of_queries(query, group, sequences)
    programs = blocks_at_most(tokens, sequences, tile.rows // group) * key_heads
    most_keys = min(block_table.shape[1] * block_size, window)
    parts = parts_of_keys(programs, most_keys)

    # A kernel needs pointers, and writes no sums for one part alone.
    results = log_sums = out
    if parts > 1:
        results = query.new_empty((tokens, heads, parts, head_size), dtype=torch.float32)
        log_sums = query.new_empty((tokens, heads, parts), dtype=torch.float32)

    rows = heads_together(query)
    table = as_rows(block_table, block_table.shape[1])

    launch(
        paged_attention_kernel,
        programs * parts,
        tile,
        rows,
        cache,
        table,
        starts,
        lengths,
        query if sinks is None else sinks.contiguous(),
        results,
        log_sums,
        sequences,
        heads,
        group,
        parts,
        head_size,
        scale,
        window,
        rows.stride(0),
        table.stride(0),
        cache.stride(0),
        scale_bytes=row_size - head_size,
        block_size=block_size,
        cap=cap,
        has_sinks=sinks is not None,
        tile_keys=tile_of_keys(tile, query),
    )
    if parts > 1:
        add_parts(results, log_sums, out, tile, parts)


def add_parts(results: Tensor, log_sums: Tensor, out: Tensor, tile: Tile, parts: int) -> None:
    """Launch the kernel that adds up ``parts`` results of each row into ``out``.

    Args:
        results: ``[tokens, heads, parts, size]``, float32.
        log_sums: ``[tokens, heads, parts]``, float32: the logarithm of each part's sum of weights.
        out: ``[tokens, heads, size]``.
        tile: the tile of the parts; each program adds up one row of the tile's width.
        parts: the number of parts.
    """
    tokens, heads, size = out.shape
    one_row = tile._replace(rows=1)
    launch(
        added_parts_kernel,
        tokens * heads,
        one_row,
        results,
        log_sums,
        out,
        parts,
        size,
        most=MOST_PARTS,
    )


def parts_of_keys(programs: int, keys: int) -> int:
    """Return the number of parts to divide ``keys`` keys of each of ``programs`` programs into."""
    return max(1, min(MOST_PARTS, PROGRAMS // programs, keys // PART))


def tile_of_keys(tile: Tile, query: Tensor) -> int:
    """Return the keys that a program reads at a time: 8 KiB, within 16 to 64 keys."""
    return min(64, max(16, 8192 // (tile.columns * query.element_size())))
