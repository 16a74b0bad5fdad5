"""Set up the groups of a process, and give them back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from opgraft.distributed.communicator import Communicator
from opgraft.distributed.groups import ALONE, PARALLELISM, ParallelGroup, Parallelism, parallelism
from opgraft.distributed.layout import KINDS, ParallelLayout
from opgraft.errors import DistributedError
from opgraft.plugins.selection import current_platform
from torch import distributed as dist

_ProcessGroups = dict[tuple[int, ...], Any]
"""By their ranks. For a group of other ranks, torch returns a number."""


def init_distributed(
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    *,
    rank: int | None = None,
    init_method: str | None = None,
    store: Any = None,
    backend: str | None = None,
    timeout: float = 1800.0,  # torch's own default for most backends
) -> Parallelism:
    """Join the ranks of a job, and set up the groups of this rank.

    A job of one rank needs no ``torch.distributed``. If ``torch.distributed`` is initialised
    already, its default group is used.

    Args:
        tensor: ranks that share each layer. See ``ParallelLayout`` for this and the next two.
        pipeline: ranks with different layers.
        data: ranks with the same weights.
        rank: of this process. The default comes from the environment, as ``torchrun`` sets it.
        init_method: the meeting place, such as ``tcp://host:port``. The default is the same.
        store: a meeting place of ``torch.distributed`` instead. It needs ``rank``.
        backend: of ``torch.distributed``. The default is the backend of the platform.
        timeout: seconds until a collective fails because a rank is missing.

    Raises:
        DistributedError: groups are set up already, or the job has another number of ranks.
    """
    layout = ParallelLayout(tensor, pipeline, data)
    if PARALLELISM.get() is not ALONE:
        raise DistributedError(
            f"the groups of this process are set up already, as {parallelism().layout}: call "
            "opgraft.distributed.destroy_distributed() first"
        )
    limit = timedelta(seconds=timeout)
    joins = layout.world > 1 and not dist.is_initialized()
    if joins:
        # torch.distributed reads -1 as "look in the environment".
        in_environment = rank is None and init_method is None
        dist.init_process_group(
            backend or current_platform().distributed_backend,
            init_method=init_method,
            store=store,
            rank=-1 if rank is None else rank,
            world_size=-1 if in_environment else layout.world,
            timeout=limit,
        )
    _expect_ranks(layout)
    groups = _make_groups(layout, limit)
    PARALLELISM.set(Parallelism(layout, groups, joins))
    return parallelism()


def _expect_ranks(layout: ParallelLayout) -> None:
    found = dist.get_world_size() if dist.is_initialized() else 1
    if found != layout.world:
        raise DistributedError(
            f"the job has {found} ranks, but tensor {layout.tensor}, pipeline {layout.pipeline} "
            f"and data {layout.data} make {layout.world}: start as many, or change the sizes"
        )


def _make_groups(layout: ParallelLayout, timeout: timedelta) -> dict[str, ParallelGroup]:
    """Make the process groups of all ranks, and return the groups of this rank."""
    if layout.world == 1:
        return {kind: ParallelGroup(kind) for kind in KINDS}
    own = dist.get_rank()
    everyone = tuple(range(layout.world))
    made: _ProcessGroups = {}
    # A second group of all ranks would take connections for nothing.
    made[everyone] = dist.group.WORLD
    found = {}
    # Each rank makes all groups, in one order: torch.distributed asks for that.
    for kind in KINDS:
        for ranks in layout.groups(kind):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=kind)
            if own in ranks:
                communicator = _communicator(made.get(ranks), ranks, own, kind)
                found[kind] = ParallelGroup(kind, ranks, own, communicator)
    return found


def _communicator(
    process_group: dist.ProcessGroup | None, ranks: tuple[int, ...], own: int, kind: str
) -> Communicator | None:
    """Return the communicator of a group, or ``None`` for a single rank."""
    if process_group is None:
        return None
    return Communicator(process_group, ranks, ranks.index(own), kind)


def destroy_distributed() -> None:
    """Give back the groups. Leave the job if ``init_distributed`` joined the job."""
    known = parallelism()
    for group in known.groups.values():
        if group.communicator is not None:
            group.communicator.destroy()
            # Other ranks see that this rank has left when the last reference is gone.
            del group.communicator.process_group
    PARALLELISM.set(ALONE)
    if known.joined and dist.is_initialized():
        dist.destroy_process_group()
