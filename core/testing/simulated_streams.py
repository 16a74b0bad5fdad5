"""Streams of a simulated accelerator, by torch's names: work that is queued on one runs when somebody waits for it.

A real device may run it that late, too, so that a missing wait shows on every machine. The default stream alone runs
everything at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_busy: dict[Stream, None] = {}
"""The streams with work in their queues, which nothing else need hold."""


class Stream:
    """A queue of work.

    Args:
        device: not read; there is one.
    """

    def __init__(self, device: object = None) -> None:
        self._queue: deque[Callable[[], object]] = deque()

    def put(self, work: Callable[[], object]) -> None:
        """Queue work behind what is queued already."""
        with _lock:
            self._queue.append(work)
            _busy[self] = None

    def query(self) -> bool:
        """Tell whether all of its work is done."""
        return not self._queue

    def synchronize(self) -> None:
        """Wait for all of its work; raises what that raises."""
        with _lock:
            while self._queue:
                self._queue.popleft()()
            _busy.pop(self, None)

    def record_event(self, event: Event | None = None) -> Event:
        """Queue an event; without an argument a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Have work that is queued from now on run after an event."""
        self.put(event.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        """Have work that is queued from now on run after what another stream has queued."""
        self.wait_event(stream.record_event())


class _DefaultStream(Stream):
    def put(self, work: Callable[[], object]) -> None:
        work()


class Event:
    """A mark in a queue, which happens when the work before it is done."""

    def __init__(self) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Queue it on a stream, by default the current one."""
        self._stream = current_stream() if stream is None else stream
        self._stream.put(self._happen)

    def _happen(self) -> None:
        self._stream = None

    def query(self) -> bool:
        """Tell whether it has happened, or was never queued."""
        return self._stream is None

    def synchronize(self) -> None:
        """Wait for it."""
        if self._stream is not None:
            self._stream.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream wait for it, by default the current one."""
        (current_stream() if stream is None else stream).wait_event(self)


_DEFAULT = _DefaultStream()


class _Current(threading.local):
    stream: Stream = _DEFAULT


_current = _Current()


def current_stream(device: object = None) -> Stream:
    """Return the stream that work of this thread goes to."""
    return _current.stream


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    """Return a scope in which work of this thread goes to a stream."""
    before, _current.stream = _current.stream, stream
    try:
        yield
    finally:
        _current.stream = before


def synchronize() -> None:
    """Wait for the work of every stream."""
    with _lock:
        while _busy:
            next(iter(_busy)).synchronize()
