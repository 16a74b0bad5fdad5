"""Sinks of attention: one more score per head (Xiao et al., arXiv:2309.17453)."""

from __future__ import annotations

import torch
from opgraft.distributed import get_tensor_model_parallel_rank
from opgraft.ops.weights import LoadedTensor, copy_weight, set_weight_attrs
from torch import Tensor, nn


def sinks_of_rank(heads: int) -> nn.Parameter:
    """Make a score for each of so many heads of this rank; loading takes its part of those of all ranks."""
    sinks = nn.Parameter(torch.empty(heads), requires_grad=False)

    def load(param: Tensor, loaded: LoadedTensor) -> None:
        copy_weight(param.data, loaded.narrow(0, get_tensor_model_parallel_rank() * heads, heads), "sinks")

    set_weight_attrs(sinks, {"weight_loader": load})
    return sinks
