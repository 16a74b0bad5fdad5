"""Norms and gated activations whose result is quantised to floating point of 8 (arXiv:2209.05433) or 4 bits.

Each is what its name says, one after the other: the result of the first is rounded to the dtype of ``x``, and that is
quantised. A kernel may leave the first rounding out. Groups, scales and dtypes are those of ``quant_fp8_static``,
``quant_fp8_dynamic`` and ``quant_fp4``. No gradients.
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
    """Compute ``quant_fp8_static(rms_norm(x, weight, eps), scale, group_shape, dtype)`` (arXiv:2209.05433).

    Raises:
        ValueError: as either does.
    """
    return quant_fp8_static.native(rms_norm.native(x, weight, eps), scale, group_shape, dtype)


def _fake_norm_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = quant_fp8_dynamic.fake(
        x, group_shape, scale_ub, use_ue8m0, dtype
    )
    return found


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
    """Compute ``quant_fp8_dynamic(rms_norm(x, weight, eps), group_shape, scale_ub, use_ue8m0, dtype)``
    (arXiv:2209.05433).

    Raises:
        ValueError: as either does.
    """
    return quant_fp8_dynamic.native(
        rms_norm.native(x, weight, eps), group_shape, scale_ub, use_ue8m0, dtype
    )


def _fake_sum_static(
    x: Tensor,
    residual: Tensor,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    return quant_fp8_static.fake(x, scale, group_shape, dtype), x.new_empty(x.shape)


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
    """Compute ``rms_norm_quant_fp8_static`` of the exact sum of ``x`` and ``residual``, and that sum, rounded
    (arXiv:2209.05433).

    Raises:
        ValueError: as ``fused_add_rms_norm`` or ``quant_fp8_static`` does.
    """
    normed, summed = fused_add_rms_norm.native(x, residual, weight, eps)
    return quant_fp8_static.native(normed, scale, group_shape, dtype), summed


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
    return *_fake_norm_dynamic(
        x, group_shape, weight, eps, scale_ub, use_ue8m0, dtype
    ), x.new_empty(x.shape)


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
    """Compute ``rms_norm_quant_fp8_dynamic`` of the exact sum of ``x`` and ``residual``, and that sum, rounded
    (arXiv:2209.05433).

    Raises:
        ValueError: as ``fused_add_rms_norm`` or ``quant_fp8_dynamic`` does.
    """
    normed, summed = fused_add_rms_norm.native(x, residual, weight, eps)
    return *quant_fp8_dynamic.native(normed, group_shape, scale_ub, use_ue8m0, dtype), summed


def _fake_gate_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    return quant_fp8_static.fake(half_of(x), scale, group_shape, dtype)


@register_functional("silu_and_mul", _fake_gate_static, differentiable=False)
def silu_and_mul_quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = FP8
) -> Tensor:
    """Compute ``quant_fp8_static(silu_and_mul(x), scale, group_shape, dtype)`` (arXiv:2209.05433).

    Raises:
        ValueError: as either does.
    """
    return quant_fp8_static.native(silu_and_mul.native(x), scale, group_shape, dtype)


def _fake_gate_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = quant_fp8_dynamic.fake(
        half_of(x), group_shape, scale_ub, use_ue8m0, dtype
    )
    return found


@register_functional("silu_and_mul", _fake_gate_dynamic, differentiable=False)
def silu_and_mul_quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
) -> tuple[Tensor, Tensor]:
    """Compute ``quant_fp8_dynamic(silu_and_mul(x), group_shape, scale_ub, use_ue8m0, dtype)`` (arXiv:2209.05433).

    Raises:
        ValueError: as either does.
    """
    return quant_fp8_dynamic.native(silu_and_mul.native(x), group_shape, scale_ub, use_ue8m0, dtype)


def _fake_norm_fp4(
    x: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = quant_fp4.fake(x, scale)
    return found


@register_functional("rms_norm", _fake_norm_fp4, differentiable=False)
def rms_norm_quant_fp4(
    x: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute ``quant_fp4(rms_norm(x, weight, eps), scale)`` (arXiv:2509.25149, arXiv:2310.10537).

    Raises:
        ValueError: as either does.
    """
    return quant_fp4.native(rms_norm.native(x, weight, eps), scale)


def _fake_sum_fp4(
    x: Tensor, residual: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return *quant_fp4.fake(x, scale), x.new_empty(x.shape)


@register_functional("rms_norm", _fake_sum_fp4, differentiable=False)
def fused_add_rms_norm_quant_fp4(
    x: Tensor, residual: Tensor, scale: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``rms_norm_quant_fp4`` of the exact sum of ``x`` and ``residual``, and that sum, rounded
    (arXiv:2509.25149, arXiv:2310.10537).

    Raises:
        ValueError: as ``fused_add_rms_norm`` or ``quant_fp4`` does.
    """
    normed, summed = fused_add_rms_norm.native(x, residual, weight, eps)
    return *quant_fp4.native(normed, scale), summed


def _fake_gate_fp4(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = quant_fp4.fake(half_of(x), scale)
    return found


@register_functional("silu_and_mul", _fake_gate_fp4, differentiable=False)
def silu_and_mul_quant_fp4(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute ``quant_fp4(silu_and_mul(x), scale)`` (arXiv:2509.25149, arXiv:2310.10537).

    Raises:
        ValueError: as either does.
    """
    return quant_fp4.native(silu_and_mul.native(x), scale)
