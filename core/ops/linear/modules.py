"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.marks import needs
from opgraft.ops.checks import expect_choice
from opgraft.ops.linear import functional as forms
from opgraft.ops.linear import packed as packed_linear
from torch import Tensor, nn


@CustomOp.register("linear")
class Linear(CustomOp, nn.Linear):
    """``activation(x · weightᵀ + bias) + residual``, a drop-in for ``torch.nn.Linear``, of which it is a subclass.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``; the weight is ``[out_features, in_features]``.

    Args:
        activation: what follows the affine map: ``none``, ``relu``, ``silu``, ``gelu`` or ``gelu_tanh``.

    Raises:
        ValueError: another activation.
    """

    functional_cpu: ClassVar = {"linear": packed_linear.linear}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "none",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        expect_choice("linear", "activation", activation, tuple(forms.ACTIVATIONS))
        self.activation = activation

    def forward_native(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """The mapped ``input``; raises ``ValueError`` where something does not fit."""
        return forms.linear.native(input, self.weight, self.bias, self.activation, residual)

    @needs(packed_linear.missing)
    def forward_cpu(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same over a weight that was packed once, where that is faster and no gradient is required."""
        return packed_linear.linear(input, self.weight, self.bias, self.activation, residual)

    def holds_weight(self) -> bool:
        """Whether ``map_by`` may be called: the weight is this layer's own, and is not computed for a call."""
        return "weight" in self._parameters

    def map_by(self, kernel: Callable[..., Any], x: Tensor, activation: str, residual: Tensor | None = None) -> Any:
        """What ``kernel``, a function such as the form ``linear``, makes of ``x`` and the parameters."""
        parameters = self._parameters
        return kernel(x, parameters["weight"], parameters["bias"], activation, residual)

    def extra_repr(self) -> str:
        activation = "" if self.activation == "none" else f", activation={self.activation!r}"
        return super().extra_repr() + activation
