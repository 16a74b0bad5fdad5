"""``RequestEngine``: the interface of an engine for its thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from opgraft.binding.explaining import Explanation
from opgraft.engine.stats import EngineStats
from opgraft.engine.workers.executor import Executor
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput


class RequestEngine(ABC):
    """Requests in, outputs with news out, a step at a time.

    Attributes:
        executor: of the engine; reaches the workers.
        wake: wakes the thread of the engine. Any thread may call this.
    """

    executor: Executor
    wake: Callable[[], None]

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True while a request has not ended."""

    @abstractmethod
    def submit(self, prepared: OpenRequest) -> RequestOutput:
        """Add a request to the waiting ones, and return its output. The output grows with steps.

        Raises:
            RequestError: a request of the same id runs, or the request could never be served.
            EngineError: the engine has stopped.
        """

    @abstractmethod
    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, and return the output so far.

        Raises:
            RequestError: no request of that id runs or waits.
        """

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """Compute a step, and return the outputs of requests with news.

        Raises:
            EngineError: the engine has stopped.
        """

    @abstractmethod
    def revive(self) -> None:
        """Start lost workers again, as often as the settings allow; not while requests run."""

    @abstractmethod
    def check_health(self) -> None:
        """Check that the engine can go on.

        Raises:
            EngineError: the engine was shut down, has stopped, or has lost its workers.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the state, and totals since the model was loaded. Any thread may call this."""

    @abstractmethod
    def explain(self) -> Explanation:
        """Return the kernel of each op and the class of each part of the engine, with reasons."""

    @abstractmethod
    def capacity(self) -> str:
        """Return the sizes of the cache as a sentence."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release the model, and refuse later requests."""

    @property
    def waiting_seconds(self) -> float | None:
        """The longest sleep without work; ``None`` if only a call brings work."""
        return None

    @property
    def cache_tokens(self) -> int:
        """The number of tokens of long sequences in a full cache."""
        return 0

    @property
    def is_lost(self) -> bool:
        """True if the workers are lost, and another engine is to take the open requests."""
        return False

    def restart(self) -> None:
        """Start lost workers again.

        Raises:
            EngineError: the settings allow no further start, or the workers are lost again.
        """
        self.revive()
        self.check_health()
