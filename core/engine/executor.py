"""``Executor``: how the engine reaches its workers."""

from __future__ import annotations

from typing import Any

from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.engine.worker import Worker
from opgraft.errors import EngineError


@PluggableClass.register("executor")
class Executor(PluggableClass):
    """One worker in this process.

    Args:
        opgraft_config: resolved.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        self.opgraft_config = opgraft_config
        self.worker: Worker | None = None

    def start(self) -> None:
        """Start the worker and prepare its device."""
        self.worker = Worker(self.opgraft_config)
        self.worker.init_device()

    def call(self, method: str, *args: Any) -> Any:
        """Return what a method of the worker returns.

        Raises:
            EngineError: there is no worker, before the start or after the shutdown.
        """
        if self.worker is None:
            raise EngineError("the engine was shut down, or not started, and has no worker: make a new one")
        return getattr(self.worker, method)(*args)

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

    def check_health(self) -> None:
        """Raise where a worker is lost; one in this process is not."""

    def kill(self) -> None:
        """End workers that do not answer, as far as they do not end with this process."""

    def shutdown(self) -> None:
        """Let go of the worker, and with it of the model and its cache. Further calls do nothing."""
        self.worker = None
