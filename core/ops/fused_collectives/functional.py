"""Sums over ranks that are normed, and quantised to 8-bit floating point (arXiv:1909.08053, arXiv:2209.05433).

Each is what its name says, one after the other: ``x`` is summed over the ranks of a group and rounded to its dtype, a
residual is added, and of that sum the norm is computed. A kernel may leave the first rounding out. Every rank calls
with the same shapes. A rank that is alone sums nothing. No gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.binding.functional import register_functional
from opgraft.distributed.groups import parallelism
from opgraft.distributed.layout import KINDS
from opgraft.ops.checks import expect_choice
from opgraft.ops.layernorm.functional import (
    fused_add_gemma_rms_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    pair_like,
    rms_norm,
)
from opgraft.ops.quantization.functional import quant_fp8_dynamic, quant_fp8_static
from torch import Tensor

__all__ = [
    "all_reduce_gemma_rms_norm",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_quant_fp8_dynamic",
    "all_reduce_rms_norm_quant_fp8_static",
]

FP8 = torch.float8_e4m3fn


def _summed(x: Tensor, kind: str) -> Tensor:
    """Sum over the ranks of a group, into new memory; by the registered op, which whoever traces this sees."""
    expect_choice("all_reduce", "kind", kind, KINDS)
    if parallelism().groups[kind].communicator is None:
        return x.clone()
    summed: Tensor = torch.ops.opgraft.all_reduce(x, kind)
    return summed


@register_functional("rms_norm", pair_like, differentiable=False)
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Compute the sum of ``x`` over ranks and of ``residual``, and its ``rms_norm`` (arXiv:1909.08053, section 3).

    Args:
        x: ``[..., hidden_size]``, the part of this rank.
        residual: the same, whole on every rank; nothing is added without one.
        weight: ``[hidden_size]``.
        eps: added to the mean square.
        kind: of the group that sums.

    Returns:
        The norm, and the sum in the dtype of ``x``.

    Raises:
        ValueError: as ``fused_add_rms_norm`` does, or there is no such kind of group.
    """
    summed = _summed(x, kind)
    if residual is None:
        return rms_norm.native(summed, weight, eps), summed
    return fused_add_rms_norm.native(summed, residual, weight, eps)


@register_functional("gemma_rms_norm", pair_like, differentiable=False)
def all_reduce_gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kind: str = "tensor"
) -> tuple[Tensor, Tensor]:
    """Compute what ``all_reduce_rms_norm`` does with Gemma's norm (arXiv:2403.08295).

    Raises:
        ValueError: as ``fused_add_gemma_rms_norm`` does, or there is no such kind of group.
    """
    summed = _summed(x, kind)
    if residual is None:
        return gemma_rms_norm.native(summed, weight, eps), summed
    return fused_add_gemma_rms_norm.native(summed, residual, weight, eps)


def _fake_static(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor]:
    return quant_fp8_static.fake(x, scale, group_shape, dtype), x.new_empty(x.shape)


@register_functional("rms_norm", _fake_static, differentiable=False)
def all_reduce_rms_norm_quant_fp8_static(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor]:
    """Compute ``all_reduce_rms_norm`` with its norm quantised by ``quant_fp8_static`` (arXiv:2209.05433).

    Raises:
        ValueError: as either does.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    return quant_fp8_static.native(normed, scale, group_shape, dtype), summed


def _fake_dynamic(
    x: Tensor,
    residual: Tensor | None,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    return *quant_fp8_dynamic.fake(x, group_shape, scale_ub, use_ue8m0, dtype), x.new_empty(x.shape)


@register_functional("rms_norm", _fake_dynamic, differentiable=False)
def all_reduce_rms_norm_quant_fp8_dynamic(
    x: Tensor,
    residual: Tensor | None,
    group_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = FP8,
    kind: str = "tensor",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``all_reduce_rms_norm`` with its norm quantised by ``quant_fp8_dynamic`` (arXiv:2209.05433).

    Returns:
        The quantised norm, its scales, and the sum in the dtype of ``x``.

    Raises:
        ValueError: as either does.
    """
    normed, summed = all_reduce_rms_norm.native(x, residual, weight, eps, kind)
    return *quant_fp8_dynamic.native(normed, group_shape, scale_ub, use_ue8m0, dtype), summed
