"""Norms over the last dimension, plain and fused with the sum of a residual stream.

Statistics are computed in float32 (float64 for float64 input). A residual is added unrounded: the norm is that of the
exact sum, and ``new_residual`` is the sum rounded to the dtype of ``x``. Under autocast a residual may have another
dtype; the sum, and with it both results, then has the wider one, as torch's sum has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    expect_alike,
    expect_choice,
    expect_floating,
    expect_rows,
    expect_same_device,
    expect_same_dtype,
    expect_weight,
)
from opgraft.ops.fakes import like, nothing
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "fused_add_gemma_rms_norm",
    "fused_add_gemma_rms_norm_",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "gemma_rms_norm",
    "layer_norm",
    "rms_norm",
    "rms_norm_gated",
]

GATES = ("silu", "swish", "sigmoid")


def pair_like(x: Tensor, *others: object, **settings: object) -> tuple[Tensor, Tensor]:
    """Make two contiguous tensors like ``x``; registered ops run outside of autocast, which ends above them."""
    return like(x), like(x)


@register_functional("rms_norm", like)
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Tensor:
    """Compute the root mean square norm, ``x / sqrt(mean(x²) + eps) · weight`` (Zhang and Sennrich, arXiv:1910.07467).

    The normalised value is rounded to the dtype of the weight, multiplied, and rounded to that of ``x``, as Llama's
    norm in transformers does.

    Args:
        x: ``[..., hidden_size]``.
        weight: ``[hidden_size]``; without one there is no scaling.
        eps: added to the mean square.
        variance_size: take the mean over that many leading elements of a row only.

    Raises:
        ValueError: ``x`` has no dimensions or no floating-point dtype, ``weight`` has another size or device, or
            ``variance_size`` is not from 1 to ``hidden_size``.
    """
    expect_rows("rms_norm", "x", x)
    return _scaled("rms_norm", x, x.to(compute_dtype(x.dtype)), weight, eps, variance_size)


@register_functional("rms_norm", pair_like)
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``(rms_norm(x + residual), x + residual)`` (arXiv:1910.07467); arguments as of ``rms_norm``.

    Raises:
        ValueError: ``residual`` has another shape, dtype or device than ``x``, or ``weight`` does not fit.
    """
    x, residual = summands("fused_add_rms_norm", x, residual)
    summed = _exact_sum(x, residual)
    return _scaled("fused_add_rms_norm", x, summed, weight, eps, variance_size), summed.to(x.dtype)


@register_functional("rms_norm", nothing, mutates=("x", "residual"))
def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> None:
    """Compute ``fused_add_rms_norm`` in place: the norm is written over ``x``, the sum over ``residual``."""
    _overwrite((x, residual), fused_add_rms_norm.native(x, residual, weight, eps, variance_size))


@register_functional("gemma_rms_norm", like)
def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute Gemma's root mean square norm, ``x / sqrt(mean(x²) + eps) · (1 + weight)`` (arXiv:2403.08295).

    The weight ``[hidden_size]`` is applied before rounding, as Gemma's norm in transformers does.

    Raises:
        ValueError: ``weight`` has another size or device.
    """
    expect_rows("gemma_rms_norm", "x", x)
    return _gemma("gemma_rms_norm", x, x.to(compute_dtype(x.dtype)), weight, eps)


@register_functional("gemma_rms_norm", pair_like)
def fused_add_gemma_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute ``(gemma_rms_norm(x + residual), x + residual)`` (arXiv:2403.08295).

    Raises:
        ValueError: ``residual`` has another shape, dtype or device than ``x``, or ``weight`` does not fit.
    """
    x, residual = summands("fused_add_gemma_rms_norm", x, residual)
    summed = _exact_sum(x, residual)
    return _gemma("fused_add_gemma_rms_norm", x, summed, weight, eps), summed.to(x.dtype)


@register_functional("gemma_rms_norm", nothing, mutates=("x", "residual"))
def fused_add_gemma_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> None:
    """Compute ``fused_add_gemma_rms_norm`` in place: the norm is written over ``x``, the sum over ``residual``."""
    _overwrite((x, residual), fused_add_gemma_rms_norm.native(x, residual, weight, eps))


def expect_group_size(group_size: int | None, hidden_size: int) -> None:
    """Raise ``ValueError`` unless the groups of ``rms_norm_gated`` divide a row."""
    if group_size is not None and (group_size < 1 or hidden_size % group_size):
        raise ValueError(
            f"rms_norm_gated: group_size is {group_size}, expected a divisor of {hidden_size}"
        )


