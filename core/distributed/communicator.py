"""``Communicator``: the collectives of one group, over ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.compat.collectives import all_gather_single, reduce_scatter_single, time_limit
from opgraft.errors import DistributedError
from torch import Tensor
from torch import distributed as dist


@PluggableClass.register("communicator")
class Communicator(PluggableClass):
    """The collectives of one group of at least two ranks. A device replaces this class.

    No method writes to an argument. Every rank of the group makes the same calls in the same order.
    Native code that waits for other ranks without this class names the thread ``opgraft waits``
    meanwhile, so that a hanging rank is not confused with a waiting one.

    Args:
        process_group: of ``torch.distributed``.
        ranks: the global ranks of the group.
        rank: the position of this process in ``ranks``.
        name: the kind of group, such as ``"tensor"``.
    """

    use_all_gather: ClassVar[bool] = True
    """Gather logits on every rank. If False, the first rank alone gets logits."""

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        self.process_group = process_group
        self.ranks = tuple(ranks)
        self.rank = rank
        self.name = name

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return len(self.ranks)

    @property
    def time_limit(self) -> float:
        """Seconds of waiting for ranks in a collective."""
        return time_limit(self.process_group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks. Every rank gets the sum."""
        # torch.distributed writes the sum to the tensor, and takes contiguous tensors only.
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.process_group)
        return out

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Join the ``x`` of all ranks along ``dim``. A number counts as a vector of one element."""
        x = x if x.dim() else x.reshape(1)
        gathered = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        all_gather_single(gathered, x.contiguous(), group=self.process_group)
        # The backend puts parts along the first dimension only.
        if dim in (0, -x.dim()):
            return gathered
        return torch.cat(gathered.chunk(self.world_size), dim)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Join the ``x`` of all ranks along ``dim`` on rank ``dst``; else return ``None``."""
        # A number has no dimension to join along.
        x = x if x.dim() else x.reshape(1)
        parts = [torch.empty_like(x) for _ in self.ranks] if self.rank == dst else None
        dist.gather(x.contiguous(), parts, dst=self.ranks[dst], group=self.process_group)
        return None if parts is None else torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        """Sum ``x`` over the ranks, cut the sum along ``dim``, and return the part of this rank."""
        if x.shape[dim] % self.world_size:
            raise DistributedError(
                f"reduce_scatter: {self.world_size} ranks do not divide dimension {dim} of shape "
                f"{tuple(x.shape)}"
            )
        is_first = dim in (0, -x.dim())
        # The backend cuts along the first dimension only.
        parts = x.contiguous() if is_first else torch.cat(x.chunk(self.world_size, dim))
        rows = parts.shape[0] // self.world_size
        out = parts.new_empty((rows, *parts.shape[1:]))
        reduce_scatter_single(out, parts, group=self.process_group)
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows of ``x`` to each rank, and return the rows from each rank in rank order.

        Args:
            x: rows for the first rank, then rows for the second rank, and so on.
            sent: the number of rows for each rank.
            received: the number of rows from each rank.
        """
        out = x.new_empty((sum(received), *x.shape[1:]))
        rows = x.contiguous()
        dist.all_to_all_single(out, rows, list(received), list(sent), group=self.process_group)
        return out

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Return the ``x`` of rank ``src`` of the group."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(out, src=self.ranks[src], group=self.process_group)
        return out

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst`` of the group, for a ``recv`` there."""
        dist.send(x.contiguous(), self.ranks[dst], group=self.process_group)

    def recv(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device | str, src: int
    ) -> Tensor:
        """Receive a tensor of this size and dtype from rank ``src`` of the group."""
        out = torch.empty(tuple(size), dtype=dtype, device=device)
        dist.recv(out, self.ranks[src], group=self.process_group)
        return out

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the ``value`` of rank ``src`` of the group. It is pickled on the way."""
        values = [value]
        dist.broadcast_object_list(values, src=self.ranks[src], group=self.process_group)
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank in rank order. Values are pickled on the way."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def destroy(self) -> None:
        """Give back everything of the communicator but the process group."""
