"""Imagined ranks of a job that does not run: construct a shard, and count its collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import comb
from typing import Any, NamedTuple

import torch
from opgraft.distributed.communicator import Communicator
from opgraft.distributed.groups import PARALLELISM, ParallelGroup, Parallelism, get_dp_group
from opgraft.distributed.layout import KINDS, ParallelLayout
from torch import Tensor


class Transfer(NamedTuple):
    """A collective of a rank.

    Attributes:
        kind: the kind of group, one of ``KINDS``.
        operation: the method of ``Communicator``.
        nbytes: the bytes of the rank's input; for ``recv``, of the result.
    """

    kind: str
    operation: str
    nbytes: int


class ImaginedCommunicator(Communicator):
    """Notes collectives, and returns tensors of the right shapes. There are no other ranks.

    Args:
        ranks: the global ranks of the group.
        rank: the position of the imagined process among them.
        name: the kind of group.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.name = name
        self.transfers: list[Transfer] = []

    def _note(self, operation: str, x: Tensor) -> None:
        self.transfers.append(Transfer(self.name, operation, x.nbytes))

    def all_reduce(self, x: Tensor) -> Tensor:
        self._note("all_reduce", x)
        return torch.empty_like(x)

    def _gathered(self, x: Tensor, dim: int) -> Tensor:
        # torch.cat takes no scalars.
        part = x if x.dim() else x.reshape(1)
        return torch.cat([part] * self.world_size, dim)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self._note("all_gather", x)
        return self._gathered(x, dim)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        self._note("gather", x)
        return self._gathered(x, dim) if self.rank == dst else None

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        self._note("reduce_scatter", x)
        return x.chunk(self.world_size, dim)[self.rank]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self._note("all_to_all", x)
        return x.new_empty((sum(received), *x.shape[1:]))

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self._note("broadcast", x)
        return torch.empty_like(x)

    def send(self, x: Tensor, dst: int) -> None:
        self._note("send", x)

    def recv(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device | str, src: int
    ) -> Tensor:
        out = torch.empty(tuple(size), dtype=dtype, device=device)
        self._note("recv", out)
        return out


@contextmanager
def imagined_rank(layout: ParallelLayout, rank: int) -> Iterator[Parallelism]:
    """Give this process the groups of a rank of an imagined job within the block."""
    former = PARALLELISM.get()
    groups = {kind: _group(layout, kind, rank) for kind in KINDS}
    imagined = Parallelism(layout, groups)
    PARALLELISM.set(imagined)
    try:
        yield imagined
    finally:
        PARALLELISM.set(former)


def _group(layout: ParallelLayout, kind: str, rank: int) -> ParallelGroup:
    [ranks] = [each for each in layout.groups(kind) if rank in each]
    communicator = None
    # A rank alone sends nothing.
    if len(ranks) > 1:
        communicator = ImaginedCommunicator(ranks, ranks.index(rank), kind)
    return ParallelGroup(kind, ranks, rank, communicator)


def noted_by(parallelism: Parallelism) -> list[list[Transfer]]:
    """Return the list of transfers of each communicator of an imagined rank. The lists grow."""
    lists = []
    for group in parallelism.groups.values():
        if isinstance(group.communicator, ImaginedCommunicator):
            lists.append(group.communicator.transfers)
    return lists


class ExpectedExchange:
    """Replaces the ``ExpertExchange`` of an imagined rank: all experts are chosen equally often.

    Args:
        experts: the number of experts of the layer.
        local: the number of experts of each rank.
    """

    def __init__(self, experts: int, local: int) -> None:
        self.experts = experts
        self.local = local

    def __call__(
        self, x: Tensor, topk_weights: Tensor, owners: Tensor, ids: Tensor, experts: Any
    ) -> Tensor:
        """Exchange the expected number of rows of ``x`` ``[tokens, hidden_size]``."""
        group = get_dp_group()
        size = group.world_size
        topk = ids.shape[1]
        # The probability that none of a token's experts is on a certain rank.
        choices_elsewhere = comb(self.experts - self.local, topk)
        spared = choices_elsewhere / comb(self.experts, topk)
        visitors = round(len(x) * (1 - spared))
        rows_of_rank = [visitors] * size
        rows = sum(rows_of_rank)
        # The collectives of ExpertExchange: counts, routing, rows, and the way back.
        counts = x.new_empty(size, dtype=torch.int64)
        group.all_to_all(counts, [1] * size, [1] * size)
        routing = x.new_empty(rows, 2 * topk, dtype=torch.float32)
        group.all_to_all(routing, rows_of_rank, rows_of_rank)
        sent = x.new_empty(rows, x.shape[1])
        arrived = group.all_to_all(sent, rows_of_rank, rows_of_rank)
        group.all_to_all(arrived, rows_of_rank, rows_of_rank)
        return torch.empty_like(x)
