"""An engine in a thread of its own, and the readers of its news.

Only the thread touches the engine. Other threads hand it calls, such as ``EngineThread.open`` for a
new request. The thread makes the calls, computes a step, and gives the news of each request to the
reader of the request: a ``QueuedReader`` for ``LLM``, or an ``AsyncNewsReader`` of an event loop for
``AsyncLLM``.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.engine.workers.executor import HUNG
from opgraft.errors import EngineError
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.request_engine import RequestEngine

_T = TypeVar("_T")
News: TypeAlias = "Callable[[], RequestOutput] | BaseException"


class Mailbox:
    """News for the streams of one event loop. The loop is woken once for the news of all streams.

    Newer news of a stream replace older ones that have not been read. So nothing piles up behind a
    slow loop. The output of replaced news is never put together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._news: dict[AsyncNewsReader, News] = {}

    def put(self, stream: AsyncNewsReader, news: News) -> bool:
        """Leave news for a stream. The engine's thread calls this.

        Returns:
            True if the loop is still open.
        """
        with self._lock:
            if self.loop.is_closed():
                return False
            # With news already there, the loop has been woken.
            if not self._news:
                try:
                    self.loop.call_soon_threadsafe(self._deliver)
                # The loop was closed since the question above.
                except RuntimeError:
                    return False
            self._news[stream] = news
        return True

    def _deliver(self) -> None:
        with self._lock:
            found = self._news
            self._news = {}
        for stream, news in found.items():
            stream.take(news)


class NewsReader(ABC):
    """A reader of the news of one request.

    Attributes:
        request_id: of the request.
        left: True once nobody reads any more.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.left = False

    @abstractmethod
    def put(self, output: RequestOutput) -> bool:
        """Leave news. The engine's thread calls this.

        Args:
            output: of the request; may grow later.

        Returns:
            True if somebody may still read the news.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Leave an error that ends the request. The engine's thread calls this."""


class AsyncNewsReader(NewsReader):
    """The news of one request, in the event loop that reads it."""

    def __init__(self, request_id: str, mailbox: Mailbox) -> None:
        super().__init__(request_id)
        self.mailbox = mailbox
        self._news: News | None = None
        self._arrived = asyncio.Event()

    def take(self, news: News) -> None:
        """Keep news for ``next``, in place of older ones."""
        self._news = news
        self._arrived.set()

    def put(self, output: RequestOutput) -> bool:
        """Leave news in the mailbox of the loop. Return True if the loop is still open."""
        return self.mailbox.put(self, output.deferred_snapshot())

    def fail(self, error: BaseException) -> None:
        self.mailbox.put(self, error)

    async def next(self) -> RequestOutput:
        """Wait for news. Return the newest output, or raise the error of the request."""
        await self._arrived.wait()
        self._arrived.clear()
        news = self._news
        if isinstance(news, BaseException):
            raise news
        if news is None:
            raise EngineError("a stream was woken without news: report this as a bug")
        return news()


class QueuedReader(NewsReader):
    """The news of one request, in a queue for the requests of one call of ``LLM``.

    Args:
        request_id: of the request.
        queue: takes the news.
        grows: put every output into the queue. Otherwise, only the last one.

    Attributes:
        ended: True once the last news came.
    """

    def __init__(self, request_id: str, queue: SimpleQueue[News | None], grows: bool) -> None:
        super().__init__(request_id)
        self.ended = False
        self._queue = queue
        self._grows = grows

    def put(self, output: RequestOutput) -> bool:
        if self.left:
            return False
        self.ended = output.finished
        if self._grows or output.finished:
            self._queue.put(output.deferred_snapshot())
        return True

    def fail(self, error: BaseException) -> None:
        self.ended = True
        self._queue.put(error)


