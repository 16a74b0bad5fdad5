"""``InProcessExecutor``: one worker in this process, alone or as a rank of a launcher's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from opgraft.base.text import described
from opgraft.binding.provenance import exits_as_errors, kernels_told_when_late
from opgraft.config import OpgraftConfig
from opgraft.config.environment import read_launch
from opgraft.distributed import destroy_distributed, get_pp_group, get_tp_group, get_world_group
from opgraft.engine.step import Step, StepResult
from opgraft.engine.workers.executor import Executor
from opgraft.engine.workers.stage_link import of_last_stage
from opgraft.engine.workers.worker import Worker
from opgraft.errors import EngineError


class InProcessExecutor(Executor):
    """One worker in this process.

    Args:
        opgraft_config: resolved.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        self.worker: Worker | None = None
        self._submitted: deque[Step] = deque()
        self._lost = ""

    def start(self) -> None:
        """Start the worker and prepare its device."""
        place = read_launch()
        self.worker = Worker(self.opgraft_config, place.local_rank, place.local_size)
        self.worker.init_device()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, and return the result.

        Raises:
            EngineError: there is no worker, before the start or after the shutdown.
        """
        if self.worker is None:
            no_worker = (
                "the engine was shut down, or not started, and has no worker: make a new one"
            )
            raise EngineError(self._lost or no_worker)
        with kernels_told_when_late(), exits_as_errors():
            return getattr(self.worker, method)(*args)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers, and return the results in the order of ranks.

        Raises:
            EngineError: there is no worker.
        """
        with self._leaving_on_failure():
            results_of_stage = get_tp_group().all_gather_object(self.call(method, *args))
            stages = get_pp_group().all_gather_object(results_of_stage)
        return [result for stage in stages for result in stage]

    def submit(self, step: Step) -> None:
        """Keep a step until its result is asked for."""
        self.before_submit()
        self._submitted.append(step)

    def result(self) -> StepResult:
        """Compute the oldest submitted step, and return the result.

        Raises:
            EngineError: there is no worker.
        """
        step = self._submitted.popleft()
        # The stages of a pipeline tell each other about failures.
        with self._leaving_on_failure(get_pp_group().world_size):
            result = of_last_stage(lambda: self.call("execute", step))
            if self._goes_by_first_rank():
                result = cast(StepResult, get_tp_group().broadcast_object(result))
            return result

    def _goes_by_first_rank(self) -> bool:
        """Return True if the result of a step is that of the first tensor rank."""
        group = get_tp_group()
        # Drafts depend on the times of a step, and all ranks must draft alike.
        if self.opgraft_config.speculation.method is not None:
            return group.world_size > 1
        # Without all_gather, only the first rank has the logits and samples.
        return group.communicator is not None and not group.communicator.use_all_gather

    @contextmanager
    def _leaving_on_failure(self, agreeing: int = 1) -> Iterator[None]:
        """Leave the groups if this rank fails within the block.

        Other ranks would wait for this rank, or reduce tensors of different steps.

        Args:
            agreeing: the number of ranks that fail together.
        """
        try:
            yield
        except Exception as error:
            ranks = get_tp_group().world_size * get_pp_group().world_size
            if self.worker is not None and ranks > agreeing:
                world = get_world_group()
                self._lost = (
                    f"rank {world.rank} of {world.world_size} has failed ({described(error)}), and "
                    "has left the others, which would have waited for it: start all processes anew"
                )
                self.worker = None
                destroy_distributed()
            raise

    def drop(self) -> None:
        """Forget the submitted steps. A step is computed only when its result is asked for."""
        self._submitted.clear()

    @property
    def loss(self) -> str:
        """The reason why this rank has left the other ranks; empty before."""
        return self._lost

    def shutdown(self) -> None:
        """Release the worker with the model and the cache. Further calls do nothing."""
        self.worker = None
