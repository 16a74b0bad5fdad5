"""The additions of adapters to one linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from torch import Tensor

__all__ = ["LoRA"]


@CustomOp.register("lora")
class LoRA(CustomOp):
    """The low-rank additions of several adapters to the results of one linear layer.

    Source: Hu et al., arXiv:2106.09685. ``add_lora_`` says how rows find their adapter.

    Args:
        in_features: elements of the last dimension of the layer's input; of an embedding, the ids.
        sizes: outputs of the layer; of a merged layer, the outputs of each part.
        adapters: the number of adapters.
        rank: of the largest adapter. Zeros fill up the matrices of smaller adapters.
        dtype: of the matrices; torch's default dtype if not given.

    Attributes:
        a: ``[adapters, parts · rank, in_features]``.
        b: ``[adapters, out_features, rank]``, with the scale of the adapter.

    Shapes:
        ``y`` ``[rows, out_features]``, and ``x`` ``[rows, in_features]`` or ids ``[rows]``.
    """

    a: Tensor
    b: Tensor

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        adapters: int,
        rank: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.sizes = tuple(sizes)

        # On a host, zeros take memory when they are written to first.
        a = torch.zeros(adapters, len(sizes) * rank, in_features, device=device, dtype=dtype)
        b = torch.zeros(adapters, sum(sizes), rank, device=device, dtype=dtype)
        self.register_buffer("a", a)
        self.register_buffer("b", b)

    @calls_functional
    def forward_native(
        self, y: Tensor, x: Tensor, bounds: Tensor, *, functional: Any = NATIVE
    ) -> None:
        """Add to ``y``, see ``add_lora_``.

        Raises:
            ValueError: an argument does not fit.
        """
        functional.add_lora_(y, x, self.a, self.b, bounds, self.sizes)

    def extra_repr(self) -> str:
        in_features = self.a.shape[2]
        adapters, _, rank = self.b.shape
        return f"{in_features}, {list(self.sizes)}, adapters={adapters}, rank={rank}"
