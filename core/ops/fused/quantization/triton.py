"""Triton kernels for norms and gated activations with a result in 8-bit floats.

``functional`` has the maths and arguments. A row of up to ``WIDEST`` elements stays in registers
between the norm and the quantisation. The first result is rounded to the dtype of ``x``, so both
kernels together return the bits of the separate kernels. Scales are one for the tensor, if given,
or one per token. Other groups, and wider rows, take the separate kernels.
"""

# Annotations cannot tell the types of Triton's language, so mypy leaves jitted functions alone.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from opgraft.ops.activation.triton import gated, load_float32, rows_of, silu_and_mul
from opgraft.ops.fused.quantization import functional as definitions
from opgraft.ops.layernorm.triton import fused_add_rms_norm, rms_norm, summed, weighted
from opgraft.ops.quantization.functional import largest_code, smallest_scale
from opgraft.ops.quantization.triton import (
    magnitude,
    quant_fp8_dynamic,
    quant_fp8_static,
    quantizable,
    scale_of,
    store_quantized,
)
from opgraft.ops.triton_launch import WIDEST, as_rows, launch, replaces, tile_of
from torch import Tensor

__all__ = [
    "rms_norm_quant_fp8_static",
    "rms_norm_quant_fp8_dynamic",
    "fused_add_rms_norm_quant_fp8_static",
    "fused_add_rms_norm_quant_fp8_dynamic",
    "silu_and_mul_quant_fp8_static",
    "silu_and_mul_quant_fp8_dynamic",
]

FP8 = torch.float8_e4m3fn


@triton.jit
def _quantize_rows(
    q,
    t,
    scales,
    bound,
    row,
    exists,
    inside,
    highest,
    smallest,
    by_row: tl.constexpr,
    computed: tl.constexpr,
    bounded: tl.constexpr,
    powers_of_two: tl.constexpr,
):
    """Quantise rows by scales of the tensor or of each row, which are computed or given."""
    if computed:
        largest = tl.max(magnitude(t), 1, keep_dims=True)
        scale = scale_of(largest, bound, highest, smallest, bounded, powers_of_two)
        tl.store(scales + row, scale, exists)
    elif by_row:
        scale = tl.load(scales + row, exists, 1.0).to(tl.float32)
    else:
        scale = tl.load(scales).to(tl.float32)
    store_quantized(q, t, scale, highest, inside)


