"""``ReplicatedEngine``: several engines for one caller, who takes their news."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.stats import EngineStats
from opgraft.errors import EngineError, RequestError
from opgraft.serving.engine_thread import News, Reader
from opgraft.serving.front_end import FrontEnd
from opgraft.serving.open_request import OpenRequest, none_open
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.replica import Replica
from opgraft.serving.replicas import Replicas
from opgraft.serving.step_reports import OnStep

_PATIENCE = 0.1
"""Seconds after which a step without news returns, so that its caller sees an interrupt."""


class _Noting(Reader):
    """Notes the news of a request, or what is raised instead.

    Attributes:
        output: of the request; it grows in the thread of an engine.
    """

    def __init__(self, output: RequestOutput, noted: SimpleQueue[tuple[_Noting, News]]) -> None:
        super().__init__(output.request_id)
        self.output = output
        self._noted = noted

    def put(self, news: News) -> bool:
        self._noted.put((self, news))
        return True


class _Opening(NamedTuple):
    """A request that a replica is to open.

    Attributes:
        choices: of replicas that may take it after that one.
        begun: whether it is opened.
    """

    prepared: OpenRequest
    choices: Iterator[Replica]
    begun: Future[bool]


class ReplicatedEngine(FrontEnd):
    """The engines of ``parallel.data``, which compute in threads of their own.

    Args:
        opgraft_config, on_step: as for ``Replicas``.
    """

    def __init__(self, opgraft_config: OpgraftConfig, on_step: OnStep | None = None) -> None:
        self.replicas = Replicas(opgraft_config, on_step)
        self.inputs = self.replicas.inputs
        self._noted: SimpleQueue[tuple[_Noting, News]] = SimpleQueue()
        self._open: dict[str, _Noting] = {}
        self._opening: dict[_Noting, _Opening] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def submit(self, prepared: OpenRequest) -> RequestOutput:
        """Have a request wait for its turn, and return its output; where an engine refuses it, ``step`` raises that."""
        reader = _Noting(prepared.output, self._noted)
        self._begin(reader, prepared, self.replicas.choices(prepared))
        self._open[reader.request_id] = reader
        return prepared.output

    def _begin(self, reader: _Noting, prepared: OpenRequest, choices: Iterator[Replica]) -> None:
        """Have the next replica that may take a request open it, which it does between two of its steps."""
        for replica in choices:
            with suppress(EngineError):
                self._opening[reader] = _Opening(prepared, choices, replica.open(reader, prepared))
                return

    def _expect_opened(self) -> None:
        """Wait until all that was submitted is opened, elsewhere where its replica was lost meanwhile.

        Raises:
            RequestError: a request could never be served.
            EngineError: no replica is left that could take it.
        """
        while self._opening:
            reader = next(iter(self._opening))
            prepared, choices, begun = self._opening.pop(reader)
            try:
                with suppress(EngineError):
                    begun.result()
                    continue
                self._begin(reader, prepared, choices)
            except Exception:
                del self._open[reader.request_id]
                raise

    def abort(self, request_id: str) -> RequestOutput:
        reader = self._opened(request_id, "aborted")
        output = reader.output
        del self._open[request_id]
        self._opening.pop(reader, None)
        with suppress(RequestError):  # it has ended, and its last news were not taken
            self.replicas.abort(request_id).result()
        return output

    def step(self) -> list[RequestOutput]:
        """Return the newest state of the requests that have news, in copies that do not grow, once there are some.

        Raises:
            RequestError: one that was submitted could never be served.
            EngineError: the engine of a request has stopped.
        """
        self._expect_opened()
        noted: dict[_Noting, Callable[[], RequestOutput]] = {}
        with suppress(Empty):
            self._note(noted, _PATIENCE)
            while True:
                self._note(noted, 0)
        outputs = [make() for reader, make in noted.items() if self.is_open(reader.output)]
        for output in outputs:
            if output.finished:
                del self._open[output.request_id]
        return outputs

    def _note(self, noted: dict[_Noting, Callable[[], RequestOutput]], seconds: float) -> None:
        reader, news = self._noted.get(timeout=seconds) if seconds else self._noted.get_nowait()
        if isinstance(news, BaseException):
            self._open.clear()
            raise news
        noted[reader] = news

    def is_open(self, output: RequestOutput) -> bool:
        opened = self._open.get(output.request_id)
        return opened is not None and opened.output is output

    def output_of(self, request_id: str) -> RequestOutput:
        return self._opened(request_id, "streamed").output

    def _opened(self, request_id: str, what: str) -> _Noting:
        if request_id not in self._open:
            raise none_open(request_id, what)
        return self._open[request_id]

    def stats(self) -> EngineStats:
        return self.replicas.stats()

    def explain(self) -> Explanation:
        return self.replicas.explain().result()

    def capacity(self) -> str:
        return self.replicas.capacity()

    @property
    def cache_tokens(self) -> int:
        return sum(each.engine.cache_tokens for each in self.replicas.each)

    def shutdown(self) -> None:
        self.replicas.shutdown()
