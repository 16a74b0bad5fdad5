"""Triton kernels for quantization to 8-bit floats. Maths and arguments are in ``functional``.

One program computes and uses the scale of a token or group. A scale per tensor takes two launches:
each program of the first stores its largest magnitude, and every program of the second reduces all
of these.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from opgraft.compat.tracing import constant_while_tracing
from opgraft.ops.activation.triton import tile_at
from opgraft.ops.checks import expect_same_device
from opgraft.ops.quantization import functional as definitions
from opgraft.ops.triton_launch import INTERPRETED, WIDEST, Tile, as_rows, launch, replaces, tile_of
from torch import Tensor
from triton.compiler import make_backend
from triton.runtime import driver

__all__ = ["quant_fp8_static", "quant_fp8_dynamic"]

NAMES = MappingProxyType(
    {
        torch.float8_e4m3fn: "fp8e4nv",
        torch.float8_e4m3fnuz: "fp8e4b8",
        torch.float8_e5m2: "fp8e5",
        torch.float8_e5m2fnuz: "fp8e5b16",
    }
)
"""Triton's names of the dtypes."""

PARTIALS = 1024
"""The most programs of ``largest_kernel``: several for every processor."""


@triton.jit
def magnitude(t):
    t = t.to(tl.float32)
    # NaN does not count for a scale.
    return tl.where(t == t, tl.abs(t), 0.0)


@triton.jit
def scale_of(largest, bound, highest, smallest, bounded: tl.constexpr, powers_of_two: tl.constexpr):
    """Return the scale from the magnitude ``largest`` to ``highest``, at least ``smallest``."""
    if bounded:
        most = tl.load(bound).to(tl.float32)
        # A bound of NaN makes the scale NaN.
        largest = tl.where(largest <= most, largest, most)

    scale = tl.div_rn(largest, highest)
    scale = tl.where(scale < smallest, smallest, scale)
    if powers_of_two:
        # Up to the next power of two: any bit of the mantissa carries into the exponent.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_quantized(q, t, scale, highest, inside):
    t = t.to(tl.float32) / scale
    # Not min and max, as both drop NaN.
    t = tl.where(t < -highest, -highest, t)
    t = tl.where(t > highest, highest, t)
    tl.store(q, t.to(q.dtype.element_ty), inside)


