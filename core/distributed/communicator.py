"""``Communicator``, the collectives of one group, over ``torch.distributed``."""

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
    """The collectives of one group of at least two ranks. A device brings faster ones by replacing this class.

    No method writes to a tensor that it is given. Every rank of the group makes the same calls in the same order.
    Native code that waits for other ranks, called without this class, names its thread ``opgraft waits`` meanwhile: a
    rank that hangs is told from those by that.

    Args:
        process_group: of ``torch.distributed``.
        ranks: the global ranks of the group.
        rank: the position of this process among them.
        name: the kind of group, such as ``"tensor"``.
    """

    use_all_gather: ClassVar[bool] = True
    """Gather logits on every rank; where false on the first one only, and the others get none."""

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
        """Sum ``x`` over the ranks; the result is on all of them."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.process_group)
        return out

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Put the ``x`` of all ranks one after another along ``dim``, on all of them; a number is a vector of one."""
        x = x if x.dim() else x.reshape(1)
        gathered = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        all_gather_single(gathered, x.contiguous(), group=self.process_group)
        # The backend puts parts along the first dimension only.
        if dim in (0, -x.dim()):
            return gathered
        return torch.cat(gathered.chunk(self.world_size), dim)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Put the ``x`` of all ranks one after another along ``dim`` on rank ``dst`` of the group; else ``None``."""
        x = x if x.dim() else x.reshape(1)
        parts = [torch.empty_like(x) for _ in self.ranks] if self.rank == dst else None
        dist.gather(x.contiguous(), parts, dst=self.ranks[dst], group=self.process_group)
        return None if parts is None else torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        """Sum ``x`` over the ranks and cut the sum along ``dim``: each rank keeps its part."""
        if x.shape[dim] % self.world_size:
            raise DistributedError(
                f"reduce_scatter: {self.world_size} ranks do not divide dimension {dim} of shape {tuple(x.shape)}"
            )
        # The backend cuts along the first dimension only.
        parts = (
            torch.cat(x.chunk(self.world_size, dim)) if dim not in (0, -x.dim()) else x.contiguous()
        )
        out = parts.new_empty((parts.shape[0] // self.world_size, *parts.shape[1:]))
        reduce_scatter_single(out, parts, group=self.process_group)
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows of ``x`` to each rank, and return those that the ranks sent to this one, in the order of ranks.

        Args:
            x: rows for the first rank, then those for the second, and so on.
            sent: how many are for each rank.
            received: how many come from each rank.
        """
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(
            out, x.contiguous(), list(received), list(sent), group=self.process_group
        )
        return out

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Return the ``x`` of rank ``src`` of the group."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(out, src=self.ranks[src], group=self.process_group)
        return out

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst`` of the group, which receives it."""
        dist.send(x.contiguous(), self.ranks[dst], group=self.process_group)

    def recv(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device | str, src: int
    ) -> Tensor:
        """Receive what rank ``src`` of the group sends, of this size and dtype."""
        out = torch.empty(tuple(size), dtype=dtype, device=device)
        dist.recv(out, self.ranks[src], group=self.process_group)
        return out

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the ``value`` of rank ``src`` of the group, which can be pickled."""
        values = [value]
        dist.broadcast_object_list(values, src=self.ranks[src], group=self.process_group)
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank, which can be pickled, in their order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def destroy(self) -> None:
        """Give back what the communicator holds beside the process group."""
