"""Choose the executor by the settings."""

from __future__ import annotations

from opgraft.binding.pluggable_class import choose_class
from opgraft.config import OpgraftConfig, ParallelConfig, set_config
from opgraft.config.environment import read_launch
from opgraft.distributed import destroy_distributed, get_world_group, init_distributed
from opgraft.distributed.groups import parallelism
from opgraft.engine.runner.model_runner import gather_on_first_rank
from opgraft.engine.workers.engine_digest import engine_digest, expect_same_digest
from opgraft.engine.workers.executor import Executor
from opgraft.engine.workers.in_process_executor import InProcessExecutor
from opgraft.engine.workers.process_executor import ProcessExecutor
from opgraft.engine.workers.rank_places import THIS_HOST, RankPlaces
from opgraft.engine.workers.ray_executor import RayExecutor
from opgraft.engine.workers.remote_executor import RemoteExecutor
from opgraft.engine.workers.worker import Worker
from opgraft.errors import DistributedError
from opgraft.plugins.host import load_plugins

_REMOTE: dict[str, type[RemoteExecutor]] = {"processes": ProcessExecutor, "ray": RayExecutor}


def executor_of(opgraft_config: OpgraftConfig) -> Executor:
    """Return the executor for ``parallel.executor``. The executor of a plugin replaces all.

    Args:
        opgraft_config: resolved.

    Raises:
        DistributedError: the setting asks for new processes, which cannot join the groups of this
            process. It asks for processes of a launcher, and there are none, or another number. Or
            it asks for this process alone, and other settings ask for more ranks.
    """
    parallel = opgraft_config.parallel
    name = parallel.executor or _default_executor(parallel)
    if name == "external" and parallelism().layout.world == 1:
        _join_launcher(opgraft_config)
    chosen: type[Executor] = choose_class(Executor).cls
    if chosen is not Executor:
        return chosen(opgraft_config)
    ranks = parallelism().layout.world
    if name == "in_process" and ranks == 1:
        _expect_one_rank(parallel)
    if name not in _REMOTE:
        return InProcessExecutor(opgraft_config)
    if ranks > 1:
        raise DistributedError(
            f"parallel.executor is {name}, and this process is one of {ranks} ranks, to whose "
            "groups the processes of the workers would not belong: set it to external"
        )
    return _REMOTE[name](opgraft_config)


def _expect_one_rank(parallel: ParallelConfig) -> None:
    names = ["tensor", "pipeline"]
    # A replica has a number, and the replicas of a front end may all be in one process.
    if parallel.data_rank is None:
        names.append("data")
    sizes = {name: getattr(parallel, name) for name in names}
    larger = [f"parallel.{name} is {size}" for name, size in sizes.items() if size > 1]
    if larger:
        raise DistributedError(
            f"{' and '.join(larger)}, and parallel.executor is in_process, which has one worker: "
            "leave parallel.executor out, or set it to processes"
        )


def _default_executor(parallel: ParallelConfig) -> str:
    """Return the executor for settings without ``parallel.executor``."""
    ranks = parallel.tensor * parallel.pipeline * parallel.data
    if parallelism().layout.world > 1 or (ranks > 1 and read_launch().size > 1):
        return "external"
    return "processes" if ranks > 1 else "in_process"


def _places_of_launch() -> RankPlaces:
    """Return the places of the launcher's processes, of which each host has as many."""
    launch = read_launch()
    host = THIS_HOST if launch.is_on_one_host else ""
    local_ranks = tuple(rank % launch.local_size for rank in range(launch.size))
    return RankPlaces(launch.rank, (host,) * launch.size, local_ranks)


def _join_launcher(opgraft_config: OpgraftConfig) -> None:
    """Join the other processes of a launcher.

    Raises:
        DistributedError: there is no launcher, or it has started another number of processes.
        EngineError: a process would compute otherwise than the first process.
    """
    parallel = opgraft_config.parallel
    if read_launch().size == 1:
        raise DistributedError(
            "parallel.executor is external, and no launcher has started this process beside "
            "others: start it by torchrun --nproc-per-node N, or leave the setting out"
        )
    load_plugins()
    worker: type[Worker] = choose_class(Worker).cls
    worker.enter_job(_places_of_launch())
    init_distributed(
        parallel.tensor, parallel.pipeline, parallel.data, timeout=parallel.step_seconds
    )
    try:
        with set_config(opgraft_config, origin="the engine"):
            digests = get_world_group().all_gather_object(engine_digest())
        # Every rank compares all digests, so that no rank goes on alone.
        for rank, digest in enumerate(digests):
            expect_same_digest(digests[0], digest, rank, "rank 0")
    except BaseException:
        destroy_distributed()
        raise
    gather_on_first_rank()
