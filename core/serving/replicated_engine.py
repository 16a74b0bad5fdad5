"""``ReplicatedEngine``: several engines for one caller, who takes their news."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.stats import EngineStats
from opgraft.errors import EngineError, RequestError
from opgraft.serving.engine_thread import News, Reader
from opgraft.serving.front_end import FrontEnd
from opgraft.serving.open_request import OpenRequest, none_open
from opgraft.serving.outputs import RequestOutput
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

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def submit(self, prepared: OpenRequest) -> RequestOutput:
        reader = _Noting(prepared.output, self._noted)
        for replica in self.replicas.choices(prepared):
            with suppress(EngineError):
                replica.open(reader, prepared).result()
                break
        self._open[reader.request_id] = reader
        return prepared.output

    def abort(self, request_id: str) -> RequestOutput:
        output = self._opened(request_id, "aborted").output
        del self._open[request_id]
        with suppress(RequestError):  # it has ended, and its last news were not taken
            self.replicas.abort(request_id).result()
        return output

    def step(self) -> list[RequestOutput]:
        """Return the newest state of the requests that have news, in copies that do not grow, once there are some.

        Raises:
            EngineError: the engine of a request has stopped.
        """
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
