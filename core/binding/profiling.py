"""Ranges of torch's profiler with the names of op and provider, and times of ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.form_choice import choice_of
from opgraft.binding.functional import Functional
from opgraft.binding.specialisation import Binding
from opgraft.registry.decision import Provider
from torch.profiler import record_function


class CalledOp(NamedTuple):
    """An op or a form that is called.

    Attributes:
        op: the name.
        kernel: that runs.
        provider: of the kernel.
    """

    op: str
    kernel: str
    provider: str


Watcher: TypeAlias = Callable[[CalledOp], AbstractContextManager[None]]
"""Returns a context for a call."""

_lock = threading.Lock()
_watchers: list[Watcher] = []
"""One for each active block, in any thread."""

_former: dict[Any, Callable[..., Any]] = {}
"""The original call by class. The end of the last block restores the calls."""


@contextmanager
def profile() -> Iterator[None]:
    """Make each call of an op or a functional form a range of torch's profiler within the block.

    A range has a name such as ``opgraft.rms_norm AcmeRMSNorm.forward_oot [acme 1.0]``. The block
    counts for all threads of the process; a block within another one adds nothing. Outside of a
    block, calls cost nothing extra. Compiled code has the ranges of the compiler.

    By default, ``torch.profiler`` records the threads of the caller and of torch. ``LLM`` and
    ``AsyncLLM`` compute in another thread, so a profiler around
    ``LLM.generate`` sees no range of a step.
    """
    with _watching(_range):
        yield


@contextmanager
def timed_ops(now: Callable[[], float]) -> Iterator[dict[CalledOp, float]]:
    """Time the calls of ops and functional forms by this thread within the block.

    The time of an op excludes the ops within. Calls within compiled code have no time.

    Args:
        now: returns the seconds on a clock.

    Yields:
        The seconds by op so far.
    """
    times = _OwnTimes(now)
    with _watching(times.of_call):
        yield times.seconds


class _OwnTimes:
    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: dict[CalledOp, float] = {}
        self._now = now
        self._thread = threading.get_ident()
        # The seconds of inner calls so far, for each call under way.
        self._inner: list[float] = []

    @contextmanager
    def of_call(self, called: CalledOp) -> Iterator[None]:
        """Add the time of the block to an op. Other threads have no time."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._inner.append(0.0)
        begin = self._now()
        try:
            yield
        finally:
            whole = self._now() - begin
            own = whole - self._inner.pop()
            self.seconds[called] = self.seconds.get(called, 0.0) + own
            if self._inner:
                self._inner[-1] += whole


def _range(called: CalledOp) -> AbstractContextManager[None]:
    return record_function(f"opgraft.{called.op} {called.kernel} [{called.provider}]")


@contextmanager
def _watching(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see each call of an op or a form within the block.

    Equal watchers count once.
    """
    with _lock:
        if not _watchers:
            _begin()
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
            if not _watchers:
                _stop()


def _begin() -> None:
    _set_call(
        CustomOp,
        _watched(CustomOp.__call__, lambda op: _called(op.binding)),
    )
    _former[Functional] = Functional.__call__
    _set_call(Functional, _watched(Functional.__call__, _called_form))


def _stop() -> None:
    # CustomOp inherits the call again.
    del CustomOp.__call__
    for cls, call in _former.items():
        _set_call(cls, call)


def _set_call(cls: Any, call: Callable[..., Any]) -> None:
    cls.__call__ = call


def _watched(call: Callable[..., Any], naming: Callable[[Any], CalledOp]) -> Callable[..., Any]:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A range would break the graph of a compiler.
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        called = naming(self)
        with ExitStack() as watching:
            for watcher in dict.fromkeys(_watchers):
                watching.enter_context(watcher(called))
            return call(self, *args, **kwargs)

    return watched


def _called_form(form: Functional[..., Any]) -> CalledOp:
    runs = choice_of(form)
    return _named(runs.binding, runs.kernel_name, runs.provider)


def _called(binding: Binding) -> CalledOp:
    return _named(binding, binding.kernel_name, binding.provider)


def _named(binding: Binding, kernel: str, provider: Provider) -> CalledOp:
    choice = binding.replacement
    return CalledOp(choice.op_name or choice.target.__qualname__, kernel, str(provider))
