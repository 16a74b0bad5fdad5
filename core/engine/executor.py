"""``Executor``: how the engine reaches its workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.distributed import get_pp_group, get_tp_group
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.engine.stage_link import of_last_stage
from opgraft.engine.step import Step, StepResult
from opgraft.engine.worker import Worker
from opgraft.environment import read_launch
from opgraft.errors import EngineError


@PluggableClass.register("executor")
class Executor(PluggableClass):
    """One worker in this process.

    Args:
        opgraft_config: resolved.

    Attributes:
        before_submit: called before each step that is submitted.
        ready_since: when workers were last started again, in seconds of ``time.monotonic``; infinite meanwhile.
    """

    ready_since = 0.0

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        self.opgraft_config = opgraft_config
        self.worker: Worker | None = None
        self.before_submit: Callable[[], None] = _nothing
        self._submitted: deque[Step] = deque()

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
            raise EngineError("the engine was shut down, or not started, and has no worker: make a new one")
        return getattr(self.worker, method)(*args)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Return what a method of each worker returns, in the order of their ranks.

        Raises:
            EngineError: there is no worker.
        """
        tensors = get_tp_group().all_gather_object(self.call(method, *args))
        return [found for stage in get_pp_group().all_gather_object(tensors) for found in stage]

    @property
    def depth(self) -> int:
        """The number of steps that are worth submitting before the result of the first is asked for.

        It is 1 here: a rank that computes in this process waits for its result before it has the next step.
        """
        return 1

    def submit(self, step: Step) -> None:
        """Have the workers compute a step, behind those that were submitted before.

        Raises:
            EngineError: there is no worker.
        """
        self.before_submit()
        self._submitted.append(step)

    def result(self) -> StepResult:
        """Return the result of the oldest step that was submitted and not asked for yet, or raise what failed in it.

        Raises:
            EngineError: there is no worker.
        """
        step = self._submitted.popleft()
        return of_last_stage(lambda: self.call("execute", step))

    def drop(self) -> None:
        """Forget the steps whose results were not asked for; where workers compute them already, wait for that."""
        self._submitted.clear()

    def expect_servable(self, request: Request) -> None:
        """Refuse a request that cannot reach the workers; one in this process takes all.

        Raises:
            RequestError: it cannot.
        """

    def share(self, grammar: Grammar) -> None:
        """Have the workers know a grammar before a step has it, from any thread; one in this process does.

        Raises:
            InputError: it cannot be compiled there.
        """

    @property
    def is_lost(self) -> bool:
        """Tell whether a worker has ended, or was ended because it hung; one in this process does not."""
        return False

    @property
    def can_restart(self) -> bool:
        """Tell whether a worker is lost, and may be started again."""
        return False

    def restart(self, prepare: Callable[[], None]) -> None:
        """Start workers in the place of those that are lost, as often as is allowed until that succeeds.

        Where it does not, the workers stay lost, and ``check_health`` and the next call say why.

        Args:
            prepare: has the new workers load the model.

        Raises:
            EngineError: they can never be started again.
        """
        raise EngineError("the worker of this process cannot be started again: make a new engine")

    @property
    def is_restarting(self) -> bool:
        """Tell whether workers are being started again."""
        return self.ready_since == math.inf

    def check_health(self) -> None:
        """Raise where a worker is lost; one in this process is not."""

    def kill(self) -> None:
        """End workers that do not answer, as far as they do not end with this process."""

    def shutdown(self) -> None:
        """Let go of the worker, and with it of the model and its cache. Further calls do nothing."""
        self.worker = None


def _nothing() -> None:
    """Do nothing."""
