"""An engine in a thread of its own, and the streams by which it reaches event loops."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from opgraft.errors import EngineError
from opgraft.logger import logger
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.text_engine import OpenRequest, TextEngine
from opgraft.text import described

_T = TypeVar("_T")
_News: TypeAlias = "Callable[[], RequestOutput] | BaseException"


class Mailbox:
    """News for the streams of one event loop, which is woken once, however many streams have some.

    A stream whose news has not been fetched yet gets the newer in its place, so nothing piles up behind a slow loop.
    News that come to nobody are never put together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._news: dict[Stream, _News] = {}

    def put(self, stream: Stream, news: _News) -> bool:
        """Leave news, from the engine's thread, and tell whether the loop is still open."""
        with self._lock:
            if self.loop.is_closed():
                return False
            if not self._news:
                try:
                    self.loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:  # it was closed since it was asked
                    return False
            self._news[stream] = news
        return True

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
        if isinstance(news, BaseException):
            raise news
        if news is None:
            raise EngineError("a stream was woken without news: report this as a bug")
        return news()


class _Call(Generic[_T]):
    """A function that the engine's thread is to call."""

    def __init__(self, function: Callable[..., _T], *args: object) -> None:
        self.future: Future[_T] = Future()
        self._function = partial(function, *args)

    def make(self) -> None:
        """Call the function, unless nobody waits for it any more; what it raises goes to who waits."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: Exception) -> None:
        """Raise an error where the result is waited for."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """A thread that makes an engine, runs its steps while there is work, and sleeps while there is none.

    Nothing else touches the engine: what others want of it is a call that the thread makes between two steps.

    Args:
        make: makes the engine, in the thread and in a copy of the caller's context. What it raises, is raised here.
    """

    def __init__(self, make: Callable[[], TextEngine]) -> None:
        self._wake = threading.Condition()
        self._calls: list[_Call[Any]] = []
        self._streams: dict[str, Stream] = {}
        self._stopping = False
        self._ended: EngineError | None = None
        self._busy_since: float | None = None
        making = _Call(make)
        run = partial(contextvars.copy_context().run, self._run, making)
        self._thread = threading.Thread(target=run, name="opgraft-engine", daemon=True)
        self._thread.start()
        try:
            self.engine = making.future.result()
        except BaseException:
            self._stopping = True
            raise

    def call(self, function: Callable[..., _T], *args: object) -> Future[_T]:
        """Call a function in the thread, before the next step.

        Raises:
            EngineError: the thread has ended.
        """
        call = _Call(function, *args)
        with self._wake:
            self.check()
            self._calls.append(call)
            self._wake.notify()
        return call.future

    @property
    def busy_seconds(self) -> float:
        """The seconds that the step, or the call, of this moment has taken; from any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def check(self) -> None:
        """Raise if the thread has ended.

        Raises:
            EngineError: it has.
        """
        if self._ended is not None:
            raise _again(self._ended)

    def open(self, stream: Stream, prepared: OpenRequest) -> None:
        """Add a request, whose news go to a stream from now on; to be called in the thread."""
        self.engine.submit(prepared)
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
        self._thread.join()

    def _run(self, making: _Call[TextEngine]) -> None:
        making.make()
        if making.future.exception() is not None:
            return
        self.engine = making.future.result()
        try:
            while self._wait():
                if self.engine.has_work:
                    self._send(self.engine.step())
        except BaseException as error:
            logger.error("the thread of the engine has ended: %s", described(error))
            self._end(f"the thread of the engine has ended by an error ({described(error)}): make a new one", error)
        else:
            self._send([self.engine.abort(request_id) for request_id in list(self._streams)])
            self._end("the engine was shut down: make a new one", None)
        self.engine.shutdown()

    def _wait(self) -> bool:
        """Sleep until there is something to do, make the calls, and tell whether to go on."""
        self._busy_since = None
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self._stopping or self.engine.has_work)
            calls, self._calls = self._calls, []
        self._busy_since = time.monotonic()
        for call in calls:
            call.make()
        return not self._stopping

    def _send(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            there = stream.mailbox.put(stream, output.deferred_snapshot())
            if output.finished:
                del self._streams[output.request_id]
            elif not there:
                self.close(stream)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        """Refuse calls from now on, and raise in every stream and call that is open."""
        error = EngineError(reason)
        error.__cause__ = cause
        with self._wake:
            self._ended = error
            calls, self._calls = self._calls, []
        for stream in self._streams.values():
            stream.mailbox.put(stream, _again(error))
        self._streams.clear()
        for call in calls:
            call.refuse(_again(error))


def _again(error: EngineError) -> EngineError:
    """Return the same error with a traceback of its own."""
    copy = EngineError(*error.args)
    copy.__cause__ = error.__cause__
    return copy
