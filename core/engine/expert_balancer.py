"""``ExpertBalancer``: moves experts between ranks, a few at a time between steps, by the tokens that they computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from opgraft.config import ParallelConfig
from opgraft.distributed import ParallelGroup, get_ep_group
from opgraft.errors import LayerError
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

    Raises:
        LayerError: a weight method does not say what it keeps of each expert.
    """

    def __init__(self, model: nn.Module, every: int, most: int) -> None:
        found = (layer for layer in model.modules() if isinstance(layer, FusedMoE) and layer.records)
        self.layers = [(layer, layer.placement) for layer in found if layer.placement is not None]
        for layer, placement in self.layers:
            _expect_movable(layer, placement)
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


def _expect_movable(layer: FusedMoE, placement: ExpertPlacement) -> None:
    shapes = [tuple(tensor.shape) for tensor in layer.quant_method.expert_tensors(layer)]
    if not shapes or any(shape[:1] != (placement.per_rank,) for shape in shapes):
        raise LayerError(
            f"{layer.name}: its experts are to move between ranks, and {type(layer.quant_method).__name__} keeps of "
            f"them tensors of the shapes {shapes}, expected some, each of {placement.per_rank} experts: have its "
            "expert_tensors return what it keeps, or turn off parallel.expert_balance_steps"
        )


def _carry_out(layer: FusedMoE, placement: ExpertPlacement, together: Sequence[Move]) -> None:
    """Bring weights to their new places, and note them."""
    experts = list(placement.experts)
    sources = [experts.index(expert) for _, expert in together]
    if len(together) == 2:
        sources = [together[1][0], together[0][0]]
    weights = layer.quant_method.expert_tensors(layer)
    first = placement.rank * placement.per_rank
    own = range(first, first + placement.per_rank)
    kept = {source: [_at(weight, source - first).clone() for weight in weights] for source in sources if source in own}
    group = get_ep_group()
    for (place, expert), source in zip(together, sources, strict=True):
        experts[place] = expert
        ranks = source // placement.per_rank, place // placement.per_rank
        if source in own and place not in own:
            for tensor in kept[source]:
                group.send(tensor.contiguous().view(torch.uint8), ranks[1])
        elif place in own:
            arrived = (
                kept[source] if source in own else [_received(group, _at(weight, 0), ranks[0]) for weight in weights]
            )
            for weight, tensor in zip(weights, arrived, strict=True):
                _at(weight, place - first).copy_(tensor)
    layer.place_experts(experts)


def _at(weight: Tensor, place: int) -> Tensor:
    """Return the part of one place, which has a dimension also where an expert has one number."""
    return weight[place : place + 1]


def _received(group: ParallelGroup, like: Tensor, rank: int) -> Tensor:
    """Receive a tensor like another one, as bytes, which every backend sends."""
    size = (*like.shape[:-1], like.shape[-1] * like.element_size())
    return group.recv(size, torch.uint8, like.device, rank).view(like.dtype)
