"""Checks of arguments, shared by the ops. Checks of shapes, dtypes and devices compile without a graph break.

Checks of values would make an accelerator wait, so there they run only with the setting ``check_values``; on the CPU
they always do.
"""

from __future__ import annotations

import torch
from opgraft.compat import tracing
from opgraft.compat.python_device import stores_values
from opgraft.ops.recording import is_recording
from opgraft.registry.state import host_state
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that ops compute with."""


def expect_floating(op: str, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` has one of the dtypes that ops compute with.

    What stands in for a tensor while ``torch.fx`` traces has no dtype to look at and passes.
    """
    if isinstance(x, Tensor) and x.dtype not in FLOATING:
        raise ValueError(f"{op}: {argument} is {x.dtype}, expected one of {FLOATING}")


def expect_integers(op: str, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` holds integers of 32 or 64 bits."""
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: {argument} are {x.dtype}, expected torch.int32 or torch.int64")


def expect_rows(op: str, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` has rows to take a norm of, of a dtype that ops compute with."""
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
            f"{op}: {argument} has shape {tuple(x.shape)}, expected that of {other}, {tuple(y.shape)}"
        )


def expect_alike(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` have one shape, one dtype and one device."""
    expect_same_shape(op, argument, x, other, y)
    expect_same_dtype(op, argument, x, other, y)
    expect_same_device(op, argument, x, other, y)


def expect_same_dtype(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` have one dtype, or dtypes that autocast lets meet."""
    if x.dtype != y.dtype and not _may_mix(x, y):
        raise ValueError(f"{op}: {argument} is {x.dtype}, expected {y.dtype} as {other}")


def _may_mix(x: Tensor, y: Tensor) -> bool:
    """Tell whether autocast is on and made for both: torch casts them itself, or an op promotes them. Never float64."""
    kind = y.device.type
    if not (_has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return False
    return all(t.dtype in FLOATING and t.dtype != torch.float64 for t in (x, y))


@tracing.constant_while_tracing
def _has_autocast(kind: str) -> bool:
    """Tell whether a device type has autocast, which compilers of torch before 2.9 cannot ask."""
    return torch.amp.is_autocast_available(kind)


def expect_same_device(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` are on one device."""
    if x.device != y.device:
        raise ValueError(f"{op}: {argument} is on {x.device}, expected {y.device} as {other}")


def expect_weight(op: str, argument: str, weight: Tensor, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``weight`` has a number for each element of a row of ``x``, on its device.

    Its dtype may be another floating-point one.
    """
    expect_floating(op, argument, weight)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(weight.shape)}, expected {tuple(x.shape[-1:])} for x of shape "
            f"{tuple(x.shape)}"
        )
    expect_same_device(op, argument, weight, "x", x)


def halves(op: str, argument: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the halves of the last dimension, which must be even, of a floating-point ``x``."""
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
    """Raise ``ValueError`` unless a setting is a whole number that a dimension can have."""
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
    return stores_values(x) and not (
        torch.compiler.is_compiling() or x.is_meta or tracing.followed() or is_recording()
    )


def values_are_checked(x: Tensor) -> bool:
    """Decide whether checks may look at the values of ``x``: as the module says, where it has any."""
    return values_are_known(x) and (x.device.type == "cpu" or host_state().checks_values())


def expect_in_range(op: str, argument: str, x: Tensor, size: int) -> None:
    """Raise ``ValueError`` unless all integers of ``x`` are from 0 to ``size - 1``, where values are checked."""
    if x.numel() and values_are_checked(x):
        lowest, highest = (int(bound) for bound in x.aminmax())
        if lowest < 0 or highest >= size:
            raise ValueError(
                f"{op}: {argument} reach from {lowest} to {highest}, expected 0 to {size - 1}"
            )


def expect_ascending(op: str, argument: str, bounds: Tensor, end: int) -> None:
    """Raise ``ValueError`` unless ``bounds`` is a vector that ascends from 0 to ``end``, where values are checked."""
    if bounds.dim() != 1:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(bounds.shape)}, expected one dimension"
        )
    if values_are_checked(bounds):
        values: list[int] = bounds.tolist()
        if not values or values[0] != 0 or values[-1] != end or values != sorted(values):
            raise ValueError(f"{op}: {argument} is {values}, expected it to ascend from 0 to {end}")
