"""Norms over the last dimension, plain and fused with the sum of a residual stream.

Statistics are computed in float32, or float64 for float64 input. A norm after a sum takes the exact
sum, and ``new_residual`` is the sum rounded to the dtype of ``x``. Under autocast a residual may
have another dtype than ``x``. Both results then have the wider dtype, as a sum by torch has.
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
    """Make two contiguous tensors like ``x``, as a fake rule.

    Autocast plays no part: registered ops run outside of autocast.
    """
    return like(x), like(x)


@register_functional("rms_norm", like)
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Tensor:
    """Compute the root mean square norm, ``x / sqrt(mean(x²) + eps) · weight`` (arXiv:1910.07467).

    The source is Zhang and Sennrich. As Llama's norm in transformers, the form rounds the
    normalised value to the dtype of the weight, multiplies, and rounds the product to the dtype of
    ``x``.

    Args:
        x: ``[..., hidden_size]``.
        weight: ``[hidden_size]``; without a weight nothing is multiplied.
        eps: added to the mean square.
        variance_size: the number of first elements of a row that count in the mean; all if not
            given.

    Raises:
        ValueError: ``x`` has no dimensions or no floating-point dtype, ``weight`` has another size
            or device, or ``variance_size`` is not from 1 to ``hidden_size``.
    """
    expect_rows("rms_norm", "x", x)
    wide = x.to(compute_dtype(x.dtype))
    return _weighted_norm("rms_norm", x, wide, weight, eps, variance_size)


@register_functional("rms_norm", pair_like)
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``(rms_norm(x + residual), x + residual)`` (arXiv:1910.07467).

    The other arguments are those of ``rms_norm``.

    Raises:
        ValueError: ``residual`` has another shape, dtype or device than ``x``, or ``weight`` does
            not fit.
    """
    op = "fused_add_rms_norm"
    x, residual = summands(op, x, residual)
    # The norm takes the exact sum, not the rounded one that goes on in the residual stream.
    summed = _exact_sum(x, residual)
    normed = _weighted_norm(op, x, summed, weight, eps, variance_size)
    return normed, summed.to(x.dtype)


@register_functional("rms_norm", nothing, mutates=("x", "residual"))
def fused_add_rms_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> None:
    """Compute ``fused_add_rms_norm`` in place: ``x`` gets the norm, and ``residual`` the sum."""
    results = fused_add_rms_norm.native(x, residual, weight, eps, variance_size)
    _overwrite((x, residual), results)


@register_functional("gemma_rms_norm", like)
def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute Gemma's norm, ``x / sqrt(mean(x²) + eps) · (1 + weight)`` (arXiv:2403.08295).

    As Gemma's norm in transformers, the form applies the weight ``[hidden_size]`` before it rounds.

    Raises:
        ValueError: ``weight`` has another size or device.
    """
    expect_rows("gemma_rms_norm", "x", x)
    wide = x.to(compute_dtype(x.dtype))
    return _gemma_norm("gemma_rms_norm", x, wide, weight, eps)


@register_functional("gemma_rms_norm", pair_like)
def fused_add_gemma_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute ``(gemma_rms_norm(x + residual), x + residual)`` (arXiv:2403.08295).

    Raises:
        ValueError: ``residual`` has another shape, dtype or device than ``x``, or ``weight`` does
            not fit.
    """
    op = "fused_add_gemma_rms_norm"
    x, residual = summands(op, x, residual)
    summed = _exact_sum(x, residual)
    return _gemma_norm(op, x, summed, weight, eps), summed.to(x.dtype)


