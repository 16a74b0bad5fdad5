"""The groups of ranks around this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.distributed.communicator import Communicator
from opgraft.distributed.layout import KINDS, ParallelLayout
from opgraft.errors import DistributedError
from opgraft.registry.state import StateValue
from torch import Tensor


@dataclass(frozen=True)
class ParallelGroup:
    """A group of ranks with this process. Collectives over several ranks refuse gradients.

    Attributes:
        kind: one of ``KINDS``.
        ranks: the global ranks.
        rank: the global rank of this process.
        communicator: ``None`` for a single rank.
    """

    kind: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    communicator: Communicator | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def rank_in_group(self) -> int:
        """The position of this process among the ranks."""
        return self.ranks.index(self.rank)

    @property
    def is_first_rank(self) -> bool:
        """True on the first rank of the group."""
        return self.rank == self.ranks[0]

    @property
    def is_last_rank(self) -> bool:
        """True on the last rank of the group."""
        return self.rank == self.ranks[-1]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks. A single rank returns ``x`` itself."""
        if self.communicator is None:
            return x
        _refuse_gradient("all_reduce", x)
        # An op is one node of a graph. Outside of graphs, its dispatch would only take time.
        if torch.compiler.is_compiling():
            summed: Tensor = torch.ops.opgraft.all_reduce(x, self.kind)
            return summed
        return self.communicator.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Join the ``x`` of all ranks along ``dim``."""
        if self.communicator is None:
            return x
        _refuse_gradient("all_gather", x)
        if torch.compiler.is_compiling():
            gathered: Tensor = torch.ops.opgraft.all_gather(x, dim, self.world_size, self.kind)
            return gathered
        return self.communicator.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        """Sum ``x`` over the ranks and keep this rank's equal part along ``dim``."""
        if self.communicator is None:
            return x
        _refuse_gradient("reduce_scatter", x)
        if torch.compiler.is_compiling():
            part: Tensor = torch.ops.opgraft.reduce_scatter(x, dim, self.world_size, self.kind)
            return part
        return self.communicator.reduce_scatter(x, dim)

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Join the ``x`` of all ranks along ``dim`` on rank ``dst``; else return ``None``."""
        if self.communicator is None:
            return x
        _refuse_gradient("gather", x)
        return self.communicator.gather(x, dst, dim)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``sent[r]`` rows of ``x`` to each rank, and return ``received[r]`` from each."""
        if self.communicator is None:
            return x
        _refuse_gradient("all_to_all", x)
        return self.communicator.all_to_all(x, sent, received)

    def send(self, x: Tensor, dst: int) -> None:
        """Send ``x`` to another rank ``dst`` of the group, for a ``recv`` there.

        Raises:
            DistributedError: this rank is alone.
        """
        self._other().send(x, dst)

    def recv(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device | str, src: int
    ) -> Tensor:
        """Receive a tensor of this size and dtype from rank ``src`` of the group.

        Raises:
            DistributedError: this rank is alone.
        """
        return self._other().recv(size, dtype, device, src)

    def _other(self) -> Communicator:
        if self.communicator is None:
            raise DistributedError(
                f"the {self.kind} group of this process has no other rank to send to or receive "
                "from: call opgraft.distributed.init_distributed with more ranks"
            )
        return self.communicator

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """Return the ``x`` of rank ``src`` of the group."""
        if self.communicator is None:
            return x
        _refuse_gradient("broadcast", x)
        return self.communicator.broadcast(x, src)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the ``value`` of rank ``src`` of the group. It is pickled on the way."""
        if self.communicator is None:
            return value
        return self.communicator.broadcast_object(value, src)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the ``value`` of each rank in rank order. Values are pickled on the way."""
        if self.communicator is None:
            return [value]
        return self.communicator.all_gather_object(value)


def _refuse_gradient(name: str, x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise DistributedError(
            f"{name} was given a tensor that requires a gradient, which would stop at the ranks' "
            "border: layers over several ranks are for inference. Call the model under "
            "torch.inference_mode() or torch.no_grad()"
        )


@dataclass(frozen=True)
class Parallelism:
    """The layout of all ranks, and the group of each kind around this rank.

    Attributes:
        layout: of the job.
        groups: by kind.
        joined: ``init_distributed`` joined the job, and ``destroy_distributed`` leaves the job.
    """

    layout: ParallelLayout
    groups: Mapping[str, ParallelGroup]
    joined: bool = False


# A layer always finds a group, and needs no test for one.
ALONE = Parallelism(ParallelLayout(), {kind: ParallelGroup(kind) for kind in KINDS})

PARALLELISM = StateValue[Parallelism](lambda: ALONE)
"""The layout and groups of this process."""


def parallelism() -> Parallelism:
    """Return the layout and groups of this process. Without a set-up, return a single rank."""
    known = PARALLELISM.peek()
    return ALONE if known is None else known


def get_world_group() -> ParallelGroup:
    """Return the group of all ranks."""
    return parallelism().groups["world"]


def get_tp_group() -> ParallelGroup:
    """Return the ranks that share each layer."""
    return parallelism().groups["tensor"]


def get_pp_group() -> ParallelGroup:
    """Return the ranks with the stages of one pipeline."""
    return parallelism().groups["pipeline"]


def get_dp_group() -> ParallelGroup:
    """Return the ranks with other requests and the same weights. Experts may differ."""
    return parallelism().groups["data"]


def get_ep_group() -> ParallelGroup:
    """Return the ranks that share the experts of a layer: all ranks of one pipeline stage."""
    return parallelism().groups["expert"]


def get_tensor_model_parallel_rank() -> int:
    """Return the position of this process in the tensor group, 0 for a single rank."""
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    """Return the size of the tensor group, 1 for a single rank."""
    return get_tp_group().world_size
