"""Norms and gated activations, quantised to floating point of 8 bits (arXiv:2209.05433) or 4 bits.

A form computes its parts one after the other, in the order of its name: the first part rounds its
result to the dtype of ``x``, and the second part quantises the rounded result. A kernel may skip
the rounding between. Groups, scales and dtypes are those of ``quant_fp8_static``,
``quant_fp8_dynamic`` and ``quant_fp4``. The forms have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.activation.functional import half_of, silu_and_mul
from opgraft.ops.layernorm.functional import fused_add_rms_norm, rms_norm
from opgraft.ops.quantization.fp4 import quant_fp4
from opgraft.ops.quantization.functional import quant_fp8_dynamic, quant_fp8_static
from torch import Tensor

__all__ = [
    "fused_add_rms_norm_quant_fp4",
    "fused_add_rms_norm_quant_fp8_dynamic",
    "fused_add_rms_norm_quant_fp8_static",
    "rms_norm_quant_fp4",
    "rms_norm_quant_fp8_dynamic",
    "rms_norm_quant_fp8_static",
    "silu_and_mul_quant_fp4",
    "silu_and_mul_quant_fp8_dynamic",
    "silu_and_mul_quant_fp8_static",
]

FP8 = torch.float8_e4m3fn


def _fake_norm_static(
    x: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> Tensor:
    # A norm keeps shape and dtype, so the rule of quantisation takes ``x`` itself.
    return quant_fp8_static.fake(x, scale, group_shape, dtype)


@register_functional("rms_norm", _fake_norm_static, differentiable=False)
def rms_norm_quant_fp8_static(
    x: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> Tensor:
    """Compute ``rms_norm``, and quantise by ``quant_fp8_static`` (arXiv:2209.05433).

    Raises:
        ValueError: ``rms_norm`` or ``quant_fp8_static`` raises.
    """
    normed = rms_norm.native(x, weight, eps)
    return quant_fp8_static.native(normed, scale, group_shape, dtype)


def _fake_norm_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    quantised, scales = quant_fp8_dynamic.fake(x, group_shape, scale_ub, use_ue8m0, dtype)
    return quantised, scales


@register_functional("rms_norm", _fake_norm_dynamic, differentiable=False)
def rms_norm_quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute ``rms_norm``, and quantise by ``quant_fp8_dynamic`` (arXiv:2209.05433).

    Returns:
        The quantised norm and the scales.

    Raises:
        ValueError: ``rms_norm`` or ``quant_fp8_dynamic`` raises.
    """
    normed = rms_norm.native(x, weight, eps)
    return quant_fp8_dynamic.native(normed, group_shape, scale_ub, use_ue8m0, dtype)


