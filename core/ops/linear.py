"""Linear layers."""

from __future__ import annotations

import torch
from opgraft.custom_op import CustomOp
from torch import Tensor, nn
from torch.nn import functional as F


@CustomOp.register("linear")
class Linear(CustomOp, nn.Linear):
    """An affine map ``x · weightᵀ + bias``, a drop-in for ``torch.nn.Linear``, of which it is a subclass.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``; the weight is ``[out_features, in_features]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    def forward_native(self, input: Tensor) -> Tensor:
        """The mapped ``input``; torch's function checks it, so that ``torch.fx`` can trace a model of this op."""
        return F.linear(input, self.weight, self.bias)
