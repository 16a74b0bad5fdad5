"""Setting up the groups of a process, and giving them back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from opgraft.distributed.communicator import Communicator
from opgraft.distributed.groups import ALONE, PARALLELISM, ParallelGroup, Parallelism, parallelism
from opgraft.distributed.layout import KINDS, ParallelLayout
from opgraft.errors import DistributedError
from opgraft.plugins.selection import current_platform
from torch import distributed as dist


def init_distributed(
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    *,
    rank: int | None = None,
    init_method: str | None = None,
    store: Any = None,
    backend: str | None = None,
    timeout: float = 1800.0,
) -> Parallelism:
    """Join the ranks of a job and set up the groups that this one belongs to.

    A job of one rank needs no ``torch.distributed``. Where that is initialised already, its default group is used.

    Args:
        tensor: ranks that share each layer; for this and the next two see ``ParallelLayout``.
        pipeline: ranks that have different layers.
        data: ranks that have the same weights.
        rank: of this process; without it, the launcher has put it in the environment, as ``torchrun`` does.
        init_method: where ranks meet, such as ``tcp://host:port``; without it, the environment says that, too.
        store: of ``torch.distributed``, by which ranks meet instead; it takes the rank.
        backend: of ``torch.distributed``; without it, that of the platform.
        timeout: seconds after which a collective that not every rank has joined fails.

    Raises:
        DistributedError: groups are set up already, or the job has another number of ranks.
    """
    layout = ParallelLayout(tensor, pipeline, data)
    if PARALLELISM.get() is not ALONE:
        raise DistributedError(
            f"the groups of this process are set up already, as {parallelism().layout}: call "
            "opgraft.distributed.destroy_distributed() first"
        )
    joins = layout.world > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group(
            backend or current_platform().distributed_backend,
            init_method=init_method,
            store=store,
            rank=-1 if rank is None else rank,
            world_size=-1 if rank is None and init_method is None else layout.world,
            timeout=timedelta(seconds=timeout),
        )
    _expect_ranks(layout)
    groups = _groups(layout, timedelta(seconds=timeout))
    PARALLELISM.set(Parallelism(layout, groups, joins))
    return parallelism()


def _expect_ranks(layout: ParallelLayout) -> None:
    found = dist.get_world_size() if dist.is_initialized() else 1
    if found != layout.world:
        raise DistributedError(
            f"the job has {found} ranks, but tensor {layout.tensor}, pipeline {layout.pipeline} and data {layout.data} "
            f"make {layout.world}: start as many, or change the sizes"
        )


def _groups(layout: ParallelLayout, timeout: timedelta) -> dict[str, ParallelGroup]:
    """Make the process groups of all ranks, in the same order on each; return those that this rank is in."""
    if layout.world == 1:
        return {kind: ParallelGroup(kind) for kind in KINDS}
    own, made, found = dist.get_rank(), {tuple(range(layout.world)): dist.group.WORLD}, {}
    for kind in KINDS:
        for ranks in layout.groups(kind):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=kind)
            if own in ranks:
                process_group, place = made.get(ranks), ranks.index(own)
                communicator = (
                    Communicator(process_group, ranks, place, kind)
                    if process_group is not None
                    else None
                )
                found[kind] = ParallelGroup(kind, ranks, own, communicator)
    return found


def destroy_distributed() -> None:
    """Give back the groups of this process, and leave the job if ``init_distributed`` joined it."""
    known = parallelism()
    for group in known.groups.values():
        if group.communicator is not None:
            group.communicator.destroy()
            # With the last one that has it, others see that this rank has left.
            del group.communicator.process_group
    PARALLELISM.set(ALONE)
    if known.joined and dist.is_initialized():
        dist.destroy_process_group()
