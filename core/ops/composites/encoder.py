"""Layers of encoder models that end a linear map with an activation or a residual, which kernels compute with it.

Each takes the layers that it is made of and keeps them as children, under names of the caller's choice, so that it can
stand for a module of a model without a change in the model's parameters. It hands its linear layer the rest as an
epilogue where that layer's kernel takes one (it has the functional form ``linear``), where no kernel that somebody else
provides for the activation is passed over (see ``may_stand_for``), and where nobody could tell: without a gradient,
hooks or a compiler. Otherwise it calls its children one after another.
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

Kernel = Callable[..., Tensor]
_COMPILED = "while a compiler traces, the layers are called one after another"


class EpilogueLayer(Composite):
    """A layer whose linear map may be computed together with what follows it."""

    def kernel_for(self, linear: Any, act: nn.Module | None, *tensors: Tensor) -> Kernel | None:
        """Return the function ``linear`` that may be called for a linear layer and an activation, or ``None``."""
        if (
            torch.compiler.is_compiling()
            or is_observed(linear)
            or (act is not None and is_observed(act))
        ):
            return None
        kernel: Kernel | None = self.chosen(_fused, linear, act)
        if (
            kernel is None
            or linear.activation != "none"
            or not linear.quant_method.holds_weight(linear)
        ):
            return None
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.is_nested:
                return None
        if torch.is_grad_enabled() and any(
            t.requires_grad for t in (*tensors, *linear.parameters())
        ):
            return None
        return kernel


def _fused(linear: nn.Module, act: nn.Module | None) -> Kernel | None:
    """Return the functional form of a linear layer's kernel, if that kernel may compute the activation too."""
    if not isinstance(linear, Linear) or (
        isinstance(act, CustomOp) and not may_stand_for(linear, act)
    ):
        return None
    return linear.binding.kernel.winner.functional("linear")


@CustomOp.register("linear_act")
class LinearAct(EpilogueLayer):
    """``act(linear(x))``, such as the first half of a feed-forward layer (Vaswani et al., arXiv:1706.03762).

    Args:
        linear: the linear map, ``[..., in_features]`` to ``[..., out_features]``.
        act: the activation.
        names: what the two are called.
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
        linear, act = self.get_submodule(self.names[0]), self.get_submodule(self.names[1])
        with torch.no_grad():
            fused = epilogue_of(act) is not None and self.kernel_for(linear, act) is not None
        return frozenset(self.names[1:2]) if fused else frozenset()


@CustomOp.register("mlp")
class MLP(LinearAct):
    """``down(act(up(x)))``, the feed-forward layer of a transformer (Vaswani et al., arXiv:1706.03762).

    Args:
        up: ``[..., hidden_size]`` to ``[..., intermediate_size]``.
        act: the activation.
        down: ``[..., intermediate_size]`` to ``[..., hidden_size]``.
        names: what the three are called.
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
    """``norm(dropout(linear(x)) + residual)``, the end of a layer that normalises after adding (arXiv:1706.03762).

    Args:
        linear: the linear map.
        norm: the norm of the sum.
        dropout: applies in training only; ``None`` if there is none.
        names: what linear map, norm and dropout are called.

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
        alike = not x.is_nested and x.shape[:-1] == residual.shape[:-1]
        kernel = self.kernel_for(linear, None, x, residual) if alike and not drops else None
        if kernel is not None and residual.shape[-1] == linear.out_features:
            summed = linear.quant_method.apply(
                linear, x, linear.bias, residual=residual, kernel=kernel
            )
        else:
            mapped = linear(x)
            summed = (mapped if dropout is None else dropout(mapped)) + residual
        out: Tensor = norm(summed)
        return out
