"""Send tokens to the ranks of their experts, and bring the outputs back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.distributed import ParallelGroup
from opgraft.ops.precision import compute_dtype
from opgraft.registry.signatures import called_with
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Called with tokens, weights and ids of experts of this rank.

Returns the weighted sum for each token, rounded once.
"""


@PluggableClass.register("expert_exchange")
class ExpertExchange(PluggableClass):
    """Sends each token once to each rank that has experts of the token, and sums the answers.

    All ranks of the group call the exchange together, also a rank without tokens. A device with a
    faster way replaces this class.

    Args:
        group: ranks with different tokens.
    """

    def __init__(self, group: ParallelGroup) -> None:
        self.group = group

    @called_with(by_position=("x", "topk_weights", "owners", "ids", "experts"))
    def __call__(
        self, x: Tensor, topk_weights: Tensor, owners: Tensor, ids: Tensor, experts: Experts
    ) -> Tensor:
        """Return the summed outputs ``[tokens, hidden_size]`` of the experts of all ranks.

        Args:
            x: the tokens of this rank, ``[tokens, hidden_size]``.
            topk_weights: ``[tokens, topk]``.
            owners: ``[tokens, topk]``, the rank of each expert in the group; -1 for no rank.
            ids: ``[tokens, topk]``, the place of each expert on that rank.
            experts: computes the experts of this rank.
        """
        size = self.group.world_size
        topk = ids.shape[1]
        all_ranks = torch.arange(size, device=owners.device).reshape(size, 1, 1)
        is_owner = owners.unsqueeze(0) == all_ranks  # [ranks, tokens, topk]
        ranks, tokens = is_owner.any(-1).nonzero(as_tuple=True)

        # The host needs the counts, as the sizes of the messages below.
        sent, received = self._message_sizes(ranks)

        choices = torch.where(is_owner[ranks, tokens], ids[tokens].to(torch.int32), -1)
        weights = topk_weights[tokens].float()
        # The bits of int32 travel as float32, so that ids and weights need one message.
        routing = torch.cat((choices.view(torch.float32), weights), 1)

        arrived_routing = self.group.all_to_all(routing, sent, received)
        arrived = self.group.all_to_all(x[tokens], sent, received)
        arrived_ids = arrived_routing[:, :topk].contiguous().view(torch.int32)
        arrived_weights = arrived_routing[:, topk:].contiguous()

        # The outputs have no name, so that their memory is free before the sum.
        returned = self.group.all_to_all(
            experts(arrived, arrived_weights, arrived_ids), received, sent
        )
        sums = torch.zeros(x.shape, dtype=compute_dtype(x.dtype), device=x.device)
        return sums.index_add_(0, tokens, returned.to(sums.dtype)).to(x.dtype)

    def _message_sizes(self, ranks: Tensor) -> tuple[list[int], list[int]]:
        """Return the number of tokens to each rank, and from each rank, on the host."""
        size = self.group.world_size
        counts = torch.bincount(ranks, minlength=size)
        received = self.group.all_to_all(counts, [1] * size, [1] * size).tolist()
        return counts.tolist(), received