def _fake_sum_static(
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    quantised = quant_fp8_static.fake(x, scale, group_shape, dtype)
    return quantised, x.new_empty(x.shape)


@register_functional("rms_norm", _fake_sum_static, differentiable=False)
def fused_add_rms_norm_quant_fp8_static(
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute ``fused_add_rms_norm``, and quantise by ``quant_fp8_static`` (arXiv:2209.05433).

    Returns:
        The quantised norm, and the rounded sum of ``x`` and ``residual``.

    Raises:
        ValueError: ``fused_add_rms_norm`` or ``quant_fp8_static`` raises.
    """
    normed, summed = fused_add_rms_norm.native(x, residual, weight, eps)
    quantised = quant_fp8_static.native(normed, scale, group_shape, dtype)
    return quantised, summed


def _fake_sum_dynamic(
    x: Tensor,
    residual: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor, Tensor]:
    quantised, scales = quant_fp8_dynamic.fake(x, group_shape, scale_ub, use_ue8m0, dtype)
    return quantised, scales, x.new_empty(x.shape)


@register_functional("rms_norm", _fake_sum_dynamic, differentiable=False)
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
    """Compute ``fused_add_rms_norm``, and quantise by ``quant_fp8_dynamic``.

    The source of the quantization is arXiv:2209.05433.

    Returns:
        The quantised norm, the scales, and the rounded sum of ``x`` and ``residual``.

    Raises:
        ValueError: ``fused_add_rms_norm`` or ``quant_fp8_dynamic`` raises.
    """
    normed, summed = fused_add_rms_norm.native(x, residual, weight, eps)
    quantised, scales = quant_fp8_dynamic.native(normed, group_shape, scale_ub, use_ue8m0, dtype)
    return quantised, scales, summed


def _fake_gate_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    return quant_fp8_static.fake(half_of(x), scale, group_shape, dtype)


@register_functional("silu_and_mul", _fake_gate_static, differentiable=False)
def silu_and_mul_quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    """Compute ``silu_and_mul``, and quantise by ``quant_fp8_static`` (arXiv:2209.05433).

    Raises:
        ValueError: ``silu_and_mul`` or ``quant_fp8_static`` raises.
    """
    gated = silu_and_mul.native(x)
    return quant_fp8_static.native(gated, scale, group_shape, dtype)


def _fake_gate_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    # The product has half the last dimension of the gates and ups.
    gated = half_of(x)
    quantised, scales = quant_fp8_dynamic.fake(gated, group_shape, scale_ub, use_ue8m0, dtype)
    return quantised, scales


@register_functional("silu_and_mul", _fake_gate_dynamic, differentiable=False)
def silu_and_mul_quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute ``silu_and_mul``, and quantise by ``quant_fp8_dynamic`` (arXiv:2209.05433).

    Returns:
        The quantised result and the scales.

    Raises:
        ValueError: ``silu_and_mul`` or ``quant_fp8_dynamic`` raises.
    """
    gated = silu_and_mul.native(x)
    return quant_fp8_dynamic.native(gated, group_shape, scale_ub, use_ue8m0, dtype)


def _fake_norm_fp4(
    x: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    quantised, scales = quant_fp4.fake(x, scale)
    return quantised, scales


@register_functional("rms_norm", _fake_norm_fp4, differentiable=False)
def rms_norm_quant_fp4(
    x: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute ``rms_norm``, and quantise by ``quant_fp4`` (arXiv:2509.25149, 2310.10537).

    Returns:
        The quantised norm and the scales of groups.

    Raises:
        ValueError: ``rms_norm`` or ``quant_fp4`` raises.
    """
    normed = rms_norm.native(x, weight, eps)
    return quant_fp4.native(normed, scale)


def _fake_sum_fp4(
    x: Tensor, residual: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    quantised, scales = quant_fp4.fake(x, scale)
    return quantised, scales, x.new_empty(x.shape)


@register_functional("rms_norm", _fake_sum_fp4, differentiable=False)
def fused_add_rms_norm_quant_fp4(
    x: Tensor, residual: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``fused_add_rms_norm``, and quantise by ``quant_fp4``.

    The sources of the quantization are arXiv:2509.25149 and arXiv:2310.10537.

    Returns:
        The quantised norm, the scales of groups, and the rounded sum of ``x`` and ``residual``.

    Raises:
        ValueError: ``fused_add_rms_norm`` or ``quant_fp4`` raises.
    """
    normed, summed = fused_add_rms_norm.native(x, residual, weight, eps)
    quantised, scales = quant_fp4.native(normed, scale)
    return quantised, scales, summed


def _fake_gate_fp4(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    quantised, scales = quant_fp4.fake(half_of(x), scale)
    return quantised, scales


@register_functional("silu_and_mul", _fake_gate_fp4, differentiable=False)
def silu_and_mul_quant_fp4(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute ``silu_and_mul``, and quantise by ``quant_fp4``.

    The sources of the quantization are arXiv:2509.25149 and arXiv:2310.10537.

    Returns:
        The quantised result and the scales of groups.

    Raises:
        ValueError: ``silu_and_mul`` or ``quant_fp4`` raises.
    """
    gated = silu_and_mul.native(x)
    return quant_fp4.native(gated, scale)
