"""Common ground of layers made of other ops: when one kernel may do the work of several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.binding.kernels import method_of
from opgraft.binding.rebinding import hidden_by
from opgraft.compat.hooks import hooks_on_every_module
from opgraft.ops.activation.modules import GELU, GELUTanh, SiLU
from opgraft.plugins.discovery import discover
from opgraft.registry.decision import Provider
from torch import nn


class Composite(PluggableLayer):
    """A layer that may compute several of its children at once."""

    repeatable: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_choice"] = None

    def release_weights(self) -> None:
        """Give up what this layer has done to the memory of its children's weights, for its own kernels."""

    def process_weights_after_loading(self) -> None:
        """Arrange the memory of the children's weights, once it is known; again after ``release_weights``."""

    def weights_in_common(self) -> frozenset[str]:
        """Return the names of the parameters that ``release_weights`` would move."""
        return frozenset()

    def chosen(self, choose: Callable[..., Any], first: Any, second: Any) -> Any:
        """Remember ``choose(first, second)`` for two children, until one of them has another kernel."""
        # By class, as an op that is bound to another kernel is of another class.
        known, kinds = self.__dict__["_choice"], (type(first), type(second))
        if known is None or known[0] != kinds:
            known = self.__dict__["_choice"] = kinds, choose(first, second)
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_choice": None}  # chosen again where it is loaded


def epilogue_of(activation: nn.Module | None) -> str | None:
    """Name an activation as a linear op does, ``None`` if it cannot be its epilogue."""
    if isinstance(activation, GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if isinstance(activation, SiLU) and not activation.inplace:
        return "silu"
    return "gelu_tanh" if isinstance(activation, GELUTanh) else None


def is_observed(layer: nn.Module) -> bool:
    """Return whether somebody waits for a layer to be called, or has changed what calling it does."""
    own = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    return bool(own or hooks_on_every_module())


def call_uncompiled(module: Any, *inputs: Any) -> Any:
    """Call a module behind a plan; an op that is disabled for a compiler alone runs the kernel that it has without one.

    A hook of the op, and what was put before its kernel, run as in any call.
    """
    if not isinstance(module, CustomOp) or not module.binding.kernel.left_to_compiler:
        return module(*inputs)
    if hidden_by(module) or is_observed(module):
        return module(*inputs)
    return method_of(module.binding.kernel.uncompiled.definition)(module, *inputs)


def served_by(op: CustomOp) -> Provider:
    """Name the provider of the kernel that an op is bound to."""
    choice, kernel = op.binding.replacement, op.binding.kernel.winner
    return choice.own if kernel.owner in choice.target.__mro__ else choice.provider


def may_stand_for(kernel: CustomOp, other: CustomOp) -> bool:
    """Decide whether the kernel of one op may do the work of another op too.

    That is where the other has no more than opgraft's own definition, or where both kernels come from one
    distribution, which then answers for both. What someone else provides for an op is never passed over.
    """
    return served_by(other) in (discover().provider_of(__name__), served_by(kernel))
