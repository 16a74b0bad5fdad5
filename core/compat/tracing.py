"""Tests for code that traces or transforms, and hints to torch's tracer about code that it need not look into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])

cannot_tell: str | None = None
"""The reason why ``followed`` and ``transformed`` cannot tell, in which case they are always true."""
try:
    _transform = torch._C._functorch.peek_interpreter_stack
    _modes = torch._C._len_torch_dispatch_stack
    _trace = torch._C._get_tracing_state
    forward_ad._current_level  # noqa: B018  # that the name is there
except AttributeError as error:
    cannot_tell = f"this torch cannot tell whether its operators are watched ({error})"


def followed() -> bool:
    """Tell whether something follows the operators that run, besides autograd, and might take values for constants.

    That is ``torch.func``, as ``vmap``, a dispatch mode such as that of ``make_fx`` or a FLOP counter, and
    ``torch.jit.trace``. None of them has a public name by which to ask.
    """
    return (
        cannot_tell is not None or _transform() is not None or _modes() > 0 or _trace() is not None
    )


def constant_while_tracing(function: Function) -> Function:
    """Let Dynamo call ``function`` once, while it traces, and take the result for a constant.

    Does what ``torch.compiler.assume_constant_result`` does, without importing Dynamo, which costs as much as torch
    itself. Should the attribute ever be renamed, Dynamo traces into the function instead, and says where it cannot.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@constant_while_tracing
def transformed() -> bool:
    """Tell whether ``torch.func`` or forward-mode differentiation follows the operators that run, in any grad mode.

    What is not made of torch's own operators drops their tangents in silence. For compiled code it is a constant, as
    both are among the guards of every graph.
    """
    return cannot_tell is not None or _transform() is not None or forward_ad._current_level >= 0


def followed_or_transformed() -> bool:
    """Tell whether either is so, in one call: every eager call of a linear layer asks."""
    untold = cannot_tell is not None or _transform() is not None or _modes() > 0
    return untold or _trace() is not None or forward_ad._current_level >= 0


_CAPTURES: ContextVar[bool] = ContextVar("opgraft_captures", default=False)


@contextmanager
def captured_for_opgraft() -> Iterator[None]:
    """Say that what is exported within the block runs with opgraft, and so may have its operators."""
    token = _CAPTURES.set(True)
    try:
        yield
    finally:
        _CAPTURES.reset(token)


@constant_while_tracing
def capturing() -> bool:
    """Tell whether ``captured_for_opgraft`` holds."""
    return _CAPTURES.get()


@constant_while_tracing
def exporting() -> bool:
    """Tell whether ``torch.export`` looks on, for a program that must run without opgraft.

    Ask while tracing: to the compiler of torch 2.8 it always seems so.
    """
    return torch.compiler.is_exporting() and not _CAPTURES.get()
