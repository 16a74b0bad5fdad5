"""Imagined ranks: a model that is constructed as one of them has its shard, and its collectives are counted."""

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
    """A collective that a rank takes part in.

    Attributes:
        kind: of its group, one of ``KINDS``.
        operation: the method of ``Communicator``.
        nbytes: of the tensor that the rank gives; of the one that it receives for ``recv``.
    """

    kind: str
    operation: str
    nbytes: int


class ImaginedCommunicator(Communicator):
    """Notes what is asked of it, and returns tensors of the right shapes. Nobody else takes part.

    Args:
        ranks: the global ranks of the group.
        rank: the position of the imagined process among them.
        name: the kind of group.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks, self.rank, self.name = tuple(ranks), rank, name
        self.transfers: list[Transfer] = []

    def _note(self, operation: str, x: Tensor) -> None:
        self.transfers.append(Transfer(self.name, operation, x.nbytes))

    def all_reduce(self, x: Tensor) -> Tensor:
        self._note("all_reduce", x)
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self._note("all_gather", x)
        return torch.cat([x if x.dim() else x.reshape(1)] * self.world_size, dim)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        self._note("gather", x)
        return (
            torch.cat([x if x.dim() else x.reshape(1)] * self.world_size, dim)
            if self.rank == dst
            else None
        )

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
    """Have the groups of this process be those of a rank of a job that there is not, within the block."""
    former = PARALLELISM.get()
    imagined = Parallelism(layout, {kind: _group(layout, kind, rank) for kind in KINDS})
    PARALLELISM.set(imagined)
    try:
        yield imagined
    finally:
        PARALLELISM.set(former)


def _group(layout: ParallelLayout, kind: str, rank: int) -> ParallelGroup:
    ranks = next(ranks for ranks in layout.groups(kind) if rank in ranks)
    alone = len(ranks) == 1
    return ParallelGroup(
        kind, ranks, rank, None if alone else ImaginedCommunicator(ranks, ranks.index(rank), kind)
    )


def noted_by(parallelism: Parallelism) -> list[list[Transfer]]:
    """Return what each communicator of an imagined rank has noted, in lists that grow."""
    each = (group.communicator for group in parallelism.groups.values())
    return [
        communicator.transfers
        for communicator in each
        if isinstance(communicator, ImaginedCommunicator)
    ]


class ExpectedExchange:
    """Stands for the ``ExpertExchange`` of an imagined rank: each expert is chosen as often as the others.

    Args:
        experts: of the layer.
        local: of each rank.
    """

    def __init__(self, experts: int, local: int) -> None:
        self.experts, self.local = experts, local

    def __call__(
        self, x: Tensor, topk_weights: Tensor, owners: Tensor, ids: Tensor, experts: Any
    ) -> Tensor:
        """Exchange as many rows as are to be expected of ``x`` ``[tokens, hidden_size]``."""
        group = get_dp_group()
        size, topk = group.world_size, ids.shape[1]
        spared = comb(self.experts - self.local, topk) / comb(self.experts, topk)
        each = [round(len(x) * (1 - spared))] * size
        rows = sum(each)
        group.all_to_all(x.new_empty(size, dtype=torch.int64), [1] * size, [1] * size)
        group.all_to_all(x.new_empty(rows, 2 * topk, dtype=torch.float32), each, each)
        arrived = group.all_to_all(x.new_empty(rows, x.shape[1]), each, each)
        group.all_to_all(arrived, each, each)
        return torch.empty_like(x)
