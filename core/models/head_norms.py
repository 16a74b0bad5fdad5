"""Norms of heads with a weight for each head."""

from __future__ import annotations

import torch
from opgraft.ops.layernorm import RMSNorm
from opgraft.ops.weights import LoadedTensor, copy_weight, set_weight_attrs
from torch import Tensor, nn


class HeadNorms(nn.Module):
    """Root mean square norms with a weight ``[heads, head_size]`` (arXiv:2509.04897).

    Args:
        heads: the number of heads of this rank.
        head_size: elements of a head.
        eps: added to the mean square.
        first: the number of this rank's first head among the heads of all ranks.
    """

    def __init__(self, heads: int, head_size: int, eps: float, first: int) -> None:
        super().__init__()
        # The op has one weight for all rows, so the weights of heads are multiplied here.
        self.norm = RMSNorm(head_size, eps=eps, has_weight=False)
        self.weight = nn.Parameter(torch.ones(heads, head_size), requires_grad=False)

        def load(param: Tensor, loaded: LoadedTensor) -> None:
            own_heads = loaded.narrow(0, first, heads)
            copy_weight(param.data, own_heads, "the weight of norms of heads")

        set_weight_attrs(self.weight, {"weight_loader": load})

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., heads, head_size]``."""
        normalised: Tensor = self.norm(x)
        return normalised * self.weight
