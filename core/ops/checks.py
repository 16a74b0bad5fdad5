"""Checks of arguments, shared by the ops: shapes only, so that they cost nothing and compile without a graph break."""

from __future__ import annotations

from torch import Tensor


def expect_last_dim(op: str, argument: str, x: Tensor, expected: int) -> None:
    """Raise ``ValueError`` unless the last dimension of ``x`` is ``expected``."""
    if x.dim() == 0 or x.shape[-1] != expected:
        raise ValueError(f"{op}: {argument} has shape {tuple(x.shape)}, expected a last dimension of {expected}")


def expect_same_shape(op: str, argument: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ``ValueError`` unless ``x`` and ``y`` have one shape."""
    if x.shape != y.shape:
        raise ValueError(f"{op}: {argument} has shape {tuple(x.shape)}, expected that of {other}, {tuple(y.shape)}")


def halves(op: str, argument: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the first and the second half of the last dimension, which must be even."""
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{op}: {argument} has shape {tuple(x.shape)}, expected an even last dimension")
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]
