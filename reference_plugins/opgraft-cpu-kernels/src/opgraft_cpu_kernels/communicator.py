"""The communicator of ranks of one host: collectives over memory that all of them have mapped."""

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
SUMMED = frozenset(
    (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    )
)
"""The dtypes of sums; others are left to ``torch.distributed``."""


class _Offer(NamedTuple):
    """The part of a rank in setting up the memory, as it tells the others.

    Attributes:
        host: the same for all processes that can see each other.
        process: its id.
        file: of the memory, a descriptor of the first rank.
        processors: that it may run on.
        obstacle: why it cannot take part; empty where it can.
    """

    host: str = ""
    process: int = 0
    file: int = -1
    processors: frozenset[int] = frozenset()
    obstacle: str = ""


class SharedMemoryCommunicator(Communicator):
    """Collectives in C++ over shared memory; over ``torch.distributed`` where ranks are on several hosts.

    Sums are computed in the order of the ranks, so that all ranks have the same bits; those of half types are rounded
    once. The memory has no name: nothing of it outlasts the processes, however they end.

    A collective fails where a rank has ended or left, and after the time limit of the process group.

    Raises:
        DistBackendError: of torch, by a collective that failed, and by all that follow.
    """

    shared: Any = None
    """The group of the library; ``None`` where ranks have no memory in common."""
    obstacle: str = ""
    """The reason why they have none."""

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        super().__init__(process_group, ranks, rank, name)
        self.shared, self.obstacle = _join(self)

    def remark(self, owner: object) -> str:
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
        gathered: Tensor = self.shared.all_gather(x if x.dim() else x.reshape(1), dim)
        return gathered

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        if self.shared is None or not x.is_cpu:
            return super().gather(x, dst, dim)
        gathered: Tensor | None = self.shared.gather(x if x.dim() else x.reshape(1), dst, dim)
        return gathered

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        if (
            self.shared is None
            or not x.is_cpu
            or x.dtype not in SUMMED
            or x.shape[dim] % self.world_size
        ):
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


def _join(communicator: Communicator) -> tuple[Any, str]:
    """Map memory of the first rank on all ranks, or return why not: the same on each."""
    file = -1
    try:
        obstacle = _obstacle(communicator)
        if not obstacle and communicator.rank == 0:
            try:
                file = os.memfd_create("opgraft", os.MFD_CLOEXEC)
                os.ftruncate(
                    file, torch.ops.opgraft_cpu_kernels.shared_group_bytes(communicator.world_size)
                )
            except OSError as error:  # told to all, who would wait for it else
                obstacle = f"this system gives no memory to share ({error})"
        offers = _told(communicator, _Offer(obstacle=obstacle) if obstacle else _offer(file))
        obstacle = _common_obstacle(offers)
        if obstacle:
            return None, obstacle
        group, reason = _mapped(communicator, offers)
        reasons = [each for each in _told(communicator, reason) if each]
        return (None, reasons[0]) if reasons else (group, "")
    finally:
        if file >= 0:
            os.close(file)


def _told(communicator: Communicator, own: Any) -> list[Any]:
    told: list[Any] = [None] * communicator.world_size
    dist.all_gather_object(told, own, group=communicator.process_group)
    return told


def _obstacle(communicator: Communicator) -> str:
    """Say what keeps this rank from shared memory, or return ""."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this system lacks memfd_create or pidfd_open"
    if communicator.world_size > MOST_RANKS:
        return f"there are more than {MOST_RANKS} ranks"
    return missing() or ""


def _offer(file: int) -> _Offer:
    return _Offer(_host(), os.getpid(), file, frozenset(os.sched_getaffinity(0)))


def _host() -> str:
    """Name what processes have in common that can open each other's files: a running system and its numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _common_obstacle(offers: Sequence[_Offer]) -> str:
    for number, offer in enumerate(offers):
        if offer.obstacle:
            return f"on rank {number} of the group {offer.obstacle}"
        if not offer.host or offer.host != offers[0].host:
            return f"rank {number} of the group is on another host, or in another container, than the first"
    return ""


def _mapped(communicator: Communicator, offers: Sequence[_Offer]) -> tuple[Any, str]:
    """Return the group of the library, or ``None`` and why there is none."""
    first, seconds = offers[0], communicator.time_limit
    # A rank may be bound to a processor: what counts are those of all ranks together.
    spins = len(frozenset().union(*(offer.processors for offer in offers))) >= len(offers)
    opened: list[int] = []
    try:
        file = os.open(f"/proc/{first.process}/fd/{first.file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            opened += [os.pidfd_open(offer.process) for offer in offers]
            group = torch.classes.opgraft_cpu_kernels.SharedGroup(
                file, communicator.rank, opened, seconds, spins
            )
        finally:
            os.close(file)
    except (OSError, RuntimeError) as error:
        for each in opened:
            os.close(each)
        return (
            None,
            f"rank {communicator.rank} cannot map the memory of the first: {type(error).__name__}: {error}",
        )
    return group, ""
