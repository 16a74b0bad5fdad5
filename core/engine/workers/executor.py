"""``Executor``: starts the workers of an engine, and calls them."""

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
    """Starts workers in any place, calls their methods, and tells when workers are lost.

    Settings choose one of opgraft's executors. The executor of a plugin replaces all of them.

    Args:
        opgraft_config: resolved.

    Attributes:
        before_submit: called before each step that is submitted.
        ready_since: the time of the last start of workers, in seconds of ``time.monotonic``;
            infinite during a restart.
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
        """Call a method of all workers, and return the result of one worker.

        Raises:
            EngineError: there is no worker: before the start, after the shutdown, or after a loss.
        """

    @abstractmethod
    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers, and return the results in the order of ranks.

        Raises:
            EngineError: there is no worker.
        """

    @property
    def depth(self) -> int:
        """The number of steps to submit before asking for the result of the first."""
        return 1

    @abstractmethod
    def submit(self, step: Step) -> None:
        """Call ``before_submit``, and let the workers compute a step after all submitted steps.

        Raises:
            EngineError: there is no worker.
        """

    @abstractmethod
    def result(self) -> StepResult:
        """Return the result of the oldest submitted step without a result yet, or raise its error.

        Raises:
            EngineError: there is no worker.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget the submitted steps without a result. Wait for steps that workers compute now."""

    def expect_servable(self, request: Request) -> None:
        """Refuse a request that cannot be sent to the workers.

        Raises:
            RequestError: the request cannot be sent.
        """

    def share(self, grammar: Grammar) -> None:
        """Send a grammar to the workers before a step has it. Any thread may call this.

        Raises:
            InputError: a worker cannot compile the grammar.
        """

    @property
    @abstractmethod
    def loss(self) -> str:
        """The reason for a loss of workers, such as the end of a process; empty without a loss."""

    @property
    def is_lost(self) -> bool:
        """Return True if workers are lost."""
        return self.loss != ""

    @property
    def can_restart(self) -> bool:
        """True if a worker is lost and the executor may start workers again."""
        return False

    def restart(self, prepare: Callable[[], None]) -> None:
        """Start new workers after a loss. A failed start is repeated as often as is allowed.

        If no start succeeds, the workers stay lost. ``check_health`` and the next call raise the
        reason.

        Args:
            prepare: lets the new workers load the model.

        Raises:
            EngineError: the executor can never start workers again.
        """
        raise EngineError(
            f"the workers of {type(self).__name__} cannot be started again: start the engine anew"
        )

    @property
    def is_restarting(self) -> bool:
        """Return True during a restart of workers."""
        return self.ready_since == math.inf

    def check_health(self) -> None:
        """Raise if workers are lost and cannot be started again.

        Raises:
            EngineError: workers are lost.
        """
        if self.loss and not self.can_restart:
            raise EngineError(self.loss)

    def kill(self, reason: str = HUNG) -> None:
        """End workers in other processes at once. Any thread may call this.

        Args:
            reason: the message of errors for later calls.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Release the workers. Further calls do nothing."""


def _nothing() -> None:
    """Do nothing."""
