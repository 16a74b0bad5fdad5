"""``ExpertBalancer``: moves experts between ranks, a few at a time between steps, by the tokens that they computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from opgraft.config import ParallelConfig
from opgraft.distributed import ParallelGroup, get_ep_group
from opgraft.ops.fused_moe import FusedMoE
from opgraft.ops.fused_moe.balance import Move, heaviest_rank, moves, nearest, place_by_load
from opgraft.ops.fused_moe.placement import ExpertPlacement
from torch import Tensor, nn


class ExpertBalancer:
    """Places the experts of each layer anew after so many steps, where that takes load from the busiest rank.

    Every rank of the expert group calls ``after_step`` behind each step.

    Args:
        model: with layers of experts that are shared by ranks and record their loads.
        every: steps between two placements; experts that are still to be moved then are moved first.
        most: experts that change their place in one call, at least 2.

    Attributes:
        layers: those of the model.
    """

    def __init__(self, model: nn.Module, every: int, most: int) -> None:
        found = (layer for layer in model.modules() if isinstance(layer, FusedMoE) and layer.records)
        self.layers = [(layer, layer.placement) for layer in found if layer.placement is not None]
        self.every, self.most = every, most
        self._steps = 0
        self._waiting: deque[tuple[int, list[Move]]] = deque()

    @classmethod
    def of(cls, model: nn.Module, parallel: ParallelConfig) -> ExpertBalancer | None:
        """Return the balancer that settings ask for; ``None`` where they ask for none, or nothing is shared."""
        if parallel.expert_balance_steps is None:
            return None
        made = cls(model, parallel.expert_balance_steps, parallel.expert_moves)
        return made if made.layers else None

    @torch.no_grad()
    def after_step(self) -> int:
        """Move experts that wait for it, else place them anew if it is time to; return how many were moved."""
        self._steps += 1
        if self._waiting:
            return self._move()
        if self._steps >= self.every:
            self._steps = 0
            self._plan()
        return 0

    def loads(self) -> list[list[int]]:
        """Return the tokens that each expert of each layer computed on all ranks since the last placement."""
        gathered = get_ep_group().all_gather(torch.stack([placement.loads for _, placement in self.layers]), dim=1)
        sums = []
        for (_, placement), row in zip(self.layers, gathered.tolist(), strict=True):
            totals = [0] * placement.num_experts
            for expert, load in zip(placement.experts, row, strict=True):
                totals[expert] += load
            sums.append(totals)
        return sums

    def _plan(self) -> None:
        for number, loads in enumerate(self.loads()):
            placement = self.layers[number][1]
            placement.loads.zero_()
            placed = place_by_load(loads, len(placement.experts), placement.ranks)
            target = nearest(placement.experts, placed)
            before, after = (heaviest_rank(loads, each, placement.ranks) for each in (placement.experts, target))
            if after < before:
                self._waiting.extend((number, together) for together in moves(placement.experts, target))

    def _move(self) -> int:
        made = 0
        while self._waiting and made + len(self._waiting[0][1]) <= self.most:
            number, together = self._waiting.popleft()
            layer, placement = self.layers[number]
            _carry_out(layer, placement, together)
            made += len(together)
        return made


def _carry_out(layer: FusedMoE, placement: ExpertPlacement, together: Sequence[Move]) -> None:
    """Bring weights to their new places, and note them."""
    experts = list(placement.experts)
    sources = [experts.index(expert) for _, expert in together]
    if len(together) == 2:
        sources = [together[1][0], together[0][0]]
    weights = [p for name, p in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]
    first = placement.rank * placement.per_rank
    own = range(first, first + placement.per_rank)
    kept = {source: [weight[source - first].clone() for weight in weights] for source in sources if source in own}
    group = get_ep_group()
    for (place, expert), source in zip(together, sources, strict=True):
        experts[place] = expert
        ranks = source // placement.per_rank, place // placement.per_rank
        if source in own and place not in own:
            for tensor in kept[source]:
                group.send(tensor.view(torch.uint8), ranks[1])
        elif place in own:
            arrived = kept[source] if source in own else [_received(group, weight[0], ranks[0]) for weight in weights]
            for weight, tensor in zip(weights, arrived, strict=True):
                weight[place - first].copy_(tensor)
    placement.place(experts)


def _received(group: ParallelGroup, like: Tensor, rank: int) -> Tensor:
    """Receive a tensor like another one, as bytes, which every backend sends."""
    size = (*like.shape[:-1], like.shape[-1] * like.element_size())
    return group.recv(size, torch.uint8, like.device, rank).view(like.dtype)
