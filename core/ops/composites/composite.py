"""The base of layers made of other ops, and the rules for one kernel in place of several."""

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
        """Undo ``process_weights_after_loading``: children's weights lie in memory of their own."""

    def process_weights_after_loading(self) -> None:
        """Arrange the memory of the children's weights for the kernels of this layer.

        The call follows the loading of weights, and each ``release_weights``.
        """

    def weights_in_common(self) -> frozenset[str]:
        """Return the names of the parameters to move by ``release_weights``."""
        return frozenset()

    def chosen(self, choose: Callable[..., Any], first: Any, second: Any) -> Any:
        """Return ``choose(first, second)`` for two children, remembered until a kernel changes."""
        # By class, as an op that is bound to another kernel is of another class.
        kinds = (type(first), type(second))
        known = self.__dict__["_choice"]
        if known is None or known[0] != kinds:
            known = (kinds, choose(first, second))
            self.__dict__["_choice"] = known
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        # The loading process may have other kernels, and chooses again.
        return {**self.__dict__, "_choice": None}


def epilogue_of(activation: nn.Module | None) -> str | None:
    """Return a linear op's name of an activation; ``None`` if no epilogue computes it."""
    if isinstance(activation, GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if isinstance(activation, SiLU) and not activation.inplace:
        return "silu"
    if isinstance(activation, GELUTanh):
        return "gelu_tanh"
    return None


def is_observed(layer: nn.Module) -> bool:
    """Return True if a layer has hooks, or a ``forward`` of the instance's own."""
    own = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    return bool(own or hooks_on_every_module())


def call_uncompiled(module: Any, *inputs: Any) -> Any:
    """Call a module behind a plan, without a compiler.

    An op disabled for a compiler alone runs the kernel of eager calls. Hooks of the op run as in
    any call, and so does a ``forward`` in place of the kernel.
    """
    if not isinstance(module, CustomOp) or not module.binding.kernel.left_to_compiler:
        return module(*inputs)
    if hidden_by(module) or is_observed(module):
        return module(*inputs)
    kernel = module.binding.kernel.eager
    return method_of(kernel.definition)(module, *inputs)


def served_by(op: CustomOp) -> Provider:
    """Return the provider of an op's kernel."""
    choice = op.binding.replacement
    kernel = op.binding.kernel.winner
    is_inherited = kernel.owner in choice.target.__mro__
    return choice.own if is_inherited else choice.provider


def may_stand_for(kernel: CustomOp, other: CustomOp) -> bool:
    """Return True if the kernel of one op may do the work of another op, too.

    The other op must have opgraft's own definition alone, or a kernel of the same distribution: one
    provider then answers for both. A kernel of another provider is never passed over.
    """
    opgraft = discover().provider_of(__name__)
    return served_by(other) in (opgraft, served_by(kernel))
