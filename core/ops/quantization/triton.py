"""Triton kernels for quantization to 8-bit floats. Maths and arguments are in ``opgraft.ops.quantization.functional``.

A scale per token or group is found and used by one program. A scale per tensor takes two launches: the first leaves the
largest magnitude of each of its programs, which every program of the second reduces further.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

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

NAMES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e5m2fnuz: "fp8e5b16",
}
"""The names that Triton has for the dtypes."""

PARTIALS = 1024
"""Programs among which the largest magnitude of a tensor is sought: enough for every processor several times."""


@triton.jit
def _magnitude(t):
    t = t.to(tl.float32)
    return tl.where(t == t, tl.abs(t), 0.0)  # NaN has no part in a scale


@triton.jit
def _scale_of(
    largest, bound, highest, smallest, bounded: tl.constexpr, powers_of_two: tl.constexpr
):
    """Return the scale that maps the magnitude ``largest`` to ``highest``, at least ``smallest``."""
    if bounded:
        most = tl.load(bound).to(tl.float32)
        # A bound that is NaN makes the scale NaN.
        largest = tl.where(largest <= most, largest, most)
    scale = tl.div_rn(largest, highest)
    scale = tl.where(scale < smallest, smallest, scale)
    if powers_of_two:
        # Up to the next power of two: any bit of the mantissa carries into the exponent.
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(
            tl.float32, bitcast=True
        )
    return scale


@triton.jit
def _store_quantized(q, t, scale, highest, inside):
    t = t.to(tl.float32) / scale
    # Not min and max, which drop NaN.
    t = tl.where(t > highest, highest, tl.where(t < -highest, -highest, t))
    tl.store(q, t.to(q.dtype.element_ty), inside)


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
    """Quantise groups of ``width`` elements of a row by a scale each, the last perhaps of fewer; a tile has several."""
    row = (tl.program_id(0) // groups).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    group = tl.program_id(0) % groups
    column = group * width + tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (column < columns) & (column < (group + 1) * width)
    t = tl.load(x + row * stride + column, inside, 0.0)
    largest = tl.max(_magnitude(t), 1, keep_dims=True)
    scale = _scale_of(largest, bound, highest, smallest, bounded, powers_of_two)
    tl.store(scales + row * groups + group, scale, row < rows)
    _store_quantized(q + row * columns + column, t, scale, highest, inside)


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
    """Compute as ``group_quant_kernel``, going over its groups in steps, twice."""
    row = (tl.program_id(0) // groups).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    group = tl.program_id(0) % groups
    first, end = group * width, tl.minimum(columns, (group + 1) * width)
    largest = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(first, end, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < end)
        largest = tl.maximum(largest, _magnitude(tl.load(x + row * stride + column, inside, 0.0)))
    scale = _scale_of(
        tl.max(largest, 1, keep_dims=True), bound, highest, smallest, bounded, powers_of_two
    )
    tl.store(scales + row * groups + group, scale, row < rows)
    for start in range(first, end, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < end)
        t = tl.load(x + row * stride + column, inside, 0.0)
        _store_quantized(q + row * columns + column, t, scale, highest, inside)


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
    """Write the largest magnitude among every ``programs``-th tile to the partial of this program."""
    largest = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in range(tl.program_id(0), tiles, programs):
        row, column, inside = tile_at(tile, rows, width, tile_rows, tile_columns)
        largest = tl.maximum(largest, _magnitude(tl.load(x + row * stride + column, inside, 0.0)))
    tl.store(partials + tl.program_id(0), tl.max(largest))


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
    part = tl.arange(0, most)
    largest = tl.max(tl.load(partials + part, part < count, 0.0))
    value = _scale_of(largest, partials, highest, smallest, False, powers_of_two)
    if tl.program_id(0) == 0:
        tl.store(scale, value)
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    t = tl.load(x + row * stride + column, inside, 0.0)
    _store_quantized(q + row * width + column, t, value, highest, inside)


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
    row, column, inside = tile_at(tl.program_id(0), rows, width, tile_rows, tile_columns)
    if by_row:
        # No scale lies behind the last row.
        scales += tl.where(inside, row, 0) // group_rows * scale_stride
    if by_column:
        scales += tl.where(inside, column, 0) // group_columns * scale_column_stride
    t = tl.load(x + row * stride + column, inside, 0.0)
    _store_quantized(q + row * width + column, t, tl.load(scales).to(tl.float32), highest, inside)


@functools.cache
def _supported() -> tuple[str, ...]:
    """Return the 8-bit floats, by Triton's names, that kernels can write on the current device."""
    if INTERPRETED:
        return ("fp8e4nv", "fp8e5")
    return tuple(
        make_backend(driver.active.get_current_target()).parse_options({}).supported_fp8_dtypes
    )