@register_functional("rms_norm_gated", like)
def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "swish",
) -> Tensor:
    """Compute a gated root mean square norm, as state-space models have it (Dao and Gu, arXiv:2405.21060).

    With ``a`` the activation: ``rms(x · a(z)) · weight``, or ``rms(x) · weight · a(z)`` if ``norm_before_gate``. Half
    types are computed in float32 and rounded once.

    Args:
        x: ``[..., hidden_size]``.
        weight: ``[hidden_size]``.
        z: the gate, like ``x``; without one there is no gating.
        eps: added to the mean square.
        group_size: take the mean square within groups of that many elements, a divisor of ``hidden_size``.
        norm_before_gate: gate after the norm instead of before it.
        activation: ``"silu"``, which is also ``"swish"``, or ``"sigmoid"``.

    Raises:
        ValueError: ``weight`` or ``z`` does not fit, the groups do not divide a row, or another activation.
    """
    expect_choice("rms_norm_gated", "activation", activation, GATES)
    expect_rows("rms_norm_gated", "x", x)
    expect_weight("rms_norm_gated", "weight", weight, x)
    dtype = compute_dtype(x.dtype)
    y, gate = x.to(dtype), None
    if z is not None:
        expect_alike("rms_norm_gated", "z", z, "x", x)
        gate = torch.sigmoid(z.to(dtype)) if activation == "sigmoid" else F.silu(z.to(dtype))
        y = y if norm_before_gate else y * gate
    y = _normalised(_grouped(y, group_size), eps).reshape(x.shape) * weight.to(dtype)
    return (y * gate if gate is not None and norm_before_gate else y).to(x.dtype)


@register_functional("layer_norm", like)
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute the layer norm, ``(x - mean) / sqrt(variance + eps) · weight + bias`` (Ba et al., arXiv:1607.06450).

    Args:
        x: ``[..., *normalized_shape]``.
        normalized_shape: the trailing dimensions over which mean and biased variance are taken.
        weight: ``[*normalized_shape]``, likewise ``bias``.
        bias: added last.
        eps: added to the variance.

    Raises:
        ValueError: a shape, a dtype or a device does not fit. Half types take parameters in float32 too.
    """
    if isinstance(x, Tensor):  # ``torch.fx`` traces with what is none
        expect_normalizable(x, normalized_shape, weight, bias)
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def expect_normalizable(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Raise ``ValueError`` unless ``layer_norm`` takes these."""
    sizes = tuple(normalized_shape)
    expect_floating("layer_norm", "x", x)
    if x.is_nested:  # it does not tell its sizes
        return
    if not sizes or x.shape[-len(sizes) :] != sizes:
        raise ValueError(f"layer_norm: x has shape {tuple(x.shape)}, expected it to end in {sizes}")
    for argument, values in (("weight", weight), ("bias", bias)):
        if values is None:
            continue
        if values.shape != sizes:
            raise ValueError(
                f"layer_norm: {argument} has shape {tuple(values.shape)}, expected {sizes}"
            )
        if values.dtype != torch.float32 or x.dtype == torch.float64:
            expect_same_dtype("layer_norm", argument, values, "x", x)
        expect_same_device("layer_norm", argument, values, "x", x)


def summands(op: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Bring ``x`` and ``residual`` to one dtype, after raising ``ValueError`` unless they can be added."""
    expect_rows(op, "x", x)
    expect_alike(op, "residual", residual, "x", x)
    if x.dtype == residual.dtype:
        return x, residual
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)


def expect_variance_size(op: str, variance_size: int | None, x: Tensor) -> None:
    """Raise ``ValueError`` unless the mean is over at least one element of a row, and at most all."""
    if variance_size is not None and not 0 < variance_size <= x.shape[-1]:
        raise ValueError(f"{op}: variance_size is {variance_size}, expected 1 to {x.shape[-1]}")


def _exact_sum(x: Tensor, residual: Tensor) -> Tensor:
    dtype = compute_dtype(x.dtype)
    return x.to(dtype) + residual.to(dtype)


def _normalised(x: Tensor, eps: float, variance_size: int | None = None) -> Tensor:
    measured = x if variance_size is None else x[..., :variance_size]
    return x * torch.rsqrt(measured.pow(2).mean(-1, keepdim=True) + eps)


def _scaled(
    op: str, x: Tensor, summed: Tensor, weight: Tensor | None, eps: float, variance_size: int | None
) -> Tensor:
    expect_variance_size(op, variance_size, x)
    normed = _normalised(summed, eps, variance_size)
    if weight is not None:
        expect_weight(op, "weight", weight, x)
        normed = normed.to(weight.dtype) * weight
    return normed.to(x.dtype)


def _gemma(op: str, x: Tensor, summed: Tensor, weight: Tensor, eps: float) -> Tensor:
    expect_weight(op, "weight", weight, x)
    return (_normalised(summed, eps) * (1.0 + weight.to(summed.dtype))).to(x.dtype)


def _grouped(x: Tensor, group_size: int | None) -> Tensor:
    expect_group_size(group_size, x.shape[-1])
    return (
        x if group_size is None else x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    )


def _overwrite(targets: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
