"""``RequestEngine``: what a thread needs of an engine that it steps."""

from __future__ import annotations

from abc import ABC, abstractmethod

from opgraft.binding.explaining import Explanation
from opgraft.engine.stats import EngineStats
from opgraft.engine.workers.executor import Executor
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput


class RequestEngine(ABC):
    """Requests in, outputs with news out, a step at a time.

    Attributes:
        executor: the way to the workers.
    """

    executor: Executor

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True if a request has not ended."""

    @abstractmethod
    def submit(self, prepared: OpenRequest) -> RequestOutput:
        """Have a request wait for its turn, and return the output, which grows with the steps.

        Raises:
            RequestError: one of its id runs, or it could never be served.
            EngineError: the engine has stopped.
        """

    @abstractmethod
    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, and return the output so far.

        Raises:
            RequestError: none of that id runs or waits.
        """

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """Compute a step, and return the requests that have news.

        Raises:
            EngineError: the engine has stopped.
        """

    @abstractmethod
    def revive(self) -> None:
        """Start lost workers again, as often as the settings allow; not while requests run."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise if the engine cannot go on.

        Raises:
            EngineError: the engine was shut down, has stopped, or has lost its workers.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return what runs, and totals since the model was loaded; from any thread."""

    @abstractmethod
    def explain(self) -> Explanation:
        """Return which kernel runs each op of the model, the classes of the engine's parts, and the reasons."""

    @abstractmethod
    def capacity(self) -> str:
        """Return in words how much the cache holds."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the model. Requests that are submitted afterwards are refused."""

    @property
    def cache_tokens(self) -> int:
        """The tokens of long sequences that the cache holds."""
        return 0

    @property
    def is_lost(self) -> bool:
        """True if the workers are lost and the open requests are to be surrendered."""
        return False

    def restart(self) -> None:
        """Start lost workers again.

        Raises:
            EngineError: the settings allow no further start, or the workers are lost again.
        """
        self.revive()
        self.check_health()
