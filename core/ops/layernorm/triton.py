"""Triton kernels for norms. ``functional`` has the maths and arguments.

A row of up to ``WIDEST`` elements stays in registers between the statistics and the result, and
several narrow rows share a program. Wider rows are read twice. A kernel writes a sum after its last
read, so the sum may overwrite an operand.
"""

# Annotations cannot tell the types of Triton's language, so mypy leaves jitted functions alone.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from opgraft.ops.activation.triton import load_float32, merged, rows_of
from opgraft.ops.checks import expect_alike, expect_choice, expect_rows, expect_weight
from opgraft.ops.layernorm import functional as definitions
from opgraft.ops.triton_launch import WIDEST, as_rows, launch, replaces, tile_of, writable
from torch import Tensor

__all__ = [
    "rms_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "gemma_rms_norm",
    "fused_add_gemma_rms_norm",
    "fused_add_gemma_rms_norm_",
    "rms_norm_gated",
    "layer_norm",
]


@triton.jit
def summed(x, residual, inside, fused: tl.constexpr):
    """Load ``x``, and add the residual if ``fused``."""
    total = load_float32(x, inside)
    if fused:
        total += load_float32(residual, inside)
    return total


@triton.jit
def weighted(normed, weight, column, width, weighting: tl.constexpr):
    """Multiply by the weight.

    ``weighting`` is "rounded", which rounds factors and product to the dtype of the weight as
    Llama's norm does, "offset" for a weight that is the distance from one, or "none".
    """
    if weighting != "none":
        factor = tl.load(weight + column, column < width, 0.0)
        if weighting == "offset":
            normed *= 1.0 + factor.to(tl.float32)
        else:
            product = normed.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)
            normed = product.to(factor.dtype).to(tl.float32)
    return normed


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    new_residual,
    rows,
    width,
    measured,
    eps,
    stride,
    residual_stride,
    out_stride,
    new_residual_stride,
    fused: tl.constexpr,
    weighting: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = rows_of(tl.program_id(0), tile_rows)
    column = tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (column < width)

    x_at = x + row * stride + column
    total = summed(x_at, residual + row * residual_stride + column, inside, fused)

    considered = tl.where(column < measured, total, 0.0)
    variance = tl.sum(considered * considered, 1, keep_dims=True) / measured
    scale = tl.rsqrt(variance + eps)

    result = weighted(total * scale, weight, column, width, weighting)
    tl.store(out + row * out_stride + column, result, inside)

    if fused:
        tl.store(new_residual + row * new_residual_stride + column, total, inside)


@triton.jit
def wide_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    new_residual,
    rows,
    width,
    measured,
    eps,
    stride,
    residual_stride,
    out_stride,
    new_residual_stride,
    fused: tl.constexpr,
    weighting: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute as ``rms_norm_kernel``, over wide rows in steps."""
    # Two passes: the scale of the first step needs the squares of the last.
    row = rows_of(tl.program_id(0), tile_rows)
    exists = row < rows
    x_row = x + row * stride
    residual_row = residual + row * residual_stride

    # Squares add up element by element: one sum over columns at the end, not one per step.
    squares = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, measured, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < measured)
        total = summed(x_row + column, residual_row + column, inside, fused)
        squares += total * total

    scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / measured + eps)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < width)
        total = summed(x_row + column, residual_row + column, inside, fused)
        result = weighted(total * scale, weight, column, width, weighting)
        tl.store(out + row * out_stride + column, result, inside)
        if fused:
            tl.store(new_residual + row * new_residual_stride + column, total, inside)


@triton.jit
def _affine(normed, weight, bias, column, width, has_weight: tl.constexpr, has_bias: tl.constexpr):
    """Multiply by the weight and add the bias, if given."""
    exists = column < width
    if has_weight:
        normed *= load_float32(weight + column, exists)
    if has_bias:
        normed += load_float32(bias + column, exists)
    return normed


@triton.jit
def layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    width,
    eps,
    stride,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = rows_of(tl.program_id(0), tile_rows)
    column = tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (column < width)
    t = load_float32(x + row * stride + column, inside)
    mean = tl.sum(t, 1, keep_dims=True) / width

    # Elements outside were loaded as zero: their distance from the mean must not count.
    centred = tl.where(inside, t - mean, 0.0)
    variance = tl.sum(centred * centred, 1, keep_dims=True) / width
    scale = tl.rsqrt(variance + eps)
    result = _affine(centred * scale, weight, bias, column, width, has_weight, has_bias)
    tl.store(out + row * width + column, result, inside)


@triton.jit
def wide_layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    width,
    eps,
    stride,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute as ``layer_norm_kernel``, over wide rows in steps."""
    # Two passes: the results of the first step need the statistics of the last.
    row = rows_of(tl.program_id(0), tile_rows)
    exists = row < rows
    x_row = x + row * stride

    mean = tl.zeros((tile_rows, 1), tl.float32)
    squares = tl.zeros((tile_rows, 1), tl.float32)

    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < width)
        t = load_float32(x_row + column, inside)
        count = tl.minimum(tile_columns, width - start)
        mean, squares = merged(mean, squares, start, t, inside, count)

    scale = tl.rsqrt(squares / width + eps)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < width)
        t = load_float32(x_row + column, inside)
        result = _affine((t - mean) * scale, weight, bias, column, width, has_weight, has_bias)
        tl.store(out + row * width + column, result, inside)


