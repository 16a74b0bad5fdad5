"""Sinks of attention: one more score per head (Xiao et al., arXiv:2309.17453)."""

from __future__ import annotations

import torch
from opgraft.ops.weights import LoadedTensor, copy_weight, set_weight_attrs
from torch import Tensor, nn


def sinks_of_rank(first: int, heads: int) -> nn.Parameter:
    """Make a parameter with a score for each head of this rank.

    Args:
        first: the number of this rank's first head among the heads of all ranks.
        heads: the number of heads of this rank.
    """
    sinks = nn.Parameter(torch.empty(heads), requires_grad=False)

    def load(param: Tensor, loaded: LoadedTensor) -> None:
        copy_weight(param.data, loaded.narrow(0, first, heads), "sinks")

    set_weight_attrs(sinks, {"weight_loader": load})
    return sinks
