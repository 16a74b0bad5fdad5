"""Collectives for ranks of one host, over memory that all of them have mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opgraft.distributed import Communicator
from torch import Tensor
from torch import distributed as dist

from opgraft_cpu_kernels.library import missing

MOST_RANKS = 64
"""The most ranks that a group of the library can have."""

SUMMED = frozenset(
    (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    )
)
"""The dtypes that the library sums. Sums of other dtypes go to ``torch.distributed``."""


class _Offer(NamedTuple):
    """Facts about one rank that all ranks need to share memory.

    Attributes:
        host: equal for all processes that can see each other.
        process: the id of the rank's process.
        file: the first rank's descriptor of the memory, -1 for the other ranks.
        processors: the processors that the rank may run on.
        obstacle: the reason why the rank cannot share memory, or "".
    """

    host: str = ""
    process: int = 0
    file: int = -1
    processors: frozenset[int] = frozenset()
    obstacle: str = ""


class SharedMemoryCommunicator(Communicator):
    """Collectives in C++ over shared memory. Ranks of several hosts use ``torch.distributed``.

    Ranks are summed in their order, so that all ranks get the same bits. Sums of half types are
    rounded once. The memory has no name, so that nothing is left when the processes have ended.

    A collective fails if a rank has ended or left the group, and after the time limit of the
    process group. After a failure, all further collectives of the group fail as well.

    Raises:
        DistBackendError: torch's error, raised by a collective that failed.
    """

    shared: Any = None
    """The library's group, or None if the ranks have no memory in common."""

    obstacle: str = ""
    """The reason why the ranks have no memory in common, or ""."""

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        super().__init__(process_group, ranks, rank, name)
        self.shared, self.obstacle = _join(self)

    def remark(self, owner: object) -> str:
        """Return the words that ``opgraft.explain`` shows about the group."""
        if self.shared is None:
            return f"by torch.distributed, as {self.obstacle}"
        few = "" if self.shared.spins() else ", with fewer processors than ranks"
        return f"{self.world_size} ranks of this host, over shared memory{few}"

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.shared is None or not x.is_cpu or x.dtype not in SUMMED:
            return super().all_reduce(x)
        summed: Tensor = self.shared.all_reduce(x)
        return summed

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        if self.shared is None or not x.is_cpu:
            return super().all_gather(x, dim)
        gathered: Tensor = self.shared.all_gather(_with_dimension(x), dim)
        return gathered

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        if self.shared is None or not x.is_cpu:
            return super().gather(x, dst, dim)
        gathered: Tensor | None = self.shared.gather(_with_dimension(x), dst, dim)
        return gathered

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        if self.shared is None or not x.is_cpu or x.dtype not in SUMMED:
            return super().reduce_scatter(x, dim)
        # opgraft's method says what is wrong with a length that ranks cannot share evenly.
        if x.shape[dim] % self.world_size:
            return super().reduce_scatter(x, dim)
        part: Tensor = self.shared.reduce_scatter(x, dim)
        return part

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        if self.shared is None or not x.is_cpu:
            return super().all_to_all(x, sent, received)
        rows: Tensor = self.shared.all_to_all(x, list(sent), list(received))
        return rows

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        if self.shared is None or not x.is_cpu:
            return super().broadcast(x, src)
        sent: Tensor = self.shared.broadcast(x, src)
        return sent

    def destroy(self) -> None:
        if self.shared is not None:
            self.shared.leave()
        super().destroy()


def _with_dimension(x: Tensor) -> Tensor:
    """Return a scalar as a tensor of one element, other tensors as they are."""
    return x if x.dim() else x.reshape(1)


def _join(communicator: Communicator) -> tuple[Any, str]:
    """Map memory of the first rank on all ranks.

    Returns:
        The library's group and "", or None and the reason. All ranks return the same reason.
    """
    file = -1
    try:
        obstacle = _obstacle(communicator)
        if not obstacle and communicator.rank == 0:
            try:
                file = os.memfd_create("opgraft", os.MFD_CLOEXEC)
                size = torch.ops.opgraft_cpu_kernels.shared_group_bytes(communicator.world_size)
                os.ftruncate(file, size)
            except OSError as error:
                # Without this rank's answer below, all other ranks would wait.
                obstacle = f"this system gives no memory to share ({error})"
        offer = _Offer(obstacle=obstacle) if obstacle else _offer(file)
        offers = _exchanged(communicator, offer)
        obstacle = _common_obstacle(offers)
        if obstacle:
            return None, obstacle
        group, failure = _mapped(communicator, offers)
        for reason in _exchanged(communicator, failure):
            if reason:
                return None, reason
        return group, ""
    finally:
        if file >= 0:
            os.close(file)


def _exchanged(communicator: Communicator, own: Any) -> list[Any]:
    """Return one object of each rank, in the order of ranks."""
    objects: list[Any] = [None] * communicator.world_size
    dist.all_gather_object(objects, own, group=communicator.process_group)
    return objects


def _obstacle(communicator: Communicator) -> str:
    """Return the reason why this rank cannot share memory, or ""."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this system lacks memfd_create or pidfd_open"
    if communicator.world_size > MOST_RANKS:
        return f"there are more than {MOST_RANKS} ranks"
    return missing() or ""


def _offer(file: int) -> _Offer:
    return _Offer(_host(), os.getpid(), file, frozenset(os.sched_getaffinity(0)))


def _host() -> str:
    """Return a name that is equal for processes that can open each other's files.

    Such processes run on the same system, and in the same namespace of process ids.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _common_obstacle(offers: Sequence[_Offer]) -> str:
    """Return the first reason why these ranks cannot share memory, or ""."""
    for number, offer in enumerate(offers):
        if offer.obstacle:
            return f"on rank {number} of the group {offer.obstacle}"
        if not offer.host or offer.host != offers[0].host:
            place = "on another host, or in another container, than the first"
            return f"rank {number} of the group is {place}"
    return ""


def _mapped(communicator: Communicator, offers: Sequence[_Offer]) -> tuple[Any, str]:
    """Map the first rank's memory: return the library's group and "", or None and the reason."""
    first = offers[0]
    # Ranks spin while they wait if each can have a processor. A rank may be bound to one
    # processor, so the processors of all ranks together count.
    processors = frozenset().union(*(offer.processors for offer in offers))
    spins = len(processors) >= len(offers)
    # A descriptor of a process tells the library when that rank has ended.
    opened: list[int] = []
    try:
        file = os.open(f"/proc/{first.process}/fd/{first.file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            opened += [os.pidfd_open(offer.process) for offer in offers]
            group = torch.classes.opgraft_cpu_kernels.SharedGroup(
                file, communicator.rank, opened, communicator.time_limit, spins
            )
        finally:
            os.close(file)
    except (OSError, RuntimeError) as error:
        for each in opened:
            os.close(each)
        fault = f"{type(error).__name__}: {error}"
        return None, f"rank {communicator.rank} cannot map the memory of the first: {fault}"
    return group, ""