@register_functional("gemma_rms_norm", nothing, mutates=("x", "residual"))
def fused_add_gemma_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> None:
    """Compute ``fused_add_gemma_rms_norm`` in place: ``x`` gets the norm, ``residual`` the sum."""
    results = fused_add_gemma_rms_norm.native(x, residual, weight, eps)
    _overwrite((x, residual), results)


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
    """Compute the gated root mean square norm of state-space models (Dao and Gu, arXiv:2405.21060).

    With ``a`` the activation, the result is ``rms(x · a(z)) · weight``, or ``rms(x) · weight ·
    a(z)`` with ``norm_before_gate``. Half types are computed in float32 and rounded once.

    Args:
        x: ``[..., hidden_size]``.
        weight: ``[hidden_size]``.
        z: the gate, like ``x``; optional.
        eps: added to the mean square.
        group_size: elements of a group with one mean square, a divisor of ``hidden_size``.
        norm_before_gate: gate after the norm instead of before the norm.
        activation: ``"silu"``, also called ``"swish"``, or ``"sigmoid"``.

    Raises:
        ValueError: ``weight`` or ``z`` does not fit, the groups do not divide a row, or the
            activation is unknown.
    """
    expect_choice("rms_norm_gated", "activation", activation, GATES)
    expect_rows("rms_norm_gated", "x", x)
    expect_weight("rms_norm_gated", "weight", weight, x)
    dtype = compute_dtype(x.dtype)

    # Gate and norm in one dtype: half types are rounded once, at the end.
    y = x.to(dtype)
    gate = None
    if z is not None:
        expect_alike("rms_norm_gated", "z", z, "x", x)
        wide = z.to(dtype)
        gate = torch.sigmoid(wide) if activation == "sigmoid" else F.silu(wide)

    if gate is not None and not norm_before_gate:
        y = y * gate
    normed = _normalise(_groups(y, group_size), eps)
    y = normed.reshape(x.shape) * weight.to(dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


@register_functional("layer_norm", like)
def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute the layer norm, ``(x - mean) / sqrt(variance + eps) · weight + bias``.

    The source is Ba et al., arXiv:1607.06450.

    Args:
        x: ``[..., *normalized_shape]``.
        normalized_shape: the last dimensions; mean and biased variance are over all of them.
        weight: ``[*normalized_shape]``.
        bias: ``[*normalized_shape]``.
        eps: added to the variance.

    Raises:
        ValueError: a shape, a dtype or a device does not fit. Half types take parameters in float32
            too.
    """
    # torch.fx traces with proxies, which have nothing to check.
    if isinstance(x, Tensor):
        expect_normalizable(x, normalized_shape, weight, bias)
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def expect_normalizable(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Raise ``ValueError`` unless ``layer_norm`` takes these arguments."""
    sizes = tuple(normalized_shape)
    expect_floating("layer_norm", "x", x)
    # A nested tensor has no sizes to compare.
    if x.is_nested:
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
        # torch's layer norm takes parameters in float32 with half types, but not with float64.
        if values.dtype != torch.float32 or x.dtype == torch.float64:
            expect_same_dtype("layer_norm", argument, values, "x", x)
        expect_same_device("layer_norm", argument, values, "x", x)


def summands(op: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` and ``residual`` in one dtype.

    Raises:
        ValueError: the two cannot be added.
    """
    expect_rows(op, "x", x)
    expect_alike(op, "residual", residual, "x", x)
    if x.dtype == residual.dtype:
        return x, residual
    # Only autocast lets the dtypes differ.
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.to(dtype), residual.to(dtype)


def expect_variance_size(op: str, variance_size: int | None, x: Tensor) -> None:
    """Raise ``ValueError`` unless the mean is over 1 to all elements of a row."""
    if variance_size is not None and not 0 < variance_size <= x.shape[-1]:
        raise ValueError(f"{op}: variance_size is {variance_size}, expected 1 to {x.shape[-1]}")


def _exact_sum(x: Tensor, residual: Tensor) -> Tensor:
    dtype = compute_dtype(x.dtype)
    return x.to(dtype) + residual.to(dtype)


def _normalise(x: Tensor, eps: float, variance_size: int | None = None) -> Tensor:
    measured = x if variance_size is None else x[..., :variance_size]
    variance = measured.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + eps)


def _weighted_norm(
    op: str, x: Tensor, summed: Tensor, weight: Tensor | None, eps: float, variance_size: int | None
) -> Tensor:
    """Return the norm of ``summed``, times the weight, in the dtype of ``x``."""
    expect_variance_size(op, variance_size, x)
    normed = _normalise(summed, eps, variance_size)
    if weight is not None:
        expect_weight(op, "weight", weight, x)
        # Rounded before the product, as Llama's norm does.
        normed = normed.to(weight.dtype) * weight
    return normed.to(x.dtype)


def _gemma_norm(op: str, x: Tensor, summed: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return Gemma's norm of ``summed``, in the dtype of ``x``."""
    expect_weight(op, "weight", weight, x)
    # One plus the weight in the wide dtype: a half type would lose small weights beside one.
    factor = 1.0 + weight.to(summed.dtype)
    return (_normalise(summed, eps) * factor).to(x.dtype)


def _groups(x: Tensor, group_size: int | None) -> Tensor:
    """View the last dimension as ``[groups, group_size]``."""
    expect_group_size(group_size, x.shape[-1])
    if group_size is None:
        return x
    return x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)


def _overwrite(targets: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