@constant_while_tracing
def supports(dtype: torch.dtype) -> bool:
    """Tell whether kernels can convert to an 8-bit float on the current device."""
    return NAMES[dtype] in _supported()


def _quantizable(x: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the kernels can take ``x``; else the native definition computes it, or says what is wrong."""
    return (
        x.is_floating_point()
        and x.dim() > 0
        and x.numel() > 0
        and dtype in NAMES
        and supports(dtype)
    )


def _tiles(x: Tensor, *, as_one_row: bool) -> tuple[Tensor, Tile, int]:
    """Return ``x`` as rows, the tile to go over it by, and how many of them there are."""
    width = x.numel() if as_one_row and x.is_contiguous() else x.shape[-1]
    rows = as_rows(x, width)
    tile = Tile(1, 2048, 4) if rows.shape[0] == 1 else tile_of(width, 2048, 2048)
    return (
        rows,
        tile,
        triton.cdiv(rows.shape[0], tile.rows) * triton.cdiv(rows.shape[1], tile.columns),
    )


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
    if per_channel or not _quantizable(x, dtype):
        return definitions.quant_fp8_dynamic.native(x, group_shape, scale_ub, use_ue8m0, dtype)
    q = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(definitions.scale_shape(x.shape, group_shape), dtype=torch.float32)
    limits = (definitions.FP8_MAX[dtype], definitions.smallest_scale(dtype))
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
    constants = {"powers_of_two": powers_of_two, "most": PARTIALS}
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
        **constants,
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
    if x.is_contiguous() and columns % width == 0:
        columns = width  # each group is a row
    rows, groups = as_rows(x, columns), triton.cdiv(columns, width)
    whole = width <= WIDEST
    tile = tile_of(width, 2048, WIDEST if whole else 4096)
    launch(
        group_quant_kernel if whole else wide_group_quant_kernel,
        triton.cdiv(rows.shape[0], tile.rows) * groups,
        tile,
        rows,
        q,
        scale,
        rows if scale_ub is None else scale_ub,  # some tensor, which is not read
        *(rows.shape[0], columns, width, groups, rows.stride(0)),
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
    if not _quantizable(x, dtype):
        return definitions.quant_fp8_static.native(x, scale, group_shape, dtype)
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    height, width = (
        extent if size == -1 else size
        for extent, size in zip((rows, columns), group_shape, strict=True)
    )
    down, across = triton.cdiv(rows, height), triton.cdiv(columns, width)
    flat = tuple(extent for extent in (down, across) if extent != 1)
    if tuple(scale.shape) not in (
        definitions.scale_shape(x.shape, group_shape),
        (down, across),
        flat,
    ):
        # Which says what is wrong.
        return definitions.quant_fp8_static.native(x, scale, group_shape, dtype)
    q, scales = x.new_empty(x.shape, dtype=dtype), scale.reshape(down, across)
    matrix, tile, tiles = _tiles(x, as_one_row=down == across == 1)
    groups = (*scales.stride(), height, width)
    launch(
        given_scale_kernel,
        tiles,
        tile,
        matrix,
        q,
        scales,
        *(*matrix.shape, matrix.stride(0), *groups),
        definitions.FP8_MAX[dtype],
        by_row=down > 1,
        by_column=across > 1,
    )
    return q
