"""Tests for tracers and transforms of torch, and hints for torch's tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])

cannot_tell: str | None = None
"""The reason why ``followed`` and ``transformed`` cannot tell. Then both are always true."""
try:
    _transform = torch._C._functorch.peek_interpreter_stack
    _modes = torch._C._len_torch_dispatch_stack
    _trace = torch._C._get_tracing_state
    # Raises if the name is missing.
    forward_ad._current_level  # noqa: B018
except AttributeError as error:
    cannot_tell = f"this torch cannot tell whether its operators are watched ({error})"


def followed() -> bool:
    """Return True if something besides autograd follows the operators.

    A follower may take values for constants. Followers are ``torch.func``, such as ``vmap``, a
    dispatch mode, such as ``make_fx`` or a FLOP counter, and ``torch.jit.trace``.
    """
    if cannot_tell is not None or _transform() is not None:
        return True
    return _modes() > 0 or _trace() is not None


def constant_while_tracing(function: Function) -> Function:
    """Let Dynamo call ``function`` once in a trace, and take the result for a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports Dynamo, which takes as long
    as torch itself. If torch renames the attribute, Dynamo traces into the function.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@constant_while_tracing
def transformed() -> bool:
    """Return True if ``torch.func`` or forward-mode differentiation follows the operators.

    The grad mode does not matter. A kernel outside of torch drops tangents without an error. In
    compiled code the answer is a constant, because every graph has guards for both.
    """
    return cannot_tell is not None or _transform() is not None or forward_ad._current_level >= 0


def followed_or_transformed() -> bool:
    """Return True if ``followed`` or ``transformed``."""
    # One function, because each eager call of a linear layer asks.
    untold = cannot_tell is not None or _transform() is not None or _modes() > 0
    return untold or _trace() is not None or forward_ad._current_level >= 0


_CAPTURES: ContextVar[bool] = ContextVar("opgraft_captures", default=False)


@contextmanager
def captured_for_opgraft() -> Iterator[None]:
    """Export within the block for a process with opgraft, so with operators of opgraft."""
    token = _CAPTURES.set(True)
    try:
        yield
    finally:
        _CAPTURES.reset(token)


@constant_while_tracing
def capturing() -> bool:
    """Return True within ``captured_for_opgraft``."""
    return _CAPTURES.get()


@constant_while_tracing
def exporting() -> bool:
    """Return True if ``torch.export`` traces a program that must run without opgraft."""
    # Dynamo calls this function rather than trace it: the compiler of torch 2.8 takes
    # ``is_exporting`` for always true.
    return torch.compiler.is_exporting() and not _CAPTURES.get()
