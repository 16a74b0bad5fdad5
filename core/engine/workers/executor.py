"""``Executor``: how the engine reaches its workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.engine.step import Step, StepResult
from opgraft.errors import EngineError

HUNG = "the process of the engine has ended the workers, as they hung"


@PluggableClass.register("executor")
class Executor(PluggableClass, ABC):
    """Workers, wherever they are: it starts them, has them make calls, and says when they are lost.

    Settings choose one of opgraft's own. A plugin's stands in the place of all of them.

    Args:
        opgraft_config: resolved.

    Attributes:
        before_submit: called before each step that is submitted.
        ready_since: when workers were last started again, in seconds of ``time.monotonic``;
            infinite meanwhile.
    """

    ready_since = 0.0

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        self.opgraft_config = opgraft_config
        self.before_submit: Callable[[], None] = _nothing

    @abstractmethod
    def start(self) -> None:
        """Start the workers and prepare their devices."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Return what a method of one worker returns, once all have made the call.

        Raises:
            EngineError: there is no worker, before the start, after the shutdown, or as they are
                lost.
        """

    @abstractmethod
    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Return what a method of each worker returns, in the order of their ranks.

        Raises:
            EngineError: there is no worker.
        """

    @property
    def depth(self) -> int:
        """The number of steps that are worth submitting before the result of the first is asked for."""
        return 1

    @abstractmethod
    def submit(self, step: Step) -> None:
        """Have the workers compute a step, behind those that were submitted before; ``before_submit`` is called first.

        Raises:
            EngineError: there is no worker.
        """

    @abstractmethod
    def result(self) -> StepResult:
        """Return the result of the oldest step that was submitted and not asked for yet, or raise what failed in it.

        Raises:
            EngineError: there is no worker.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget the steps whose results were not asked for; where workers compute them already, wait for that."""

    def expect_servable(self, request: Request) -> None:
        """Refuse a request that cannot reach the workers.

        Raises:
            RequestError: it cannot.
        """

    def share(self, grammar: Grammar) -> None:
        """Have the workers know a grammar before a step has it, from any thread.

        Raises:
            InputError: it cannot be compiled there.
        """

    @property
    @abstractmethod
    def loss(self) -> str:
        """The reason why workers are lost: one has ended, or was ended as it hung; empty while they are not."""

    @property
    def is_lost(self) -> bool:
        """Return True if workers are lost."""
        return self.loss != ""

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
        raise EngineError(
            f"the workers of {type(self).__name__} cannot be started again: start the engine anew"
        )

    @property
    def is_restarting(self) -> bool:
        """Return True if workers are being started again."""
        return self.ready_since == math.inf

    def check_health(self) -> None:
        """Raise where workers are lost, and none start in their place.

        Raises:
            EngineError: that is so.
        """
        if self.loss and not self.can_restart:
            raise EngineError(self.loss)

    def kill(self, reason: str = HUNG) -> None:
        """End workers that do not answer, as far as they do not end with this process; from any thread.

        Args:
            reason: for whoever asks them from then on.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the workers. Further calls do nothing."""


def _nothing() -> None:
    """Do nothing."""
