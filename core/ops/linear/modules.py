"""Linear layers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, FunctionalKernels, calls_functional
from opgraft.binding.marks import falls_back, needs
from opgraft.ops.checks import expect_choice
from opgraft.ops.linear import functional as forms
from opgraft.ops.linear import packed as packed_linear
from opgraft.ops.linear.methods import UnquantizedLinearMethod
from opgraft.ops.linear.packed import PackedWeight
from torch import Tensor, nn

__all__ = ["Linear"]


@CustomOp.register("linear")
class Linear(CustomOp, nn.Linear):
    """``activation(x · weightᵀ + bias) + residual``, a subclass of ``torch.nn.Linear``.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``; the weight is
        ``[out_features, in_features]``.

    Args:
        activation: ``none``, ``relu``, ``silu``, ``gelu`` or ``gelu_tanh``.

    Raises:
        ValueError: the activation has another name.
    """

    # Past __new__, as no replacement of a plugin may serve this class.
    quant_method: UnquantizedLinearMethod = object.__new__(UnquantizedLinearMethod)
    _packed: PackedWeight | None = None
    functional_cpu: ClassVar = FunctionalKernels(
        {"linear": packed_linear.linear}, compiled={"linear": packed_linear.compiled}
    )

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

    @calls_functional
    def forward_native(
        self, input: Tensor, residual: Tensor | None = None, *, functional: Any = NATIVE
    ) -> Tensor:
        """Return the form ``linear`` of ``input`` and ``residual``.

        Raises:
            ValueError: an argument does not fit.
        """
        mapped: Tensor = functional.linear(input, self.weight, self.bias, self.activation, residual)
        return mapped

    @needs(packed_linear.missing)
    @falls_back(
        "under torch.export and torch.jit.trace torch's own linear runs; a packed weight is "
        "refused by an export, and rebuilt by each call of a trace"
    )
    def forward_cpu(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the same by oneDNN, if oneDNN is faster and no gradient is required."""
        return self.quant_method.apply(
            self,
            input,
            self.bias,
            activation=self.activation,
            residual=residual,
            kernel=packed_linear.linear,
        )

    def process_weights_after_loading(self) -> None:
        """Leave the weight alone: only ``freeze`` lets kernels pack the weight."""

    def release_weights(self) -> None:
        """Make the weight an ordinary parameter again."""

    def extra_repr(self) -> str:
        activation = "" if self.activation == "none" else f", activation={self.activation!r}"
        return super().extra_repr() + activation
