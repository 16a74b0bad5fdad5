"""``ExpertBalancer``: moves experts between ranks to even out load, in parts after each step."""

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
"""Bytes of a pause, at least. The first pause sends as many, because its time is not known yet."""
SHORT, LONG = 0.2, 0.4
"""Shares of a step's time.

After a pause shorter than the first, the next pause sends twice as much. After a pause longer than
the second, it sends half.
"""


class ExpertBalancer:
    """Places the experts of each layer anew every few steps, if this relieves the busiest rank.

    Every rank of the expert group calls ``after_step`` after each step. This pause sends a part of
    the weights, in a time small beside a step. Experts change places once all their weights have
    arrived.

    Args:
        model: with layers of experts on several ranks, with a record of loads.
        every: steps between two placements. Moves of the former placement are made first.
        most: experts that change places in one call, at least 2.

    Attributes:
        layers: layers of experts, with their placements.
        waiting: moves still to make, each with the number of the layer.

    Raises:
        LayerError: a weight method does not name the tensors of each expert.
    """

    def __init__(self, model: nn.Module, every: int, most: int) -> None:
        self.layers: list[tuple[FusedMoE, ExpertPlacement]] = []
        for layer in model.modules():
            if not isinstance(layer, FusedMoE) or not layer.records or layer.placement is None:
                continue
            _expect_movable(layer, layer.placement)
            self.layers.append((layer, layer.placement))
        self.every = every
        self.most = most
        self.waiting: deque[tuple[int, list[Move]]] = deque()
        self._steps = 0
        self._left = perf_counter()
        self._transfer: _Transfer | None = None
        self._bytes = LEAST_BYTES
        self._pause = 0.0

    @classmethod
    def of(cls, model: nn.Module, parallel: ParallelConfig) -> ExpertBalancer | None:
        """Return a balancer; ``None`` if settings ask for none, or ranks share no experts."""
        if parallel.expert_balance_steps is None:
            return None
        made = cls(model, parallel.expert_balance_steps, parallel.expert_moves)
        return made if made.layers else None

    @torch.no_grad()
    def after_step(self, started: float | None = None) -> int:
        """Go on with the moves. If there are none, and it is time, place the experts anew.

        Args:
            started: begin of the step, by ``time.perf_counter``, to keep the pause short beside the
                step. By default the end of the last call; idle time then counts as step.

        Returns:
            The number of moved experts.
        """
        self._steps += 1
        moved = 0
        if self.waiting:
            begin = self._left if started is None else started
            moved = self._move(perf_counter() - begin)
        elif self._steps >= self.every:
            self._steps = 0
            self._plan()
        self._left = perf_counter()
        return moved

    def loads(self) -> list[list[int]]:
        """Return the tokens of each expert of each layer since the last placement, of all ranks."""
        own = torch.stack([placement.loads for _, placement in self.layers])
        gathered = get_ep_group().all_gather(own, dim=1)
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
            before = heaviest_rank(loads, placement.experts, placement.ranks)
            after = heaviest_rank(loads, target, placement.ranks)
            if after >= before:
                continue
            for together in moves(placement.experts, target):
                self.waiting.append((number, together))

    def _move(self, step: float) -> int:
        self._set_pace(step)
        # The ranks have met above. The time of waiting for a late rank does not count.
        started = perf_counter()
        made = 0
        left = self._bytes
        while left > 0 and self.waiting:
            number, together = self.waiting[0]
            if made + len(together) > self.most:
                break
            if self._transfer is None:
                self._transfer = _Transfer(*self.layers[number], together)
            left -= self._transfer.send(left)
            if self._transfer.is_complete:
                self._transfer.finish()
                self._transfer = None
                self.waiting.popleft()
                made += len(together)
        self._pause = perf_counter() - started
        return made

    def _set_pace(self, step: float) -> None:
        """Choose the bytes to send now, from the former pause and the seconds of a step.

        All ranks choose the same number.
        """
        # 0 before the first pause only.
        percent = ceil(100 * self._pause / step)
        own = self.layers[0][1].loads.new_tensor([percent])
        longest = int(get_ep_group().all_gather(own).max())
        if longest > 100 * LONG:
            self._bytes = max(LEAST_BYTES, self._bytes // 2)
        elif 0 < longest < 100 * SHORT:
            self._bytes *= 2


def _expect_movable(layer: FusedMoE, placement: ExpertPlacement) -> None:
    """Check that each tensor of a layer has a row for each expert of the rank."""
    method = layer.quant_method
    shapes = [tuple(tensor.shape) for tensor in method.expert_tensors(layer)]
    if not shapes or any(shape[:1] != (placement.per_rank,) for shape in shapes):
        raise LayerError(
            f"{layer.name}: its experts are to move between ranks, and {type(method).__name__} "
            f"keeps of them tensors of the shapes {shapes}, expected some, each of "
            f"{placement.per_rank} experts: have its expert_tensors return what it keeps, or turn "
            "off parallel.expert_balance_steps"
        )


class _Transfer:
    """Weights of experts on their way: one expert to another place, or two that change places.

    Args:
        layer: of the experts.
        placement: places of the layer.
        together: one move, or two.
    """

    def __init__(
        self, layer: FusedMoE, placement: ExpertPlacement, together: Sequence[Move]
    ) -> None:
        self._layer = layer
        self._placement = placement
        self._together = together
        self._weights = layer.quant_method.expert_tensors(layer)
        places = [place for place, _ in together]
        if len(together) == 2:
            sources = places[::-1]
        else:
            [(_, expert)] = together
            sources = [placement.experts.index(expert)]
        self._routes = list(zip(sources, places, strict=True))
        # A second route is the way back, between the same ranks.
        source, place = self._routes[0]
        self._travels = self._rank_of(source) != self._rank_of(place)
        self._number = 0
        self._offset = 0
        self._arrived: dict[int, list[Tensor]] = {}
        for place in places:
            if self._travels and self._is_here(place):
                room = [torch.empty_like(_bytes_at(weight, 0)) for weight in self._weights]
                self._arrived[place] = room

    @property
    def is_complete(self) -> bool:
        """Return True once all weights have arrived on the rank of their new places."""
        return not self._travels or self._number == len(self._weights)

    def send(self, most: int) -> int:
        """Send or receive the next part of a tensor, of at most ``most`` bytes per route.

        Returns:
            The number of bytes that this rank sends and receives.
        """
        if self.is_complete:
            return 0
        group = get_ep_group()
        weight = self._weights[self._number]
        size = _bytes_at(weight, 0).numel()
        begin = self._offset
        end = min(begin + most, size)
        for source, place in self._routes:
            if self._is_here(source):
                leaving = _bytes_at(weight, self._here(source))[begin:end]
                group.send(leaving, self._rank_of(place))
            elif self._is_here(place):
                rank = self._rank_of(source)
                arriving = group.recv((end - begin,), torch.uint8, weight.device, rank)
                self._arrived[place][self._number][begin:end] = arriving
        self._offset = end
        if end == size:
            self._number += 1
            self._offset = 0
        return (end - begin) * len(self._together)

    def finish(self) -> None:
        """Write the weights to their new places, and note the experts of these places."""
        if not self._travels:
            for source, place in self._routes:
                if self._is_here(place):
                    here = self._here(source)
                    # Copies, because two experts on one rank write over each other.
                    copies = [_bytes_at(weight, here).clone() for weight in self._weights]
                    self._arrived[place] = copies
        for place, tensors in self._arrived.items():
            for weight, arrived in zip(self._weights, tensors, strict=True):
                at = _at(weight, self._here(place))
                at.copy_(arrived.view(weight.dtype).view(at.shape))
        experts = list(self._placement.experts)
        for place, expert in self._together:
            experts[place] = expert
        self._layer.place_experts(experts)

    def _rank_of(self, place: int) -> int:
        return place // self._placement.per_rank

    def _here(self, place: int) -> int:
        """Return the number of a place among the places of this rank."""
        return place - self._placement.rank * self._placement.per_rank

    def _is_here(self, place: int) -> bool:
        return 0 <= self._here(place) < self._placement.per_rank


def _at(weight: Tensor, place: int) -> Tensor:
    """Return the part of one place, with the first dimension kept."""
    # An expert may have a single number, and a view as bytes needs a dimension.
    return weight[place : place + 1]


def _bytes_at(weight: Tensor, place: int) -> Tensor:
    """Return the part of one place as bytes. Every backend can send bytes."""
    return _at(weight, place).contiguous().view(torch.uint8).flatten()