class _Call(Generic[_T]):
    """A function for the engine's thread to call, and the future of its result."""

    def __init__(self, function: Callable[..., _T], *args: object) -> None:
        self.future: Future[_T] = Future()
        self._function: Callable[[], _T] | None = partial(function, *args)

    def make(self) -> None:
        """Call the function for the future, unless the future was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        function = self._function
        # The function may hold objects that hold this call: a circle.
        self._function = None
        try:
            result = function()  # type: ignore[misc]
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: Exception) -> None:
        """Make an error the result of the call."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """A thread that makes an engine, computes steps while there is work, and sleeps otherwise.

    Only this thread touches the engine. Calls of other threads are made between two steps.

    Args:
        make: makes the engine, in the thread and in a copy of the caller's context.

    Attributes:
        engine: set once ``wait`` has returned.
    """

    engine: RequestEngine

    def __init__(self, make: Callable[[], RequestEngine]) -> None:
        self._wake = threading.Condition()
        self._calls: list[_Call[Any]] = []
        self._streams: dict[str, NewsReader] = {}
        self._stopping = False
        self._looks = False
        self._ended: EngineError | None = None
        self._busy_since: float | None = None
        self._making = _Call(self._make, make)
        # Settings of the caller's scope decide about the engine. A new thread has no scope.
        run = partial(contextvars.copy_context().run, self._run)
        self._process = os.getpid()
        self._thread = threading.Thread(target=run, name="opgraft-engine", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the engine is made, or raise the error of its constructor."""
        try:
            self._making.future.result()
        except BaseException:
            # After an interrupt, the thread may still make the engine, which nobody would use.
            self._stopping = True
            raise

    def together(self) -> AbstractContextManager[object]:
        """Return a context for several calls, without a step between them."""
        return self._wake

    @property
    def has_engine(self) -> bool:
        """Return True once the engine is made."""
        return self._making.future.done() and self._making.future.exception() is None

    def call(self, function: Callable[..., _T], *args: object) -> Future[_T]:
        """Call a function in the thread, before the next step.

        The thread itself, as in ``on_step``, must not wait for the result.

        Raises:
            EngineError: the thread has ended, or is in another process.
        """
        # Before the lock: in a forked process, the lock may never be free.
        self.expect_own_process()
        call = _Call(function, *args)
        with self._wake:
            self.check()
            self._calls.append(call)
            self._wake.notify()
        return call.future

    @property
    def busy_seconds(self) -> float:
        """The seconds of the present step or call so far, without a restart. Any thread may ask."""
        since = self._busy_since
        if since is None:
            return 0.0
        # A restart of workers takes minutes, and is no hanging step.
        begin = max(since, self.engine.executor.ready_since)
        return max(0.0, time.monotonic() - begin)

    @property
    def is_current(self) -> bool:
        """True in the thread itself."""
        return threading.current_thread() is self._thread

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked from the one with the thread."""
        return os.getpid() != self._process

    def expect_own_process(self) -> None:
        """Refuse calls of a process without the thread.

        Raises:
            EngineError: the thread is in the process that forked this one.
        """
        if self.is_inherited:
            raise EngineError(
                f"the engine was made in the process that forked this one ({self._process}), and "
                "the engine's thread is not here: make a new one"
            )

    def check(self) -> None:
        """Check that the thread runs, in this process.

        Raises:
            EngineError: the thread has ended, or is in another process.
        """
        self.expect_own_process()
        if self._ended is not None:
            raise _again(self._ended)

    def open(
        self, stream: NewsReader, prepared: OpenRequest, beside: Sequence[NewsReader] = ()
    ) -> bool:
        """Add a request, and send its news to a reader. Only the thread itself calls this.

        If the request is refused, all requests of the same call of the front end are aborted.

        Args:
            stream: reads the news.
            prepared: the request. If nobody reads the stream any more, the request is aborted.
            beside: readers of all requests of the same call.

        Returns:
            True if the request was added.
        """
        if stream.left:
            prepared.abort()
            return False
        try:
            self.engine.submit(prepared)
        # Another engine may take the request, so the others are left alone.
        except EngineError:
            raise
        except BaseException:
            for other in beside:
                other.left = True
                self.close(other)
            raise
        self._streams[stream.request_id] = stream
        return True

    def close(self, stream: NewsReader) -> None:
        """Abort the request of a reader that has left. Only the thread itself calls this."""
        # A later request may have the same id.
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.engine.abort(stream.request_id)

    def abort(self, request_id: str) -> RequestOutput:
        """Abort a request, and return its output so far. Only the thread itself calls this."""
        output = self.engine.abort(request_id)
        self._send([output])
        return output

    def stop(self) -> None:
        """Let the thread end after the current step. All requests are aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def shutdown(self) -> None:
        """Abort all requests, release the engine, and wait for the thread. May be called again."""
        self.stop()
        self.join()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread, for ``seconds`` at most."""
        # The thread may collect the owner of this object as garbage, and cannot wait for itself.
        if not self.is_current:
            self._thread.join(seconds)

    def kill(self, reason: str = HUNG) -> None:
        """End the workers of the engine, if there is one. Messages give the reason."""
        if self.has_engine:
            self.engine.executor.kill(reason)

    def look(self) -> None:
        """Wake the thread, so that it looks for lost workers even without work."""
        with self._wake:
            self._looks = True
            self._wake.notify()

    def _make(self, make: Callable[[], RequestEngine]) -> None:
        self.engine = make()
        self.engine.wake = self.look

    def _run(self) -> None:
        self._making.make()
        if not self.has_engine:
            return
        cause: BaseException | None = None
        why = "the engine was shut down"
        try:
            self._serve()
        # Even an exit of a plugin: readers would wait for ever for a thread that is gone.
        except BaseException as error:
            cause = error
            why = f"the thread of the engine has ended by an error ({described(error)})"
            logger.error("the engine has ended: %s", described(error))
        try:
            self._leave(cause)
        except BaseException as error:
            logger.error(
                "the requests of an engine that ends are lost with it: %s", described(error)
            )
        finally:
            # Before the shutdown, which may wait for workers: readers learn the end at once.
            self._end(f"{why}: make a new one", cause)
            self.engine.shutdown()

    def _serve(self) -> None:
        """Make calls and compute steps, until the thread is to stop."""
        while self._wait():
            if self.engine.is_lost:
                self._surrender(self.engine.executor.loss)
                self._busy_since = None
                self.engine.restart()
            elif self.engine.has_work:
                self._send(self.engine.step())
            elif self._is_behind():
                self._take_part()
            else:
                self.engine.revive()

    def _leave(self, cause: BaseException | None) -> None:
        """Abort the open requests, or surrender them if an error ends the thread."""
        if cause is None:
            self._send([self.engine.abort(request_id) for request_id in list(self._streams)])
        else:
            self._surrender(f"its thread has ended by an error ({described(cause)})")

    def _is_behind(self) -> bool:
        """Return True if other engines wait for a step of this one."""
        return False

    def _take_part(self) -> None:
        """Compute a step without requests, because engines with the same experts compute one."""

    def _surrender(self, reason: str) -> None:
        """Give the open requests to other engines, if there are any."""

    def _has_work(self) -> bool:
        return self.engine.has_work or self._is_behind()

    def _wait(self) -> bool:
        """Sleep until there is something to do, and make the calls. Return True to go on."""
        self._busy_since = None
        with self._wake:
            self._wake.wait_for(
                lambda: self._calls or self._stopping or self._looks or self._has_work(),
                self.engine.waiting_seconds,
            )
            calls = self._calls
            self._calls = []
            self._looks = False
        self._busy_since = time.monotonic()
        # Without the lock, so that other threads can hand over further calls meanwhile.
        for call in calls:
            call.make()
        return not self._stopping

    def _send(self, outputs: Iterable[RequestOutput]) -> None:
        """Give news to their readers, and abort requests of readers that have left."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            is_read = stream.put(output)
            if output.finished:
                del self._streams[output.request_id]
            # The reader has left, or its event loop was closed and tells nobody.
            elif not is_read:
                self.close(stream)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        """Refuse calls from now on, and fail every open stream and call."""
        error = EngineError(reason)
        error.__cause__ = cause
        with self._wake:
            self._ended = error
            calls = self._calls
            self._calls = []
        for stream in self._streams.values():
            stream.fail(_again(error))
        self._streams.clear()
        for call in calls:
            call.refuse(_again(error))


def _again(error: EngineError) -> EngineError:
    """Return the same error with a traceback of its own."""
    # Several threads raise it, and each raise adds to the traceback of one object.
    copy = EngineError(*error.args)
    copy.__cause__ = error.__cause__
    return copy
