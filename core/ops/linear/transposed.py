"""The linear layer of GPT-2, with a transposed weight."""

from __future__ import annotations

import torch
from opgraft.binding.custom_op import CustomOp, PluggableLayer
from opgraft.ops.linear import functional
from torch import Tensor, nn

__all__ = ["TransposedLinear"]


@CustomOp.register("transposed_linear")
class TransposedLinear(PluggableLayer):
    """``x · weight + bias``, by the functional form ``linear`` over a view of the weight.

    Kernels pack copies of parameters only, so they do not pack this view.

    Args:
        in_features: elements of the last dimension of the input.
        out_features: elements of the last dimension of the result.
        bias: whether there is a bias ``[out_features]``.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``; the weight is
        ``[in_features, out_features]``.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        zeros = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.register_parameter("bias", zeros)
        # As transformers initialises GPT-2.
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight.t(), self.bias)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"
