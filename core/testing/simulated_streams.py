"""Streams of a simulated accelerator, by torch's names: queued work runs only in a wait.

A real device may run work that late, too. Here a missing wait shows on every machine. The default
stream alone runs everything at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Work in a queue may wait for another stream, within the same thread.
_lock = threading.RLock()
_busy: dict[Stream, None] = {}
"""The streams with queued work. A program may have dropped a stream before the work is done."""


class Stream:
    """A queue of work.

    Args:
        device: ignored, as there is one device.
    """

    def __init__(self, device: object = None) -> None:
        self._queue: deque[Callable[[], object]] = deque()

    def put(self, work: Callable[[], object]) -> None:
        """Queue work behind all earlier work."""
        with _lock:
            self._queue.append(work)
            _busy[self] = None

    def query(self) -> bool:
        """Return True if all work is done."""
        return not self._queue

    def synchronize(self) -> None:
        """Do all queued work; exceptions of the work pass through."""
        with _lock:
            # Work may wait for another stream, and so queue or run more.
            while self._queue:
                self._queue.popleft()()
            _busy.pop(self, None)

    def record_event(self, event: Event | None = None) -> Event:
        """Queue an event, by default a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Have all later work run after an event."""
        self.put(event.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        """Have all later work run after the queued work of another stream."""
        self.wait_event(stream.record_event())


class _DefaultStream(Stream):
    def put(self, work: Callable[[], object]) -> None:
        work()


class Event:
    """A mark in a queue. The event happens when the earlier work is done."""

    def __init__(self) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Queue the event on a stream, by default the current one."""
        self._stream = current_stream() if stream is None else stream
        self._stream.put(self._happen)

    def _happen(self) -> None:
        self._stream = None

    def query(self) -> bool:
        """Return True if the event has happened, or was never queued."""
        return self._stream is None

    def synchronize(self) -> None:
        """Wait for the event."""
        if self._stream is not None:
            self._stream.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream wait for the event, by default the current stream."""
        (current_stream() if stream is None else stream).wait_event(self)


_DEFAULT = _DefaultStream()


class _Current(threading.local):
    stream: Stream = _DEFAULT


_current = _Current()


def current_stream(device: object = None) -> Stream:
    """Return the stream for the work of this thread."""
    return _current.stream


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    """Return a scope that sends the work of this thread to a stream."""
    before = _current.stream
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = before


def synchronize() -> None:
    """Wait for the work of every stream."""
    with _lock:
        # One at a time, as work of one stream may queue work on another one.
        while _busy:
            next(iter(_busy)).synchronize()