@triton.jit
def _gate(z, inside, sigmoid_only: tl.constexpr):
    """Load gates, and apply the sigmoid or SiLU."""
    gate = load_float32(z, inside)
    t = tl.sigmoid(gate)
    if not sigmoid_only:
        t *= gate
    return t


@triton.jit
def gated_rms_norm_kernel(
    x,
    z,
    weight,
    out,
    rows,
    width,
    groups,
    eps,
    stride,
    z_stride,
    has_gate: tl.constexpr,
    gate_last: tl.constexpr,
    sigmoid_only: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Normalise rows by groups: group ``g`` of a row begins at element ``g · width``."""
    # Neighbouring programs have groups of the same rows, so reads are neighbours too.
    row = (tl.program_id(0) // groups).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    first = (tl.program_id(0) % groups) * width
    exists = row < rows

    x_group = x + row * stride + first
    z_group = z + row * z_stride + first
    out_group = out + row * width * groups + first

    squares = tl.zeros((tile_rows, 1), tl.float32)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < width)
        t = load_float32(x_group + column, inside)
        if has_gate and not gate_last:
            t *= _gate(z_group + column, inside, sigmoid_only)
        squares += tl.sum(t * t, 1, keep_dims=True)

    scale = tl.rsqrt(squares / width + eps)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = exists & (column < width)
        t = load_float32(x_group + column, inside)
        if has_gate:
            t *= _gate(z_group + column, inside, sigmoid_only)
        t *= scale * load_float32(weight + first + column, column < width)
        tl.store(out_group + column, t, inside)


def _by_rows(kernels: tuple[Any, Any], x: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch the first kernel over the rows ``x``, or the second kernel if rows are wide."""
    rows, width = x.shape
    narrow, wide = kernels
    kernel, widest = (wide, 4096) if width > WIDEST else (narrow, WIDEST)
    # Steps over wide rows need fewer columns in registers than a whole row.
    tile = tile_of(width, 2048, widest)
    launch(kernel, triton.cdiv(rows, tile.rows), tile, x, *arguments, **constants)


def _rms_norm(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weighting: str = "rounded",
    variance_size: int | None = None,
    results: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the norm and the new residual, into ``results`` if given.

    Without a residual both results are the norm.
    """
    # The checks of the native definition, in the same order.
    if residual is None:
        expect_rows(op, "x", x)
    else:
        x, residual = definitions.summands(op, x, residual)

    definitions.expect_variance_size(op, variance_size, x)
    if weight is not None:
        expect_weight(op, "weight", weight, x)
        weight = weight.contiguous()
    if results is None:
        out = x.new_empty(x.shape)
        results = (out, out if residual is None else x.new_empty(x.shape))
    if not x.numel():
        return results

    width = x.shape[-1]

    rows = as_rows(x, width)
    added = rows if residual is None else as_rows(residual, width)
    out_rows, sum_rows = (as_rows(each, width) for each in results)

    _by_rows(
        (rms_norm_kernel, wide_rms_norm_kernel),
        rows,
        added,
        rows if weight is None else weight,
        out_rows,
        sum_rows,
        rows.shape[0],
        width,
        variance_size or width,
        eps,
        rows.stride(0),
        added.stride(0),
        out_rows.stride(0),
        sum_rows.stride(0),
        fused=residual is not None,
        weighting="none" if weight is None else weighting,
    )
    return results


def _rms_norm_in_place(
    op: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weighting: str,
    variance_size: int | None = None,
) -> None:
    """Write the results of ``_rms_norm`` over the arguments.

    A tensor that no kernel can write, as its elements overlap or lie apart, gets a copy of a
    result.
    """
    targets = (x, residual)
    results = (
        x if writable(x) else x.new_empty(x.shape),
        residual if writable(residual) else x.new_empty(x.shape),
    )
    _rms_norm(op, x, residual, weight, eps, weighting, variance_size, results)
    for target, result in zip(targets, results, strict=True):
        if target is not result:
            target.copy_(result)


@replaces(definitions.rms_norm)
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Tensor:
    return _rms_norm("rms_norm", x, None, weight, eps, "rounded", variance_size)[0]


@replaces(definitions.fused_add_rms_norm)
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _rms_norm("fused_add_rms_norm", x, residual, weight, eps, "rounded", variance_size)


@replaces(definitions.fused_add_rms_norm_)
def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> None:
    _rms_norm_in_place("fused_add_rms_norm_", x, residual, weight, eps, "rounded", variance_size)


@replaces(definitions.gemma_rms_norm)
def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return _rms_norm("gemma_rms_norm", x, None, weight, eps, "offset")[0]


@replaces(definitions.fused_add_gemma_rms_norm)
def fused_add_gemma_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return _rms_norm("fused_add_gemma_rms_norm", x, residual, weight, eps, "offset")


@replaces(definitions.fused_add_gemma_rms_norm_)
def fused_add_gemma_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> None:
    _rms_norm_in_place("fused_add_gemma_rms_norm_", x, residual, weight, eps, "offset")


@replaces(definitions.layer_norm)
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    definitions.expect_normalizable(x, normalized_shape, weight, bias)
    out = x.new_empty(x.shape)
    if not x.numel():
        return out

    width = math.prod(normalized_shape)
    rows = as_rows(x, width)

    scale = rows if weight is None else weight.reshape(width).contiguous()
    shift = rows if bias is None else bias.reshape(width).contiguous()

    _by_rows(
        (layer_norm_kernel, wide_layer_norm_kernel),
        rows,
        scale,
        shift,
        out,
        rows.shape[0],
        width,
        eps,
        rows.stride(0),
        has_weight=weight is not None,
        has_bias=bias is not None,
    )
    return out


@replaces(definitions.rms_norm_gated)
def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> Tensor:
    expect_choice("rms_norm_gated", "activation", activation, definitions.GATES)
    expect_rows("rms_norm_gated", "x", x)
    expect_weight("rms_norm_gated", "weight", weight, x)
    definitions.expect_group_size(group_size, x.shape[-1])

    if z is not None:
        expect_alike("rms_norm_gated", "z", z, "x", x)

    out = x.new_empty(x.shape)
    if not x.numel():
        return out

    hidden_size = x.shape[-1]
    width = group_size or hidden_size

    groups = hidden_size // width
    rows = as_rows(x, hidden_size)
    gates = rows if z is None else as_rows(z, hidden_size)

    tile = tile_of(width, 2048, WIDEST)
    launch(
        gated_rms_norm_kernel,
        triton.cdiv(rows.shape[0], tile.rows) * groups,
        tile,
        rows,
        gates,
        weight.contiguous(),
        out,
        rows.shape[0],
        width,
        groups,
        eps,
        rows.stride(0),
        gates.stride(0),
        has_gate=z is not None,
        gate_last=norm_before_gate,
        sigmoid_only=activation == "sigmoid",
    )
    return out