@triton.jit
def _rows_of_group(groups, tile_rows: tl.constexpr):
    """Return the rows and the group of this program. A program has one group of some rows."""
    # In int64, as the place of an element may exceed 2^31.
    first = (tl.program_id(0) // groups).to(tl.int64) * tile_rows
    row = first + tl.arange(0, tile_rows)[:, None]
    group = tl.program_id(0) % groups
    return row, group


@triton.jit
def group_quant_kernel(
    x,
    q,
    scales,
    bound,
    rows,
    columns,
    width,
    groups,
    stride,
    highest,
    smallest,
    bounded: tl.constexpr,
    powers_of_two: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Quantise one group of ``width`` elements in each of several rows, by a scale each.

    The last group of a row may have fewer elements.
    """
    row, group = _rows_of_group(groups, tile_rows)

    first = group * width
    end = tl.minimum(columns, first + width)
    column = first + tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (column < end)

    t = tl.load(x + row * stride + column, inside, 0.0)
    largest = tl.max(magnitude(t), 1, keep_dims=True)
    scale = scale_of(largest, bound, highest, smallest, bounded, powers_of_two)

    tl.store(scales + row * groups + group, scale, row < rows)
    store_quantized(q + row * columns + column, t, scale, highest, inside)


@triton.jit
def wide_group_quant_kernel(
    x,
    q,
    scales,
    bound,
    rows,
    columns,
    width,
    groups,
    stride,
    highest,
    smallest,
    bounded: tl.constexpr,
    powers_of_two: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute as ``group_quant_kernel``, in two passes of several steps over the group."""
    row, group = _rows_of_group(groups, tile_rows)
    is_row = row < rows
    first = group * width
    end = tl.minimum(columns, first + width)

    x += row * stride
    q += row * columns
    step = tl.arange(0, tile_columns)[None, :]

    magnitudes = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(first, end, tile_columns):
        column = start + step
        t = tl.load(x + column, is_row & (column < end), 0.0)
        magnitudes = tl.maximum(magnitudes, magnitude(t))

    largest = tl.max(magnitudes, 1, keep_dims=True)
    scale = scale_of(largest, bound, highest, smallest, bounded, powers_of_two)
    tl.store(scales + row * groups + group, scale, is_row)

    for start in range(first, end, tile_columns):
        column = start + step
        inside = is_row & (column < end)
        t = tl.load(x + column, inside, 0.0)
        store_quantized(q + column, t, scale, highest, inside)


@triton.jit
def largest_kernel(
    x,
    partials,
    rows,
    width,
    stride,
    tiles,
    programs,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Store the largest magnitude in every ``programs``-th tile."""
    program = tl.program_id(0)
    magnitudes = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in range(program, tiles, programs):
        row, column, inside = tile_at(tile, rows, width, tile_rows, tile_columns)
        t = tl.load(x + row * stride + column, inside, 0.0)
        magnitudes = tl.maximum(magnitudes, magnitude(t))
    tl.store(partials + program, tl.max(magnitudes))


@triton.jit
def tensor_quant_kernel(
    x,
    q,
    scale,
    partials,
    rows,
    width,
    stride,
    highest,
    smallest,
    count,
    powers_of_two: tl.constexpr,
    most: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Quantise a tile by the scale of the whole tensor."""
    program = tl.program_id(0)
    part = tl.arange(0, most)
    largest = tl.max(tl.load(partials + part, part < count, 0.0))
    value = scale_of(largest, partials, highest, smallest, False, powers_of_two)

    # Every program computes the same scale.
    if program == 0:
        tl.store(scale, value)
    row, column, inside = tile_at(program, rows, width, tile_rows, tile_columns)
    t = tl.load(x + row * stride + column, inside, 0.0)
    store_quantized(q + row * width + column, t, value, highest, inside)


@triton.jit
def given_scale_kernel(
    x,
    q,
    scales,
    rows,
    width,
    stride,
    scale_stride,
    scale_column_stride,
    group_rows,
    group_columns,
    highest,
    by_row: tl.constexpr,
    by_column: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Quantise a tile by given scales."""
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)

    if by_row:
        # No scale lies behind the last row.
        scales += tl.where(inside, row, 0) // group_rows * scale_stride
    if by_column:
        scales += tl.where(inside, column, 0) // group_columns * scale_column_stride

    scale = tl.load(scales).to(tl.float32)
    t = tl.load(x + row * stride + column, inside, 0.0)
    store_quantized(q + row * width + column, t, scale, highest, inside)


@functools.cache
def _supported() -> tuple[str, ...]:
    """Return Triton's names of the 8-bit floats for stores on the current device."""
    if INTERPRETED:
        return ("fp8e4nv", "fp8e5")
    backend = make_backend(driver.active.get_current_target())
    return tuple(backend.parse_options({}).supported_fp8_dtypes)


@constant_while_tracing
def supports(dtype: torch.dtype) -> bool:
    """Return True if kernels can convert to an 8-bit float on the current device."""
    return NAMES[dtype] in _supported()


def quantizable(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the kernels take ``x``. The native definition takes, or refuses, the rest."""
    if not x.is_floating_point() or x.dim() == 0 or x.numel() == 0:
        return False
    return dtype in NAMES and supports(dtype)


def _tiles(x: Tensor, *, as_one_row: bool) -> tuple[Tensor, Tile, int]:
    """Return ``x`` as rows, a tile, and the number of tiles."""

    width = x.numel() if as_one_row and x.is_contiguous() else x.shape[-1]
    rows = as_rows(x, width)
    tile = Tile(1, 2048, 4) if rows.shape[0] == 1 else tile_of(width, 2048, 2048)

    down = triton.cdiv(rows.shape[0], tile.rows)
    across = triton.cdiv(rows.shape[1], tile.columns)
    return rows, tile, down * across


@replaces(definitions.quant_fp8_dynamic)
def quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    definitions.expect_dynamic_group_shape("quant_fp8_dynamic", group_shape)
    definitions.expect_scale_ub("quant_fp8_dynamic", scale_ub, group_shape)
    if scale_ub is not None:
        expect_same_device("quant_fp8_dynamic", "scale_ub", scale_ub, "x", x)
    per_channel = group_shape[0] != 1 and group_shape[1] != -1
    if per_channel or not quantizable(x, dtype):
        return definitions.quant_fp8_dynamic.native(x, group_shape, scale_ub, use_ue8m0, dtype)

    q = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(definitions.scale_shape(x.shape, group_shape), dtype=torch.float32)
    limits = (definitions.largest_code(dtype), definitions.smallest_scale(dtype))
    if group_shape[0] == -1:
        _per_tensor(x, q, scale, limits, use_ue8m0)
    else:
        _per_group(x, q, scale, scale_ub, group_shape[1], limits, use_ue8m0)
    return q, scale


def _per_tensor(
    x: Tensor, q: Tensor, scale: Tensor, limits: tuple[float, float], powers_of_two: bool
) -> None:
    rows, tile, tiles = _tiles(x, as_one_row=True)
    count = min(tiles, PARTIALS)
    partials = x.new_empty(count, dtype=torch.float32)

    sizes = (*rows.shape, rows.stride(0))
    launch(largest_kernel, count, tile, rows, partials, *sizes, tiles, count)

    # This launch waits for the one before, so its programs read all the partial results.
    launch(
        tensor_quant_kernel,
        tiles,
        tile,
        rows,
        q,
        scale,
        partials,
        *sizes,
        *limits,
        count,
        powers_of_two=powers_of_two,
        most=PARTIALS,
    )


def _per_group(
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    scale_ub: Tensor | None,
    width: int,
    limits: tuple[float, float],
    powers_of_two: bool,
) -> None:
    columns = x.shape[-1]
    width = columns if width == -1 else min(width, columns)
    # Each group becomes a row, so that a tile may hold several groups.
    if x.is_contiguous() and columns % width == 0:
        columns = width

    rows = as_rows(x, columns)
    groups = triton.cdiv(columns, width)
    fits_tile = width <= WIDEST
    tile = tile_of(width, 2048, WIDEST if fits_tile else 4096)

    launch(
        group_quant_kernel if fits_tile else wide_group_quant_kernel,
        triton.cdiv(rows.shape[0], tile.rows) * groups,
        tile,
        rows,
        q,
        scale,
        # A kernel needs a pointer, and without a bound reads nothing there.
        rows if scale_ub is None else scale_ub,
        rows.shape[0],
        columns,
        width,
        groups,
        rows.stride(0),
        *limits,
        bounded=scale_ub is not None,
        powers_of_two=powers_of_two,
    )


@replaces(definitions.quant_fp8_static)
def quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    definitions.expect_group_shape("quant_fp8_static", group_shape)
    expect_same_device("quant_fp8_static", "scale", scale, "x", x)
    if not quantizable(x, dtype):
        return definitions.quant_fp8_static.native(x, scale, group_shape, dtype)

    tokens = math.prod(x.shape[:-1])
    height = tokens if group_shape[0] == -1 else group_shape[0]
    width = x.shape[-1] if group_shape[1] == -1 else group_shape[1]

    down = triton.cdiv(tokens, height)
    across = triton.cdiv(x.shape[-1], width)
    full = definitions.scale_shape(x.shape, group_shape)
    # The definition refuses other shapes, with a message.
    if not _fits(scale, full, (down, across)):
        return definitions.quant_fp8_static.native(x, scale, group_shape, dtype)

    q = x.new_empty(x.shape, dtype=dtype)
    scales = scale.reshape(down, across)
    matrix, tile, tiles = _tiles(x, as_one_row=down == across == 1)
    launch(
        given_scale_kernel,
        tiles,
        tile,
        matrix,
        q,
        scales,
        *matrix.shape,
        matrix.stride(0),
        *scales.stride(),
        height,
        width,
        definitions.largest_code(dtype),
        by_row=down > 1,
        by_column=across > 1,
    )
    return q


def _fits(scale: Tensor, full: tuple[int, ...], flat: tuple[int, int]) -> bool:
    """Return True if a scale has one of two shapes, or ``flat`` without ones."""
    without_ones = tuple(extent for extent in flat if extent != 1)
    return tuple(scale.shape) in (full, flat, without_ones)
