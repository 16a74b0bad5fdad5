"""A linear layer over a bfloat16 weight in 12 bits."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.linear.lossless.storage import to_12_bits
from torch import Tensor, nn

__all__ = ["LosslessLinear"]


@CustomOp.register("lossless_linear")
class LosslessLinear(CustomOp):
    """``x · Wᵀ + bias`` with a bfloat16 weight that is stored in 12 bits, without loss.

    ``opgraft.ops.linear.lossless.storage.to_12_bits`` makes the buffers from a plain weight.

    Args:
        dtype: of the bias.

    Shapes:
        ``[..., in_features]`` to ``[..., out_features]``. The buffers are those of
        ``lossless_linear``: ``weight``, ``exponents``, ``places`` and ``units``.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bias = None
        if bias:
            zeros = torch.zeros(out_features, device=device, dtype=dtype)
            self.bias = nn.Parameter(zeros, requires_grad=False)

        shape = (out_features, in_features)
        made = to_12_bits(torch.zeros(shape, device=device, dtype=torch.bfloat16))
        self.register_buffer("weight", made.codes)
        self.register_buffer("exponents", made.exponents)
        self.register_buffer("places", made.places)
        self.register_buffer("units", made.units)

    @calls_functional
    def forward_native(self, x: Tensor, *, functional: Any = NATIVE) -> Tensor:
        """Return ``lossless_linear`` of ``x``.

        Raises:
            ValueError: a tensor does not fit.
        """
        return functional.lossless_linear(
            x, self.weight, self.exponents, self.places, self.units, self.bias
        )

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}"
