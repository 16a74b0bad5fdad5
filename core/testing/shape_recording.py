"""Record the calls of functional forms of a process, for ``opgraft trace-shapes``."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from opgraft.binding.derivation import NATIVE
from opgraft.binding.functional import FUNCTIONALS, Functional
from opgraft.testing.shapes import TOKENS, Argument, FormCall, Setting, TensorShape
from torch import Tensor
from torch.compiler import is_compiling

_within: ContextVar[bool] = ContextVar("opgraft_shapes_within", default=False)
"""True while a recorded form computes: forms within are parts of its definition."""


@contextmanager
def recording(*, computes: bool = True) -> Iterator[Counter[FormCall]]:
    """Count the calls of native definitions of forms in the block, in all threads.

    An op must run its native definition: a kernel of a plugin calls no form. Compiled code is not
    counted.

    Args:
        computes: if False, a form answers by its fake rule. A model on the device ``meta`` needs
            that, since native definitions may read values.
    """
    counts: Counter[FormCall] = Counter()
    lock = threading.Lock()

    def noted(form: Functional[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(form.native)
        def run(*args: Any, **kwargs: Any) -> Any:
            if _within.get() or is_compiling():
                return call(*args, **kwargs)
            found = call_of(form, args, kwargs)
            with lock:
                counts[found] += 1
            token = _within.set(True)
            try:
                return (call if computes else form.fake)(*args, **kwargs)
            finally:
                _within.reset(token)

        return run

    # Layers call a form itself, and ops call its native definition.
    def called(self: Functional[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return former(self, *args, **kwargs)
        return noted(self, functools.partial(former, self))(*args, **kwargs)

    former = Functional.__call__
    natives = {name: form.native for name, form in FUNCTIONALS.items()}
    Functional.__call__ = called  # type: ignore[method-assign]
    try:
        for name, form in FUNCTIONALS.items():
            setattr(NATIVE, name, noted(form, natives[name]))
        yield counts
    finally:
        Functional.__call__ = former  # type: ignore[method-assign]
        for name, native in natives.items():
            setattr(NATIVE, name, native)


def call_of(form: Functional[..., Any], args: Any, kwargs: Mapping[str, Any]) -> FormCall:
    """Return the record of a call. Arguments that have their default are left out."""
    signature = inspect.signature(form.native)
    given = signature.bind(*args, **kwargs).arguments
    arguments = []
    for name, value in given.items():
        default = signature.parameters[name].default
        is_tensor = isinstance(value, Tensor)
        if is_tensor or default is inspect.Parameter.empty or value != default:
            arguments.append((name, _recorded(value)))
    return FormCall(form.name, tuple(arguments))


def _recorded(value: Any) -> Argument:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorShape(dtype, tuple(map(int, value.shape)))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    setting: Setting = tuple(map(int, value)) if isinstance(value, list | tuple) else value
    return setting


def by_tokens(
    counts: Mapping[FormCall, int], longer: Mapping[FormCall, int], tokens: int
) -> dict[FormCall, int]:
    """Return the calls of a run with the number of tokens as a symbol.

    Args:
        counts: the calls of a run with ``tokens`` tokens in its first step and one in the next.
        longer: the calls of the same model with one token more in the first step.
        tokens: the number.
    """
    pairs = list(zip(counts, longer, strict=False))
    if len(counts) != len(longer) or any(a.form != b.form for a, b in pairs):
        return dict(counts)
    symbolic = {call: _by_tokens(call, other, tokens) for call, other in pairs}
    # A step of one token makes the same calls as one of several.
    of_one = {each.at(1): each for each in symbolic.values() if each.at(1) != each}
    found: Counter[FormCall] = Counter()
    for call, count in counts.items():
        each = symbolic[call]
        found[of_one.get(each, each)] += count
    return dict(found)


def _by_tokens(call: FormCall, longer: FormCall, tokens: int) -> FormCall:
    others = longer.tensors
    arguments: list[tuple[str, Argument]] = []
    for name, value in call.arguments:
        other = others.get(name)
        if isinstance(value, TensorShape) and other is not None:
            pairs = zip(value.shape, other.shape, strict=False)
            # An encoder, which has no next step, takes all tokens in one.
            grown = [a in (tokens, tokens + 1) and b == a + 1 for a, b in pairs]
            pairs = zip(value.shape, grown, strict=True)
            sizes = [TOKENS if is_grown else size for size, is_grown in pairs]
            value = TensorShape(value.dtype, tuple(sizes))
        arguments.append((name, value))
    return FormCall(call.form, tuple(arguments))
