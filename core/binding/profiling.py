"""Ranges of torch's profiler with the names of op and provider."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.form_choice import choice_of
from opgraft.binding.functional import Functional
from opgraft.binding.specialisation import Binding
from opgraft.registry.decision import Provider
from torch.profiler import record_function

_lock = threading.Lock()
_blocks: list[object] = []
"""One entry for each active block, in any thread."""

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
    with _lock:
        if not _blocks:
            _begin()
        _blocks.append(None)
    try:
        yield
    finally:
        with _lock:
            _blocks.pop()
            if not _blocks:
                _stop_labelling()


def _begin() -> None:
    _set_call(
        CustomOp,
        _labelled(CustomOp.__call__, lambda op: _label_of_op(op.binding)),
    )
    _former[Functional] = Functional.__call__
    _set_call(Functional, _labelled(Functional.__call__, _label_of_form))


def _stop_labelling() -> None:
    # CustomOp inherits the call again.
    del CustomOp.__call__
    for cls, call in _former.items():
        _set_call(cls, call)


def _set_call(cls: Any, call: Callable[..., Any]) -> None:
    cls.__call__ = call


def _labelled(call: Callable[..., Any], label: Callable[[Any], str]) -> Callable[..., Any]:
    def labelled(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A range would break the graph of a compiler.
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        with record_function(label(self)):
            return call(self, *args, **kwargs)

    return labelled


def _label_of_form(form: Functional[..., Any]) -> str:
    runs = choice_of(form)
    return _label(runs.binding, runs.kernel_name, runs.provider)


def _label_of_op(binding: Binding) -> str:
    return _label(binding, binding.kernel_name, binding.provider)


def _label(binding: Binding, kernel: str, provider: Provider) -> str:
    choice = binding.replacement
    return f"opgraft.{choice.op_name or choice.target.__qualname__} {kernel} [{provider}]"
