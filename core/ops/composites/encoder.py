"""Layers of encoder models: a linear map with an activation, or with a residual and a norm.

A kernel may compute such a pair at once. Each layer keeps the given layers as children, under names
of the caller's choice. So the layer can replace a module of a model without new names for the
model's parameters.

The layer passes the activation or the residual to the linear kernel as an epilogue, if

- the kernel takes an epilogue: it has the functional form ``linear``,
- no other provider's kernel for the activation is passed over, see ``may_stand_for``,
- nobody can tell the difference: there are no gradients, hooks or compilers.

Otherwise, the layer calls its children one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.marks import falls_back
from opgraft.ops.composites.composite import Composite, epilogue_of, is_observed, may_stand_for
from opgraft.ops.linear.modules import Linear
from torch import Tensor, nn

__all__ = ["LinearAct", "LinearAddNorm", "MLP"]

Kernel = Callable[..., Tensor]
_COMPILED = "while a compiler traces, the layers are called one after another"


class EpilogueLayer(Composite):
    """A layer with a linear map and an epilogue: a kernel may compute both at once."""

    def kernel_for(self, linear: Any, act: nn.Module | None, *tensors: Tensor) -> Kernel | None:
        """Return the function ``linear`` for a linear layer and an activation, or ``None``.

        ``None`` stands for separate calls of the two layers.
        """
        if torch.compiler.is_compiling() or is_observed(linear):
            return None
        if act is not None and is_observed(act):
            return None

        kernel: Kernel | None = self.chosen(_joint_kernel, linear, act)
        # A linear layer with an activation of its own has no place for another epilogue.
        if kernel is None or linear.activation != "none":
            return None
        if not linear.quant_method.holds_weight(linear):
            return None

        # Subclasses of tensors, and nested tensors, have kernels of their own.
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.is_nested:
                return None

        if torch.is_grad_enabled():
            for tensor in (*tensors, *linear.parameters()):
                if tensor.requires_grad:
                    return None
        return kernel


def _joint_kernel(linear: nn.Module, act: nn.Module | None) -> Kernel | None:
    """Return a linear layer's function ``linear``, if it may stand for the activation too."""
    if not isinstance(linear, Linear):
        return None
    if isinstance(act, CustomOp) and not may_stand_for(linear, act):
        return None
    return linear.binding.kernel.winner.functional("linear")


@CustomOp.register("linear_act")
class LinearAct(EpilogueLayer):
    """``act(linear(x))``, such as the first half of a feed-forward layer (arXiv:1706.03762).

    Args:
        linear: the linear map, ``[..., in_features]`` to ``[..., out_features]``.
        act: the activation.
        names: the names of the two children.
    """

    def __init__(
        self, linear: nn.Module, act: nn.Module, names: tuple[str, str] = ("linear", "act")
    ) -> None:
        super().__init__()
        self.names: tuple[str, ...] = names
        for name, layer in zip(names, (linear, act), strict=True):
            self.add_module(name, layer)

    @falls_back(_COMPILED)
    def forward(self, x: Tensor) -> Tensor:
        linear: Any = self._modules[self.names[0]]
        act: Any = self._modules[self.names[1]]
        epilogue = epilogue_of(act)
        kernel = None if epilogue is None else self.kernel_for(linear, act, x)
        if kernel is None:
            out: Tensor = act(linear(x))
            return out

        mapped: Tensor = linear.quant_method.apply(
            linear, x, linear.bias, activation=epilogue, kernel=kernel
        )
        return mapped

    def idle(self) -> frozenset[str]:
        linear = self.get_submodule(self.names[0])
        act = self.get_submodule(self.names[1])
        if epilogue_of(act) is None:
            return frozenset()

        with torch.no_grad():
            kernel = self.kernel_for(linear, act)
        return frozenset() if kernel is None else frozenset(self.names[1:2])


@CustomOp.register("mlp")
class MLP(LinearAct):
    """``down(act(up(x)))``, the feed-forward layer of a transformer (arXiv:1706.03762).

    Args:
        up: ``[..., hidden_size]`` to ``[..., intermediate_size]``.
        act: the activation.
        down: ``[..., intermediate_size]`` to ``[..., hidden_size]``.
        names: the names of the three children.
    """

    def __init__(
        self,
        up: nn.Module,
        act: nn.Module,
        down: nn.Module,
        names: tuple[str, str, str] = ("up", "act", "down"),
    ) -> None:
        super().__init__(up, act, names[:2])
        self.names = names
        self.add_module(names[2], down)

    @falls_back(_COMPILED)
    def forward(self, x: Tensor) -> Tensor:
        down: Any = self._modules[self.names[2]]
        out: Tensor = down(LinearAct.forward(self, x))
        return out


@CustomOp.register("linear_add_norm")
class LinearAddNorm(EpilogueLayer):
    """``norm(dropout(linear(x)) + residual)``, the end of a layer of an encoder.

    Source: Vaswani et al., arXiv:1706.03762.

    Args:
        linear: the linear map.
        norm: the norm of the sum.
        dropout: dropout in training; ``None`` for none.
        names: the names of linear map, norm and dropout.

    Shapes:
        ``x`` is ``[..., in_features]``; ``residual`` and the result are ``[..., out_features]``.
    """

    def __init__(
        self,
        linear: nn.Module,
        norm: nn.Module,
        dropout: nn.Module | None = None,
        names: tuple[str, str, str] = ("linear", "norm", "dropout"),
    ) -> None:
        super().__init__()
        self.names = names
        for name, layer in zip(names, (linear, norm, dropout), strict=True):
            self.add_module(name, layer)

    @falls_back(_COMPILED)
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        modules = self._modules
        linear: Any = modules[self.names[0]]
        norm: Any = modules[self.names[1]]
        dropout = modules[self.names[2]]
        drops = dropout is not None and (dropout.training or is_observed(dropout))

        # A kernel does not broadcast.
        are_alike = not x.is_nested and x.shape[:-1] == residual.shape[:-1]
        kernel = None
        if are_alike and not drops:
            kernel = self.kernel_for(linear, None, x, residual)

        if kernel is not None and residual.shape[-1] == linear.out_features:
            summed = linear.quant_method.apply(
                linear, x, linear.bias, residual=residual, kernel=kernel
            )
        else:
            mapped = linear(x)
            if dropout is not None:
                mapped = dropout(mapped)
            summed = mapped + residual
        out: Tensor = norm(summed)
        return out
