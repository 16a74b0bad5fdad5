"""The places of a layer's experts on the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from opgraft.errors import LayerError
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertSharing:
    """The numbers that decide how ranks share the experts of a model.

    Attributes:
        ranks: the number of ranks with different experts; 1 if each rank holds a part of every
            expert.
        redundant: places beyond one for each expert, of all ranks.
        records: layers count the tokens of each expert, for a balancer.
    """

    ranks: int = 1
    redundant: int = 0
    records: bool = False


ALONE = ExpertSharing()
"""Experts that are not shared."""


class ExpertPlacement(nn.Module):
    """Maps places to experts. Rank ``r`` has the places ``r · per_rank`` to ``(r + 1) · per_rank``.

    Args:
        num_experts: of the layer.
        redundant: places beyond one for each expert. They hold the first experts, until moved.
        ranks: the number of ranks that share the experts.
        rank: the position of this process among those ranks.
        what: the layer as messages call it.

    Attributes:
        experts: the expert in each place of all ranks.
        loads: int64 ``[places of this rank]``, the tokens of each place since the last reset.

    Raises:
        LayerError: ranks do not divide the places.
    """

    places: Tensor
    replicas: Tensor
    loads: Tensor
    turn: Tensor

    def __init__(self, num_experts: int, redundant: int, ranks: int, rank: int, what: str) -> None:
        super().__init__()
        total = num_experts + redundant
        if total % ranks or redundant < 0:
            raise LayerError(
                f"{what}: {num_experts} experts and {redundant} redundant ones cannot be shared by "
                f"{ranks} ranks evenly: set parallel.redundant_experts so that the ranks divide "
                "the sum"
            )

        self.num_experts = num_experts
        self.redundant = redundant
        self.ranks = ranks
        self.rank = rank
        self.per_rank = total // ranks

        # The places of each expert; unused columns repeat its first place.
        self._add_counts("places", num_experts, redundant + 1)
        self._add_counts("replicas", num_experts)
        self._add_counts("loads", self.per_rank)

        # The number of tokens so far, for the turns of replicas.
        self._add_counts("turn")
        self.place([place % num_experts for place in range(total)])

    def _add_counts(self, name: str, *shape: int) -> None:
        """Add a buffer of zeros. No checkpoint has the buffer."""
        self.register_buffer(name, torch.zeros(shape, dtype=torch.int64), persistent=False)

    @property
    def local(self) -> tuple[int, ...]:
        """The experts of this rank, in the order of its places."""
        first = self.rank * self.per_rank
        return self.experts[first : first + self.per_rank]

    @property
    def elsewhere(self) -> frozenset[int]:
        """The experts without a place on this rank."""
        return frozenset(range(self.num_experts)) - set(self.local)

    def place(self, experts: Sequence[int]) -> None:
        """Put experts into the places of all ranks. Every expert needs at least one place."""
        self.experts = tuple(experts)
        places_of: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(experts):
            places_of[expert].append(place)

        width = self.redundant + 1
        filled = [places + places[:1] * (width - len(places)) for places in places_of]
        self.places.copy_(torch.tensor(filled))
        self.replicas.copy_(torch.tensor([len(places) for places in places_of]))

    def choose(self, topk_ids: Tensor) -> Tensor:
        """Return a place for each chosen expert, ``[tokens, topk]`` in int64.

        Tokens take the replicas of an expert in turn, from call to call. An id of -1 stays -1.
        Tensor ranks have the same tokens and make the same choice.
        """
        # An id of -1 would index the last expert; its place is dropped below.
        ids = topk_ids.long().clamp(min=0)
        turn: Tensor | int = 0
        if self.redundant:
            tokens = ids.shape[0]
            numbers = self.turn + torch.arange(tokens, device=ids.device)
            turn = numbers.unsqueeze(1) % self.replicas[ids]
            self.turn += tokens
        return self.places[ids, turn].where(topk_ids >= 0, -1)

    def record(self, local: Tensor) -> None:
        """Count tokens ``[rows, topk]`` by their places on this rank; -1 for other ranks."""
        # Entry 0 counts the -1, and is dropped.
        counts = self.loads.new_zeros(self.per_rank + 1)
        entries = local.flatten().long() + 1
        counts.index_add_(0, entries, torch.ones_like(entries))
        self.loads += counts[1:]
