"""Checks of arguments, for all ops.

Checks of shapes, dtypes and devices compile without a graph break. A check of values would make an
accelerator wait. So values on an accelerator are checked only with the setting ``check_values``,
and values on the CPU always.
"""

from __future__ import annotations

import torch
from opgraft.compat import tracing
from opgraft.compat.python_device import stores_values
from opgraft.ops.recording import is_recording
from opgraft.registry.state import host_state
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of ops."""


def expect_floating(op: str, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` has one of the dtypes in ``FLOATING``."""
    # While torch.fx traces, a proxy without a dtype stands for the tensor.
    if isinstance(x, Tensor) and x.dtype not in FLOATING:
        raise ValueError(f"{op}: {argument} is {x.dtype}, expected one of {FLOATING}")


def expect_integers(op: str, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` holds integers of 32 or 64 bits."""
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: {argument} are {x.dtype}, expected torch.int32 or torch.int64")


def expect_rows(op: str, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` has rows, of a dtype in ``FLOATING``."""
    expect_floating(op, argument, x)
    if x.dim() == 0:
        raise ValueError(f"{op}: {argument} has shape (), expected at least one dimension")


def expect_last_dim(op: str, argument: str, x: Tensor, expected: int) -> None:
    """Raise ``ValueError`` unless the last dimension of ``x`` is ``expected``."""
    if x.dim() == 0 or x.shape[-1] != expected:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(x.shape)}, expected a last dimension of {expected}"
        )


def expect_same_shape(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` have one shape."""
    if x.shape != y.shape:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(x.shape)}, expected that of {other}, "
            f"{tuple(y.shape)}"
        )


def expect_alike(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` have one shape, one dtype and one device."""
    expect_same_shape(op, argument, x, other, y)
    expect_same_dtype(op, argument, x, other, y)
    expect_same_device(op, argument, x, other, y)


def expect_same_dtype(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` have one dtype, or autocast lets them differ."""
    if x.dtype != y.dtype and not _may_mix(x, y):
        raise ValueError(f"{op}: {argument} is {x.dtype}, expected {y.dtype} as {other}")


def _may_mix(x: Tensor, y: Tensor) -> bool:
    """Return True if autocast is on for the device, and casts both tensors."""
    kind = y.device.type
    if not (_has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return False
    # Autocast leaves float64 alone.
    castable = [dtype for dtype in FLOATING if dtype != torch.float64]
    return x.dtype in castable and y.dtype in castable


# The answer for a device type never changes, so a graph may hold the answer.
@tracing.constant_while_tracing
def _has_autocast(kind: str) -> bool:
    """Return True if a device type has autocast. Compilers of torch before 2.9 cannot ask torch."""
    return torch.amp.is_autocast_available(kind)


def expect_same_device(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` are on one device."""
    if x.device != y.device:
        raise ValueError(f"{op}: {argument} is on {x.device}, expected {y.device} as {other}")


def expect_weight(op: str, argument: str, weight: Tensor, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``weight`` has a number for each element of a row of ``x``.

    Both must be on one device. The floating-point dtypes may differ.
    """
    expect_floating(op, argument, weight)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(weight.shape)}, expected {tuple(x.shape[-1:])} for "
            f"x of shape {tuple(x.shape)}"
        )
    expect_same_device(op, argument, weight, "x", x)


def halves(op: str, argument: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the halves of the last dimension of ``x``.

    Raises:
        ValueError: the last dimension is odd, or ``x`` has no dtype in ``FLOATING``.
    """
    expect_floating(op, argument, x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(x.shape)}, expected an even last dimension"
        )
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def expect_choice(op: str, argument: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{op}: {argument} is {value!r}, expected one of {choices}")


def expect_not_negative(op: str, argument: str, value: float) -> None:
    """Raise ``ValueError`` if a number is below zero or NaN."""
    if not value >= 0:
        raise ValueError(f"{op}: {argument} is {value}, expected a number that is not negative")


def expect_size(op: str, argument: str, value: object) -> None:
    """Raise ``ValueError`` unless a setting can be the size of a dimension."""
    if not isinstance(value, (int, torch.SymInt)) or value < 0:
        raise ValueError(
            f"{op}: {argument} is {value!r}, expected a whole number that is not negative"
        )


def expect_positive(op: str, argument: str, value: float) -> None:
    """Raise ``ValueError`` unless a number is above zero."""
    if not value > 0:
        raise ValueError(f"{op}: {argument} is {value}, expected a positive number")


def values_are_known(x: Tensor) -> bool:
    """Return True if ``x`` has values to look at.

    Fake tensors and tensors on ``meta`` have no values. No tensor has values while something traces
    or transforms, or a device records a graph.
    """
    if not stores_values(x):
        return False
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (tracing.followed() or is_recording())


def values_are_checked(x: Tensor) -> bool:
    """Return True if checks may look at the values of ``x``, by the rule of this module."""
    if not values_are_known(x):
        return False
    return x.device.type == "cpu" or host_state().checks_values()


def expect_in_range(op: str, argument: str, x: Tensor, size: int) -> None:
    """Raise ``ValueError`` unless all integers of ``x`` are from 0 to ``size - 1``.

    Values that must not be checked pass.
    """
    if not x.numel() or not values_are_checked(x):
        return

    lowest, highest = (int(bound) for bound in x.aminmax())
    if lowest < 0 or highest >= size:
        raise ValueError(
            f"{op}: {argument} reach from {lowest} to {highest}, expected 0 to {size - 1}"
        )


def expect_ascending(op: str, argument: str, bounds: Tensor, end: int) -> None:
    """Raise ``ValueError`` unless ``bounds`` is a vector and ascends from 0 to ``end``.

    Values that must not be checked pass.
    """
    if bounds.dim() != 1:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(bounds.shape)}, expected one dimension"
        )
    if not values_are_checked(bounds):
        return

    values: list[int] = bounds.tolist()
    if not values or values[0] != 0 or values[-1] != end or values != sorted(values):
        raise ValueError(f"{op}: {argument} is {values}, expected it to ascend from 0 to {end}")
