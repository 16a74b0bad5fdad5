"""Triton kernels for norms. Their maths and arguments are in ``functional``.

A row of up to ``WIDEST`` elements stays in registers between its statistics and its result; several narrow rows share a
program. Wider rows are read twice. A fused sum is written when it was last read, so that it may overwrite its operand.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from opgraft.ops.activation.triton import merged
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
def _summed(x, residual, inside, fused: tl.constexpr):
    total = tl.load(x, inside, 0.0).to(tl.float32)
    if fused:
        total += tl.load(residual, inside, 0.0).to(tl.float32)
    return total


@triton.jit
def _weighted(normed, weight, column, width, weighting: tl.constexpr):
    """Multiply by the weight as ``weighting`` says: rounded to its dtype as Llama's, as an offset from one, or not."""
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
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (column < width)
    total = _summed(
        x + row * stride + column, residual + row * residual_stride + column, inside, fused
    )
    considered = tl.where(column < measured, total, 0.0)
    scale = tl.rsqrt(tl.sum(considered * considered, 1, keep_dims=True) / measured + eps)
    result = _weighted(total * scale, weight, column, width, weighting)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), inside)
    if fused:
        summed = total.to(new_residual.dtype.element_ty)
        tl.store(new_residual + row * new_residual_stride + column, summed, inside)


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
    """Compute as ``rms_norm_kernel``, going over its rows in steps, twice."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    squares = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, measured, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < measured)
        total = _summed(
            x + row * stride + column, residual + row * residual_stride + column, inside, fused
        )
        squares += total * total
    scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / measured + eps)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < width)
        total = _summed(
            x + row * stride + column, residual + row * residual_stride + column, inside, fused
        )
        result = _weighted(total * scale, weight, column, width, weighting)
        tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), inside)
        if fused:
            summed = total.to(new_residual.dtype.element_ty)
            tl.store(new_residual + row * new_residual_stride + column, summed, inside)


@triton.jit
def _affine(normed, weight, bias, column, width, has_weight: tl.constexpr, has_bias: tl.constexpr):
    if has_weight:
        normed *= tl.load(weight + column, column < width, 0.0).to(tl.float32)
    if has_bias:
        normed += tl.load(bias + column, column < width, 0.0).to(tl.float32)
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
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (column < width)
    t = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
    # Outside it would be the mean.
    centred = tl.where(inside, t - tl.sum(t, 1, keep_dims=True) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / width + eps)
    result = _affine(centred * scale, weight, bias, column, width, has_weight, has_bias)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), inside)


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
    """Compute as ``layer_norm_kernel``, going over its rows in steps, twice."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    mean = tl.zeros((tile_rows, 1), tl.float32)
    squares = tl.zeros((tile_rows, 1), tl.float32)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < width)
        t = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
        mean, squares = merged(
            mean, squares, start, t, inside, tl.minimum(tile_columns, width - start)
        )
    scale = tl.rsqrt(squares / width + eps)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < width)
        t = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
        result = _affine((t - mean) * scale, weight, bias, column, width, has_weight, has_bias)
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), inside)


@triton.jit
def _gate(z, sigmoid_only: tl.constexpr):
    t = tl.sigmoid(z)
    if not sigmoid_only:
        t *= z
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
    """Normalise rows by groups: group ``g`` of a row is its elements from ``g · width`` on."""
    row = (tl.program_id(0) // groups).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    first = (tl.program_id(0) % groups) * width
    squares = tl.zeros((tile_rows, 1), tl.float32)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < width)
        t = tl.load(x + row * stride + first + column, inside, 0.0).to(tl.float32)
        if has_gate and not gate_last:
            t *= _gate(
                tl.load(z + row * z_stride + first + column, inside, 0.0).to(tl.float32),
                sigmoid_only,
            )
        squares += tl.sum(t * t, 1, keep_dims=True)
    scale = tl.rsqrt(squares / width + eps)
    for start in range(0, width, tile_columns):
        column = start + tl.arange(0, tile_columns)[None, :]
        inside = (row < rows) & (column < width)
        t = tl.load(x + row * stride + first + column, inside, 0.0).to(tl.float32)
        if has_gate:
            t *= _gate(
                tl.load(z + row * z_stride + first + column, inside, 0.0).to(tl.float32),
                sigmoid_only,
            )
        t *= scale * tl.load(weight + first + column, column < width, 0.0).to(tl.float32)
        tl.store(out + row * width * groups + first + column, t.to(out.dtype.element_ty), inside)


def _by_rows(kernels: tuple[Any, Any], x: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch the first kernel, or the second if rows are wide, over the rows ``x``."""
    rows, width = x.shape
    tile = tile_of(width, 2048, WIDEST if width <= WIDEST else 4096)
    launch(
        kernels[1] if width > WIDEST else kernels[0],
        triton.cdiv(rows, tile.rows),
        tile,
        x,
        *arguments,
        **constants,
    )


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
    """Compute the norm and the new residual, to ``results`` if given; without a residual the second is the first."""
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
    if x.numel():
        width = x.shape[-1]
        rows, added, *written = (
            as_rows(t, width) for t in (x, x if residual is None else residual, *results)
        )
        operands = (added, rows if weight is None else weight, *written)
        sizes = (rows.shape[0], width, variance_size or width, eps)
        strides = (rows.stride(0), added.stride(0), *(t.stride(0) for t in written))
        kernels, constants = (
            (rms_norm_kernel, wide_rms_norm_kernel),
            "none" if weight is None else weighting,
        )
        _by_rows(
            kernels,
            rows,
            *operands,
            *sizes,
            *strides,
            fused=residual is not None,
            weighting=constants,
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
    """Run ``_rms_norm`` over its arguments, by way of new memory where rows cannot be written in place."""
    written = (
        x if writable(x) else x.new_empty(x.shape),
        residual if writable(residual) else x.new_empty(x.shape),
    )
    _rms_norm(op, x, residual, weight, eps, weighting, variance_size, written)
    for target, value in zip((x, residual), written, strict=True):
        if target is not value:
            target.copy_(value)


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
    shape = tuple(normalized_shape)
    out, width = x.new_empty(x.shape), math.prod(shape)
    if x.numel():
        rows = as_rows(x, width)
        scale, shift = (
            rows if t is None else t.reshape(width).contiguous() for t in (weight, bias)
        )
        operands = (scale, shift, out, rows.shape[0], width, eps, rows.stride(0))
        kernels = (layer_norm_kernel, wide_layer_norm_kernel)
        _by_rows(kernels, rows, *operands, has_weight=weight is not None, has_bias=bias is not None)
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
    if x.numel():
        rows, width = as_rows(x, x.shape[-1]), group_size or x.shape[-1]
        gates, groups = rows if z is None else as_rows(z, x.shape[-1]), x.shape[-1] // width
        tile = tile_of(width, 2048, WIDEST)
        programs = triton.cdiv(rows.shape[0], tile.rows) * groups
        operands = (gates, weight.contiguous(), out, rows.shape[0], width, groups, eps)
        strides, silu = (rows.stride(0), gates.stride(0)), activation != "sigmoid"
        constants = {
            "has_gate": z is not None,
            "gate_last": norm_before_gate,
            "sigmoid_only": not silu,
        }
        launch(gated_rms_norm_kernel, programs, tile, rows, *operands, *strides, **constants)
    return out
