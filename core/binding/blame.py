"""Finding the kernel that computes something else: each op of a model beside its native definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opgraft.binding.branches import method_of
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import prepare
from opgraft.binding.names import op_name_of
from opgraft.binding.shadow import Shadow
from opgraft.binding.specialisation import Binding, native_of
from opgraft.config import NATIVE_CHOICE, ShadowConfig
from opgraft.registry.choice import choosing
from opgraft.state import host_state
from opgraft.text import printable
from torch import nn

_ALWAYS = ShadowConfig(share=1.0, first_call=True)
_FORWARD = "forward"


class _Silent(Shadow):
    """A shadow whose first difference is asked for, and not logged."""

    def _report(self) -> None:
        """Leave the difference in ``first_drift``."""


@contextmanager
def beside_native_definitions(model: nn.Module) -> Iterator[list[str]]:
    """Compare the ops of a model that are called within the block with their native definitions, on the same inputs.

    Layers that are made of other ops are not compared: their ops are.

    Yields:
        A list that fills with a sentence for each kernel whose result differs, in the order of the calls.
    """
    found: list[str] = []
    watched = []
    try:
        for op in model.modules():
            if isinstance(op, CustomOp) and _FORWARD not in vars(op):
                call = _watched(op, found)
                if call is not None:
                    vars(op)[_FORWARD] = call
                    watched.append(op)
        yield found
    finally:
        for op in watched:
            del vars(op)[_FORWARD]


def _watched(op: CustomOp, found: list[str]) -> Callable[..., Any] | None:
    """Return the forward of an op with a comparison around it; None if it runs its native definition."""
    binding = op.binding
    target: Any = binding.replacement.target
    native = native_of(binding)
    if native is None or not target.repeatable:
        return None
    prepare(native.definition)
    kernel = binding.kernel_name
    name = op_name_of(target, host_state()) or target.__qualname__
    shadow = _Silent(target, name, kernel, binding.provider, native.definition, _ALWAYS)
    run = shadow.around(type(op).forward, method_of(native.definition))

    def call(*args: Any, **kwargs: Any) -> Any:
        told = bool(shadow.first_drift)
        result = run(op, *args, **kwargs)
        if shadow.first_drift and not told:
            found.append(_sentence(binding, shadow))
        return result

    return call


def _sentence(binding: Binding, shadow: Shadow) -> str:
    choice, kernel = binding.replacement, binding.kernel.winner
    plugin = (choice.winner.plugin or "") if choice.winner else ""
    setting = choosing(choice.settings, choice.op_name, [NATIVE_CHOICE], plugin)
    return printable(
        f"{shadow.kernel} of {shadow.provider} at {kernel.location} differs from the native definition of op "
        f"{shadow.op}: {shadow.first_drift}; to go without it: {setting}"
    )
