"""``ExpertBalancer``: moves experts between ranks, part by part between steps, by the tokens that they computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from time import perf_counter

import torch
from opgraft.config import ParallelConfig
from opgraft.distributed import get_ep_group
from opgraft.errors import LayerError
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.moe.fused.balance import Move, heaviest_rank, moves, nearest, place_by_load
from opgraft.ops.moe.fused.placement import ExpertPlacement
from torch import Tensor, nn

LEAST_BYTES = 1 << 20
"""Sent in a pause, the first one too, of which nobody knows how long it takes."""
SHORT, LONG = 0.2, 0.4
"""Parts of a step: after a shorter pause twice as much is sent in the next, after a longer one half as much."""


class ExpertBalancer:
    """Places the experts of each layer anew after so many steps, where that takes load from the busiest rank.

    Every rank of the expert group calls ``after_step`` behind each step. Each pause sends a part of
    the weights, small beside a step, and experts change their places when they are there as a
    whole.

    Args:
        model: with layers of experts that are shared by ranks and record their loads.
        every: steps between two placements; experts that are still to be moved then are moved
            first.
        most: experts that change their place in one call, at least 2.

    Attributes:
        layers: those of the model.
        waiting: moves that are still to be made, by the number of the layer.

    Raises:
        LayerError: a weight method does not say what it keeps of each expert.
    """

    def __init__(self, model: nn.Module, every: int, most: int) -> None:
        found = (
            layer for layer in model.modules() if isinstance(layer, FusedMoE) and layer.records
        )
        self.layers = [(layer, layer.placement) for layer in found if layer.placement is not None]
        for layer, placement in self.layers:
            _expect_movable(layer, placement)
        self.every, self.most = every, most
        self.waiting: deque[tuple[int, list[Move]]] = deque()
        self._steps, self._left = 0, perf_counter()
        self._transfer: _Transfer | None = None
        self._bytes, self._pause = LEAST_BYTES, 0.0

    @classmethod
    def of(cls, model: nn.Module, parallel: ParallelConfig) -> ExpertBalancer | None:
        """Return the balancer that settings ask for; ``None`` where they ask for none, or nothing is shared."""
        if parallel.expert_balance_steps is None:
            return None
        made = cls(model, parallel.expert_balance_steps, parallel.expert_moves)
        return made if made.layers else None

    @torch.no_grad()
    def after_step(self, started: float | None = None) -> int:
        """Move experts that wait for it, else place them anew if it is time to; return how many were moved.

        Args:
            started: when the step began, by ``time.perf_counter``: a pause is to be short beside
                it. The end of the last call if not given, where idle time counts as a part of a
                step.
        """
        self._steps += 1
        moved = 0
        if self.waiting:
            moved = self._move(perf_counter() - (self._left if started is None else started))
        elif self._steps >= self.every:
            self._steps = 0
            self._plan()
        self._left = perf_counter()
        return moved

    def loads(self) -> list[list[int]]:
        """Return the tokens that each expert of each layer computed on all ranks since the last placement."""
        gathered = get_ep_group().all_gather(
            torch.stack([placement.loads for _, placement in self.layers]), dim=1
        )
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
            before, after = (
                heaviest_rank(loads, each, placement.ranks) for each in (placement.experts, target)
            )
            if after < before:
                self.waiting.extend(
                    (number, together) for together in moves(placement.experts, target)
                )

    def _move(self, step: float) -> int:
        self._set_pace(step)
        # After the ranks have met: waiting for one that is late is no reason to send
        # less.
        started = perf_counter()
        made, left = 0, self._bytes
        while left > 0 and self.waiting and made + len(self.waiting[0][1]) <= self.most:
            number, together = self.waiting[0]
            transfer = self._transfer = self._transfer or _Transfer(*self.layers[number], together)
            left -= transfer.send(left)
            if transfer.is_complete:
                transfer.finish()
                self._transfer = None
                self.waiting.popleft()
                made += len(together)
        self._pause = perf_counter() - started
        return made

    def _set_pace(self, step: float) -> None:
        """Choose how much is sent now, the same on all ranks, by the former pause and what a step took in seconds."""
        percent = ceil(100 * self._pause / step)  # 0 before the first pause only
        longest = int(
            get_ep_group().all_gather(self.layers[0][1].loads.new_tensor([percent])).max()
        )
        if longest > 100 * LONG:
            self._bytes = max(LEAST_BYTES, self._bytes // 2)
        elif 0 < longest < 100 * SHORT:
            self._bytes *= 2


def _expect_movable(layer: FusedMoE, placement: ExpertPlacement) -> None:
    shapes = [tuple(tensor.shape) for tensor in layer.quant_method.expert_tensors(layer)]
    if not shapes or any(shape[:1] != (placement.per_rank,) for shape in shapes):
        raise LayerError(
            f"{layer.name}: its experts are to move between ranks, and {type(layer.quant_method).__name__} keeps of "
            f"them tensors of the shapes {shapes}, expected some, each of {placement.per_rank} experts: have its "
            "expert_tensors return what it keeps, or turn off parallel.expert_balance_steps"
        )


class _Transfer:
    """Weights of experts on their way to places that are given to them together.

    Args:
        layer: the layer.
        placement: its places.
        together: the moves, one or two.

    Attributes:
        is_complete: all weights are where they are to be written.
    """

    def __init__(
        self, layer: FusedMoE, placement: ExpertPlacement, together: Sequence[Move]
    ) -> None:
        self._layer, self._placement, self._together = layer, placement, together
        self._weights = layer.quant_method.expert_tensors(layer)
        places = [place for place, _ in together]
        self._sources = (
            places[::-1] if len(together) == 2 else [placement.experts.index(together[0][1])]
        )
        ranks = [
            (source // placement.per_rank, place // placement.per_rank)
            for source, place in self._routes
        ]
        self._travels = ranks[0][0] != ranks[0][1]  # there and back, if there are two
        self._number = self._offset = 0
        self._arrived: dict[int, list[Tensor]] = {
            place: [torch.empty_like(_bytes_at(weight, 0)) for weight in self._weights]
            for place in places
            if self._travels and self._is_here(place)
        }

    @property
    def _routes(self) -> list[tuple[int, int]]:
        return [
            (source, place)
            for source, (place, _) in zip(self._sources, self._together, strict=True)
        ]

    @property
    def is_complete(self) -> bool:
        return not self._travels or self._number == len(self._weights)

    def send(self, most: int) -> int:
        """Send or receive the next part, of at most so many bytes of a tensor; return how many go through here."""
        if self.is_complete:
            return 0
        weight, group = self._weights[self._number], get_ep_group()
        size = _bytes_at(weight, 0).numel()
        part = slice(self._offset, min(self._offset + most, size))
        for source, place in self._routes:
            if self._is_here(source):
                group.send(
                    _bytes_at(weight, self._here(source))[part], place // self._placement.per_rank
                )
            elif self._is_here(place):
                rank = source // self._placement.per_rank
                arriving = group.recv((part.stop - part.start,), torch.uint8, weight.device, rank)
                self._arrived[place][self._number][part] = arriving
        self._number, self._offset = (
            (self._number + 1, 0) if part.stop == size else (self._number, part.stop)
        )
        return (part.stop - part.start) * len(self._together)

    def finish(self) -> None:
        """Write the weights to their new places, and note these."""
        if not self._travels:
            self._arrived = {
                place: [_bytes_at(weight, self._here(source)).clone() for weight in self._weights]
                for source, place in self._routes
                if self._is_here(place)
            }
        for place, tensors in self._arrived.items():
            for weight, arrived in zip(self._weights, tensors, strict=True):
                at = _at(weight, self._here(place))
                at.copy_(arrived.view(weight.dtype).view(at.shape))
        experts = list(self._placement.experts)
        for place, expert in self._together:
            experts[place] = expert
        self._layer.place_experts(experts)

    def _here(self, place: int) -> int:
        """Return a place by its number among those of this rank."""
        return place - self._placement.rank * self._placement.per_rank

    def _is_here(self, place: int) -> bool:
        return 0 <= self._here(place) < self._placement.per_rank


def _at(weight: Tensor, place: int) -> Tensor:
    """Return the part of one place, which has a dimension also where an expert has one number."""
    return weight[place : place + 1]


def _bytes_at(weight: Tensor, place: int) -> Tensor:
    """Return it as bytes, which every backend sends."""
    return _at(weight, place).contiguous().view(torch.uint8).flatten()
