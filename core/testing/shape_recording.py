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
from opgraft.testing.shapes import TOKENS, Argument, FormCall, Setting, Size, TensorShape
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
    noting = _Noting(computes)
    former = Functional.__call__

    # Layers call a form itself, and ops call its native definition.
    def called(self: Functional[..., Any], *args: Any, **kwargs: Any) -> Any:
        return noting.run(self, functools.partial(former, self), args, kwargs)

    Functional.__call__ = called  # type: ignore[method-assign]
    try:
        for name, form in FUNCTIONALS.items():
            setattr(NATIVE, name, noting.native(form))
        yield noting.counts
    finally:
        Functional.__call__ = former  # type: ignore[method-assign]
        for name, form in FUNCTIONALS.items():
            setattr(NATIVE, name, form.native)


class _Noting:
    """Counts calls of forms, and computes them or their shapes."""

    def __init__(self, computes: bool) -> None:
        self.computes = computes
        self.counts: Counter[FormCall] = Counter()
        self._lock = threading.Lock()

    def native(self, form: Functional[..., Any]) -> Callable[..., Any]:
        """Return the native definition of a form with a count of its calls."""

        @functools.wraps(form.native)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.run(form, form.native, args, kwargs)

        return call

    def run(
        self,
        form: Functional[..., Any],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Count a call of a form, and make the call."""
        # A compiler would put the count into its graph.
        if is_compiling() or _within.get():
            return call(*args, **kwargs)
        found = call_of(form, args, kwargs)
        with self._lock:
            self.counts[found] += 1
        token = _within.set(True)
        try:
            if self.computes:
                return call(*args, **kwargs)
            return form.fake(*args, **kwargs)
        finally:
            _within.reset(token)


def call_of(form: Functional[..., Any], args: Any, kwargs: Mapping[str, Any]) -> FormCall:
    """Return the record of a call. Arguments that have their default are left out."""
    signature = inspect.signature(form.native)
    given = signature.bind(*args, **kwargs).arguments
    arguments = []
    for name, value in given.items():
        default = signature.parameters[name].default
        # Tensors have no truth value to compare by.
        if isinstance(value, Tensor) or value != default:
            arguments.append((name, _recorded(value)))
    return FormCall(form.name, tuple(arguments))


def _recorded(value: Any) -> Argument:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorShape(dtype, tuple(map(int, value.shape)))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return tuple(map(int, value))
    setting: Setting = value
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
    forms = [call.form for call in counts]
    # A model may take another way for another length.
    if forms != [call.form for call in longer]:
        return dict(counts)
    symbolic = {}
    of_one = {}
    for call, other in zip(counts, longer, strict=True):
        each = symbolic[call] = _by_tokens(call, other, tokens)
        # A step of one token makes the same calls as one of several.
        if each.at(1) != each:
            of_one[each.at(1)] = each
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
            value = _grown(value, other, tokens)
        arguments.append((name, value))
    return FormCall(call.form, tuple(arguments))


def _grown(tensor: TensorShape, longer: TensorShape, tokens: int) -> TensorShape:
    """Return the tensor with the symbol for sizes that have grown by one."""
    sizes: list[Size] = []
    for size, other in zip(tensor.shape, longer.shape, strict=False):
        # An encoder, which has no next step, takes all tokens in one.
        is_grown = size in (tokens, tokens + 1) and other == int(size) + 1
        sizes.append(TOKENS if is_grown else size)
    return TensorShape(tensor.dtype, tuple(sizes))
