"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    FLOATING,
    expect_alike,
    expect_choice,
    expect_floating,
    expect_last_dim,
    expect_same_device,
    expect_same_dtype,
)
from torch import Tensor
from torch.nn import functional as F

__all__ = ["linear"]

# Traced code reads the dictionary: Dynamo refuses a proxy after a change of any dictionary.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}

ACTIVATIONS = MappingProxyType(_ACTIVATIONS)
"""The activations of ``linear`` by name."""


def activation_of(name: str) -> Callable[[Tensor], Tensor] | None:
    """Return an activation of ``linear``, ``None`` for "none". Traced code may call this."""
    return _ACTIVATIONS[name]


def mapped(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Return an empty contiguous tensor ``[..., out_features]``; the fake rule of ``linear``."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@register_functional("linear", mapped)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``activation(x · weightᵀ + bias) + residual``.

    These are ``torch.nn.functional.linear`` and the two steps behind it in a transformer's layers
    (Vaswani et al., arXiv:1706.03762, sections 3.1 and 3.3). This definition rounds after each of
    the three steps. A kernel may round once, at the end.

    Args:
        x: ``[..., in_features]`` in any floating-point dtype.
        weight: ``[out_features, in_features]``, of the same dtype.
        bias: ``[out_features]``.
        activation: one of ``ACTIVATIONS``.
        residual: ``[..., out_features]``, the residual stream before this layer.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: the activation has no such name, or a shape, a dtype or a device does not fit.
    """
    expect_choice("linear", "activation", activation, tuple(_ACTIVATIONS))
    expect_mappable(x, weight, bias)
    y = F.linear(x, weight, bias)
    activate = _ACTIVATIONS[activation]

    if activate is not None:
        y = activate(y)
    if residual is None:
        return y

    # Under symbolic tracing, y is a proxy without a shape.
    if isinstance(y, Tensor):
        expect_alike("linear", "residual", residual, "the result", y)
    return y + residual


def _shapes_agree(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the arguments are right.

    Every call of a layer asks. The checks with messages take many times as long.
    """
    dtype = x.dtype
    device = x.device
    sizes = weight.shape
    if dtype is not weight.dtype or dtype not in FLOATING:
        return False
    if weight.device != device or x.shape[-1:] != sizes[1:]:
        return False

    if bias is None:
        return True
    return bias.dtype is dtype and bias.device == device and bias.shape == sizes[:1]


def expect_mappable(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ``ValueError`` unless ``linear`` takes the arguments. Proxies of ``torch.fx`` pass."""
    # A nested tensor has no sizes to compare.
    if not isinstance(x, Tensor) or x.is_nested or _shapes_agree(x, weight, bias):
        return

    op = "linear"
    expect_floating(op, "x", x)
    if weight.dim() != 2:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected [out_features, in_features]"
        )

    expect_last_dim(op, "x", x, weight.shape[1])
    expect_same_dtype(op, "weight", weight, "x", x)
    expect_same_device(op, "weight", weight, "x", x)

    if bias is None:
        return
    if bias.shape != weight.shape[:1]:
        shape = tuple(bias.shape)
        raise ValueError(f"{op}: bias has shape {shape}, expected {tuple(weight.shape[:1])}")
    expect_same_dtype(op, "bias", bias, "x", x)
    expect_same_device(op, "bias", bias, "x", x)
