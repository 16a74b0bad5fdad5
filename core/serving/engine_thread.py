"""An engine in a thread of its own, and the streams by which it reaches event loops."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

from opgraft.errors import EngineError
from opgraft.logger import logger
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.text_engine import PreparedRequest, TextEngine
from opgraft.text import described

_T = TypeVar("_T")
_News: TypeAlias = "RequestOutput | BaseException"


class Mailbox:
    """News for the streams of one event loop, which is woken once, however many streams have some.

    A stream whose news has not been fetched yet gets the newer in its place, so nothing piles up behind a slow loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._news: dict[Stream, _News] = {}

    def put(self, stream: Stream, news: _News) -> None:
        """Leave news, from the engine's thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._lock:
            wake = not self._news
            self._news[stream] = news
        if wake:
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            found, self._news = self._news, {}
        for stream, news in found.items():
            stream.take(news)


class Stream:
    """The news of one request, in the event loop that reads it."""

    def __init__(self, request_id: str, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self._news: _News | None = None
        self._arrived = asyncio.Event()

    def take(self, news: _News) -> None:
        """Put news in the place of what has not been read."""
        self._news = news
        self._arrived.set()

    async def next(self) -> RequestOutput:
        """Wait for news, and return the newest, or raise the error that it is."""
        await self._arrived.wait()
        self._arrived.clear()
        news = self._news
        if not isinstance(news, RequestOutput):
            raise news if news is not None else EngineError("a stream was woken without news: report this as a bug")
        return news


class EngineThread:
    """A thread that makes an engine, runs its steps while there is work, and sleeps while there is none.

    Nothing else touches the engine: what others want of it is a call that the thread makes between two steps.

    Args:
        make: makes the engine, in the thread and in a copy of the caller's context. What it raises, is raised here.
    """

    def __init__(self, make: Callable[[], TextEngine]) -> None:
        self._wake = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._streams: dict[str, Stream] = {}
        self._stopping = False
        self._ended: EngineError | None = None
        made: Future[TextEngine] = Future()
        target = contextvars.copy_context().run
        self._thread = threading.Thread(target=target, args=(self._run, make, made), name="opgraft-engine", daemon=True)
        self._thread.start()
        try:
            self.engine = made.result()
        except BaseException:
            self._stopping = True
            raise

    def call(self, function: Callable[..., _T], *args: object) -> Future[_T]:
        """Call a function in the thread, before the next step.

        Raises:
            EngineError: the thread has ended.
        """
        future: Future[_T] = Future()
        with self._wake:
            self.check()
            self._calls.append(lambda: _resolve(future, function, *args))
            self._wake.notify()
        return future

    def check(self) -> None:
        """Raise if the thread has ended.

        Raises:
            EngineError: it has.
        """
        if self._ended is not None:
            raise EngineError(*self._ended.args) from self._ended.__cause__

    def open(self, stream: Stream, prepared: PreparedRequest) -> None:
        """Add a request, whose news go to a stream from now on; to be called in the thread."""
        self.engine.add(prepared)
        self._streams[stream.request_id] = stream

    def close(self, stream: Stream) -> None:
        """Abort the request of a stream that nobody reads any more, if it still runs; to be called in the thread."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.engine.abort(stream.request_id)

    def abort(self, request_id: str) -> None:
        """Abort a request, whose stream gets what it has so far; to be called in the thread."""
        self._send([self.engine.abort(request_id)])

    def shutdown(self) -> None:
        """Abort what runs, let go of the engine, and wait until the thread has ended. Further calls do nothing."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, make: Callable[[], TextEngine], made: Future[TextEngine]) -> None:
        if not _resolve(made, make):
            return
        engine = made.result()
        try:
            while self._wait(engine):
                if engine.has_work:
                    self._send(engine.step())
        except BaseException as error:
            logger.error("the thread of the engine has ended: %s", described(error))
            self._end(f"the thread of the engine has ended by an error ({described(error)}): make a new one", error)
        else:
            self._send([engine.abort(request_id) for request_id in list(self._streams)])
            self._end("the engine was shut down: make a new one", None)
        engine.shutdown()

    def _wait(self, engine: TextEngine) -> bool:
        """Sleep until there is something to do, make the calls, and tell whether to go on."""
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self._stopping or engine.has_work)
            calls, self._calls = self._calls, []
        for each in calls:
            each()
        return not self._stopping

    def _send(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._put(stream, output.snapshot())
                if output.finished:
                    self._streams.pop(output.request_id, None)

    def _put(self, stream: Stream, news: _News) -> None:
        try:
            stream.mailbox.put(stream, news)
        except RuntimeError:  # its event loop is closed, so nobody reads it
            self.close(stream)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        """Refuse calls from now on, and raise in every stream and call that is open."""
        with self._wake:
            self._ended = EngineError(reason)
            self._ended.__cause__ = cause
            calls, self._calls = self._calls, []
        for stream in list(self._streams.values()):
            del self._streams[stream.request_id]
            self._put(stream, self._error())
        for each in calls:
            each()
