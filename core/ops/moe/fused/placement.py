"""The places of a layer's experts on the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from opgraft.errors import LayerError
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertSharing:
    """The way in which ranks share the experts of a model's layers.

    Attributes:
        ranks: how many have different experts; where it is 1, each rank has its part of every expert.
        redundant: places beyond one for each expert, of all ranks.
        records: layers count the tokens that experts compute, for a balancer.
    """

    ranks: int = 1
    redundant: int = 0
    records: bool = False


ALONE = ExpertSharing()
"""Experts that are not shared."""


class ExpertPlacement(nn.Module):
    """Says which expert stands in each place. Ranks have equally many places, one rank's after the other's.

    Args:
        num_experts: of the layer.
        redundant: places beyond one for each expert; the first experts stand there, until they are moved.
        ranks: that share the experts.
        rank: the position of this process among them.
        what: the layer as messages call it.

    Attributes:
        experts: the expert in each place of all ranks.
        loads: int64 ``[places of this rank]``, the tokens that each computed since it was last set to zero.

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
                f"{what}: {num_experts} experts and {redundant} redundant ones cannot be shared by {ranks} ranks "
                "evenly: set parallel.redundant_experts so that the ranks divide the sum"
            )
        self.num_experts, self.redundant, self.ranks, self.rank = (
            num_experts,
            redundant,
            ranks,
            rank,
        )
        self.per_rank = total // ranks
        self.register_buffer(
            "places", torch.zeros(num_experts, redundant + 1, dtype=torch.int64), persistent=False
        )
        self.register_buffer(
            "replicas", torch.zeros(num_experts, dtype=torch.int64), persistent=False
        )
        self.register_buffer(
            "loads", torch.zeros(self.per_rank, dtype=torch.int64), persistent=False
        )
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64), persistent=False)
        self.place([place % num_experts for place in range(total)])

    @property
    def local(self) -> tuple[int, ...]:
        """The experts of this rank, in the order of its places."""
        return self.experts[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]

    @property
    def elsewhere(self) -> frozenset[int]:
        """The experts that this rank has not."""
        return frozenset(range(self.num_experts)) - set(self.local)

    def place(self, experts: Sequence[int]) -> None:
        """Note which expert stands in each place from now on; every expert stands in one at least."""
        self.experts = tuple(experts)
        rows: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(experts):
            rows[expert].append(place)
        filled = [row + row[:1] * (self.redundant + 1 - len(row)) for row in rows]
        self.places.copy_(torch.tensor(filled))
        self.replicas.copy_(torch.tensor([len(row) for row in rows]))

    def choose(self, topk_ids: Tensor) -> Tensor:
        """Return a place for each expert that a token chose; tokens take its replicas in turn, from call to call.

        ``[tokens, topk]`` to the same shape, in int64; an id of -1, which is no expert's, stays -1. Tensor ranks, which
        have the same tokens, choose alike.
        """
        ids = topk_ids.long().clamp(min=0)
        turn: Tensor | int = 0
        if self.redundant:
            numbers = self.turn + torch.arange(ids.shape[0], device=ids.device)
            turn = numbers.unsqueeze(1) % self.replicas[ids]
            self.turn += ids.shape[0]
        return self.places[ids, turn].where(topk_ids >= 0, -1)

    def record(self, local: Tensor) -> None:
        """Count tokens by the places of this rank, ``[rows, topk]``; -1 for those of others."""
        counts = self.loads.new_zeros(self.per_rank + 1)
        flat = local.flatten().long() + 1
        self.loads += counts.index_add_(0, flat, torch.ones_like(flat))[1:]
