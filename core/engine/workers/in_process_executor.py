"""``InProcessExecutor``: one worker in this process, alone or as one of the ranks that a launcher has started."""

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
        """Return what a method of the worker returns.

        Raises:
            EngineError: there is no worker, before the start or after the shutdown.
        """
        if self.worker is None:
            shut_down = (
                "the engine was shut down, or not started, and has no worker: make a new one"
            )
            raise EngineError(self._lost or shut_down)
        with kernels_told_when_late(), exits_as_errors():
            return getattr(self.worker, method)(*args)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Return what a method of each worker returns, in the order of their ranks.

        Raises:
            EngineError: there is no worker.
        """
        with self._or_lost():
            tensors = get_tp_group().all_gather_object(self.call(method, *args))
            return [found for stage in get_pp_group().all_gather_object(tensors) for found in stage]

    def submit(self, step: Step) -> None:
        """Keep a step until its result is asked for."""
        self.before_submit()
        self._submitted.append(step)

    def result(self) -> StepResult:
        """Compute the oldest step that was submitted, and return its result.

        Raises:
            EngineError: there is no worker.
        """
        step = self._submitted.popleft()
        with self._or_lost(get_pp_group().world_size):  # whose ranks tell each other what fails
            result = of_last_stage(lambda: self.call("execute", step))
            group = get_tp_group()
            samples = group.communicator is None or group.communicator.use_all_gather
            return result if samples else cast(StepResult, group.broadcast_object(result))

    @contextmanager
    def _or_lost(self, agreeing: int = 1) -> Iterator[None]:
        """Leave the groups where this rank fails: others would wait for it, or add up what is of different steps.

        Args:
            agreeing: the number of ranks that fail alike.
        """
        try:
            yield
        except Exception as error:
            world = get_world_group()
            if (
                self.worker is not None
                and get_tp_group().world_size * get_pp_group().world_size > agreeing
            ):
                self._lost = (
                    f"rank {world.rank} of {world.world_size} has failed ({described(error)}), and has left "
                    "the others, which would have waited for it: start all processes anew"
                )
                self.worker = None
                destroy_distributed()
            raise

    def drop(self) -> None:
        """Forget the steps that were submitted, none of which is computed before its result is asked for."""
        self._submitted.clear()

    @property
    def loss(self) -> str:
        """The reason why this rank has left the others; empty while it has not."""
        return self._lost

    def shutdown(self) -> None:
        """Let go of the worker, and with it of the model and its cache. Further calls do nothing."""
        self.worker = None
