"""Capture: while it lasts, forms are their registered ops, so that a graph shows each call of one as one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from opgraft.compat.tracing import constant_while_tracing

_ON: ContextVar[bool] = ContextVar("opgraft_capturing", default=False)


@constant_while_tracing
def capturing() -> bool:
    """Tell whether a capture is under way here."""
    return _ON.get()


@contextmanager
def captured() -> Iterator[None]:
    """Let a capture be under way within the block."""
    token = _ON.set(True)
    try:
        yield
    finally:
        _ON.reset(token)


def registered_op(name: str) -> Callable[..., Any]:
    """Return the torch op of the form of that name."""
    op: Callable[..., Any] = getattr(torch.ops.opgraft, name).default
    return op
