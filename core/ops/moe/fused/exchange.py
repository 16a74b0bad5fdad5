"""The way of tokens to the ranks that have their experts, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.distributed import ParallelGroup
from opgraft.ops.precision import compute_dtype
from opgraft.registry.signatures import called_with
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Called with tokens, weights and ids of experts of this rank; returns their weighted sums, rounded once."""


@PluggableClass.register("expert_exchange")
class ExpertExchange(PluggableClass):
    """Sends each token to the ranks that have experts of it, once to each, and sums what comes back.

    Every rank of the group calls it in turn, one without tokens too. A device that has a faster way replaces it.

    Args:
        group: ranks with different tokens.
    """

    def __init__(self, group: ParallelGroup) -> None:
        self.group = group

    @called_with(by_position=("x", "topk_weights", "owners", "ids", "experts"))
    def __call__(
        self, x: Tensor, topk_weights: Tensor, owners: Tensor, ids: Tensor, experts: Experts
    ) -> Tensor:
        """Return ``[tokens, hidden_size]``, what the experts of all ranks of the group make of this rank's tokens.

        Args:
            x: ``[tokens, hidden_size]``.
            topk_weights: ``[tokens, topk]``.
            owners: ``[tokens, topk]``, the rank in the group that has the expert; -1 for one that none has.
            ids: ``[tokens, topk]``, the expert by its place on that rank.
            experts: computes those of this rank.
        """
        size, topk = self.group.world_size, ids.shape[1]
        wanted = owners.unsqueeze(0) == torch.arange(size, device=owners.device).reshape(size, 1, 1)
        ranks, tokens = wanted.any(-1).nonzero(as_tuple=True)
        there = wanted[ranks, tokens]
        sent = torch.bincount(ranks, minlength=size)
        received = self.group.all_to_all(sent, [1] * size, [1] * size).tolist()
        sizes = (sent.tolist(), received)
        chosen = torch.where(there, ids[tokens].to(torch.int32), -1)
        weights = topk_weights[tokens].float()
        routing = self.group.all_to_all(torch.cat((chosen.view(torch.float32), weights), 1), *sizes)
        arrived = self.group.all_to_all(x[tokens], *sizes)
        given, shares = (
            routing[:, :topk].contiguous().view(torch.int32),
            routing[:, topk:].contiguous(),
        )
        made = self.group.all_to_all(experts(arrived, shares, given), *reversed(sizes))
        sums = torch.zeros(x.shape, dtype=compute_dtype(x.dtype), device=x.device)
        return sums.index_add_(0, tokens, made.to(sums.dtype)).to(x.dtype)