@triton.jit
def norm_quant_kernel(
    x,
    residual,
    weight,
    q,
    new_residual,
    scales,
    bound,
    rows,
    width,
    eps,
    stride,
    residual_stride,
    highest,
    smallest,
    fused: tl.constexpr,
    weighting: tl.constexpr,
    by_row: tl.constexpr,
    computed: tl.constexpr,
    bounded: tl.constexpr,
    powers_of_two: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = rows_of(tl.program_id(0), tile_rows)
    column = tl.arange(0, tile_columns)[None, :]
    exists = row < rows
    inside = exists & (column < width)
    residual_at = residual + row * residual_stride + column

    # Elements outside are zeros, also in the sum of squares and after the weight.
    total = summed(x + row * stride + column, residual_at, inside, fused)
    variance = tl.sum(total * total, 1, keep_dims=True) / width
    normed = weighted(total * tl.rsqrt(variance + eps), weight, column, width, weighting)
    rounded = normed.to(x.dtype.element_ty)

    _quantize_rows(
        q + row * width + column,
        rounded,
        scales,
        bound,
        row,
        exists,
        inside,
        highest,
        smallest,
        by_row,
        computed,
        bounded,
        powers_of_two,
    )

    if fused:
        tl.store(new_residual + row * width + column, total, inside)


@triton.jit
def product_quant_kernel(
    x,
    q,
    scales,
    bound,
    rows,
    width,
    stride,
    highest,
    smallest,
    by_row: tl.constexpr,
    computed: tl.constexpr,
    bounded: tl.constexpr,
    powers_of_two: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = rows_of(tl.program_id(0), tile_rows)
    column = tl.arange(0, tile_columns)[None, :]
    exists = row < rows
    inside = exists & (column < width)

    x_at = x + row * stride + column
    dtype = x.dtype.element_ty
    product = gated(
        load_float32(x_at, inside), load_float32(x_at + width, inside), "silu", 0.0, 0.0, dtype
    )

    _quantize_rows(
        q + row * width + column,
        product.to(dtype),
        scales,
        bound,
        row,
        exists,
        inside,
        highest,
        smallest,
        by_row,
        computed,
        bounded,
        powers_of_two,
    )


class _Scales(NamedTuple):
    """The scales of a quantisation.

    Attributes:
        given: the scales; ``None`` if the kernel computes a scale per row.
        by_row: each row has a scale. Otherwise one scale serves the tensor.
        bound: the bound of magnitudes, if any.
        powers_of_two: scales are rounded up to powers of two.
        dtype: the dtype of the quantised numbers.
    """

    given: Tensor | None
    by_row: bool
    bound: Tensor | None
    powers_of_two: bool
    dtype: torch.dtype

    def results(self, x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return memory for the quantised numbers, and the scales or memory for the scales."""
        q = x.new_empty((*x.shape[:-1], width), dtype=self.dtype)
        if self.given is not None:
            return q, self.given.contiguous()
        return q, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    @property
    def limits(self) -> tuple[float, float]:
        return largest_code(self.dtype), smallest_scale(self.dtype)

    @property
    def constants(self) -> dict[str, bool]:
        return {
            "by_row": self.by_row,
            "computed": self.given is None,
            "bounded": self.bound is not None,
            "powers_of_two": self.powers_of_two,
        }


def _given(
    x: Tensor, width: int, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype
) -> _Scales | None:
    """Return given scales, or ``None`` if the kernels do not take them."""
    if not _takes(x, width, dtype) or scale.device != x.device:
        return None

    by_row = tuple(group_shape) == (1, -1)
    if not by_row and tuple(group_shape) != (-1, -1):
        return None

    shapes = ((*x.shape[:-1], 1),) if by_row else ((1,), ())
    if tuple(scale.shape) not in shapes:
        return None
    return _Scales(scale, by_row, None, False, dtype)


def _computed(
    x: Tensor,
    width: int,
    group_shape: Sequence[int],
    scale_ub: Tensor | None,
    use_ue8m0: bool,
    dtype: torch.dtype,
) -> _Scales | None:
    """Return scales to compute, or ``None`` if the kernels do not compute them."""
    if not _takes(x, width, dtype) or tuple(group_shape) != (1, -1):
        return None
    if scale_ub is not None and (scale_ub.numel() != 1 or scale_ub.device != x.device):
        return None
    return _Scales(None, True, scale_ub, use_ue8m0, dtype)


def _takes(x: Tensor, width: int, dtype: torch.dtype) -> bool:
    return quantizable(x, dtype) and width <= WIDEST


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, scales: _Scales
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the quantised norm, the scales and the sum. Without a residual, the sum is empty."""
    width = x.shape[-1]
    q, scale = scales.results(x, width)
    total = x.new_empty(x.shape if residual is not None else (0,))

    rows = as_rows(x, width)
    added = rows if residual is None else as_rows(residual, width)
    tile = tile_of(width, 2048, WIDEST)

    launch(
        norm_quant_kernel,
        triton.cdiv(rows.shape[0], tile.rows),
        tile,
        rows,
        added,
        rows if weight is None else weight.contiguous(),
        q,
        total if residual is not None else rows,
        scale,
        # A kernel needs a pointer, and without a bound reads nothing there.
        rows if scales.bound is None else scales.bound,
        *rows.shape,
        eps,
        rows.stride(0),
        added.stride(0),
        *scales.limits,
        fused=residual is not None,
        weighting="none" if weight is None else "rounded",
        **scales.constants,
    )
    return q, scale, total


def _kernel_takes(x: Tensor, *others: tuple[Tensor | None, Sequence[int]]) -> bool:
    """Return True if tensors have the wanted shapes, and the device and a dtype of kernels."""
    for tensor, shape in others:
        if tensor is None:
            continue
        if tensor.shape != torch.Size(shape) or tensor.device != x.device:
            return False
        if not tensor.is_floating_point():
            return False
    return True


def _fits_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> bool:
    if residual is not None and residual.dtype != x.dtype:
        return False
    return bool(x.dim()) and _kernel_takes(x, (residual, x.shape), (weight, x.shape[-1:]))


@replaces(definitions.rms_norm_quant_fp8_static)
def rms_norm_quant_fp8_static(
    x: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> Tensor:
    scales = _given(x, x.shape[-1], scale, group_shape, dtype) if x.dim() else None
    if scales is not None and _fits_norm(x, None, weight):
        return _norm(x, None, weight, eps, scales)[0]
    return quant_fp8_static(rms_norm(x, weight, eps), scale, group_shape, dtype)


@replaces(definitions.rms_norm_quant_fp8_dynamic)
def rms_norm_quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    settings = (group_shape, scale_ub, use_ue8m0, dtype)
    scales = _computed(x, x.shape[-1], *settings) if x.dim() else None
    if scales is not None and _fits_norm(x, None, weight):
        return _norm(x, None, weight, eps, scales)[:2]
    return quant_fp8_dynamic(rms_norm(x, weight, eps), *settings)


@replaces(definitions.fused_add_rms_norm_quant_fp8_static)
def fused_add_rms_norm_quant_fp8_static(
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    scales = _given(x, x.shape[-1], scale, group_shape, dtype) if x.dim() else None
    if scales is not None and _fits_norm(x, residual, weight):
        q, _, total = _norm(x, residual, weight, eps, scales)
        return q, total
    normed, total = fused_add_rms_norm(x, residual, weight, eps)
    return quant_fp8_static(normed, scale, group_shape, dtype), total


@replaces(definitions.fused_add_rms_norm_quant_fp8_dynamic)
def fused_add_rms_norm_quant_fp8_dynamic(
    x: Tensor,
    residual: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = (group_shape, scale_ub, use_ue8m0, dtype)
    scales = _computed(x, x.shape[-1], *settings) if x.dim() else None
    if scales is not None and _fits_norm(x, residual, weight):
        return _norm(x, residual, weight, eps, scales)
    normed, total = fused_add_rms_norm(x, residual, weight, eps)
    return *quant_fp8_dynamic(normed, *settings), total


def _product(x: Tensor, scales: _Scales) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] // 2
    q, scale = scales.results(x, width)
    rows = as_rows(x, 2 * width)
    tile = tile_of(width, 2048, WIDEST)

    launch(
        product_quant_kernel,
        triton.cdiv(rows.shape[0], tile.rows),
        tile,
        rows,
        q,
        scale,
        rows if scales.bound is None else scales.bound,
        rows.shape[0],
        width,
        rows.stride(0),
        *scales.limits,
        **scales.constants,
    )
    return q, scale


@replaces(definitions.silu_and_mul_quant_fp8_static)
def silu_and_mul_quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    scales = _given(x, x.shape[-1] // 2, scale, group_shape, dtype) if _is_even(x) else None
    if scales is not None:
        return _product(x, scales)[0]
    return quant_fp8_static(silu_and_mul(x), scale, group_shape, dtype)


@replaces(definitions.silu_and_mul_quant_fp8_dynamic)
def silu_and_mul_quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    settings = (group_shape, scale_ub, use_ue8m0, dtype)
    scales = _computed(x, x.shape[-1] // 2, *settings) if _is_even(x) else None
    if scales is not None:
        return _product(x, scales)
    return quant_fp8_dynamic(silu_and_mul(x), *settings)


def _is_even(x: Tensor) -> bool:
    return bool(x.dim()) and x.shape[-1] % 2 == 0
