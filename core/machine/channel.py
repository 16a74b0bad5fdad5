"""``Channel``: Python objects from process to process over a socket."""

from __future__ import annotations

import errno
import io
import marshal
import pickle
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

LENGTH_BYTES = 8
"""Bytes before a message, which say how long it is."""

_PIECE = 1 << 16
_CLOSED = "the other end of the channel is closed"
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors by which the system tells that a host does not answer."""


class Channel:
    """One end of a connection to a process that is trusted as this one is, as what comes is unpickled.

    A message is one write, and mostly one read: with each, a thread gives its interpreter to others for a while.
    Any thread may close it. Sends and receives then fail, and its file is given back once nobody is in one: the
    number may be another file's at once. One thread may send while another receives.

    Args:
        connection: which the channel closes.
        named: the object of a name that ``send`` at the other end gave.
    """

    def __init__(
        self, connection: socket.socket, named: Callable[[Any], Any] = lambda name: name
    ) -> None:
        self._connection = connection
        self._named = named
        self._came = bytearray()
        self._sending, self._receiving, self._hanging_up = (
            threading.Lock(),
            threading.Lock(),
            threading.Lock(),
        )

    def limit(self, seconds: float) -> None:
        """Have a send, and each read of a receive, fail with ``TimeoutError`` after so many seconds."""
        self._connection.settimeout(seconds)

    def send(self, message: Any, name_of: Callable[[Any], Any] | None = None) -> None:
        """Send an object.

        Args:
            message: the object.
            name_of: the name by which the other end knows a part of it, ``None`` for one that is sent as it is.

        Raises:
            OSError: the other end is closed.
            Exception: what pickling it raises, before anything is sent.
        """
        self.send_encoded(encoded(message, name_of))

    def send_encoded(self, data: memoryview) -> None:
        """Send an object that ``encoded`` has made ready, as to several processes, or bytes that ``framed`` has.

        Raises:
            OSError: the other end is closed, or its host is silent.
        """
        with self._sending, _silence_told():
            self._connection.sendall(data)

    def receive(self) -> Any:
        """Wait for an object.

        Raises:
            EOFError: the other end is closed.
            Exception: what unpickling it raises.
        """
        return self.unpickled(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Wait for a message, and return it as it came: an object that is pickled, or plain bytes.

        Raises:
            EOFError: the other end is closed.
            OSError: its host is silent.
        """
        with self._receiving, _silence_told():
            self._expect(LENGTH_BYTES)
            end = self._end()
            self._expect(end)
            message = bytes(self._came[LENGTH_BYTES:end])
            del self._came[:end]
        return message

    def unpickled(self, pickled: bytes) -> Any:
        """Return the object that came, which is pickled, or plain as of ``encoded_plain``.

        Raises:
            Exception: what unpickling it raises.
        """
        if pickled[:1] != pickle.PROTO:
            return marshal.loads(pickled)  # noqa: S302 - see the class
        unpickler = pickle.Unpickler(io.BytesIO(pickled))  # noqa: S301 - see the class
        unpickler.persistent_load = self._named  # type: ignore[method-assign]
        return unpickler.load()

    def fileno(self) -> int:
        """Return the number of the file to wait at, where ``holds_message`` is false."""
        return self._connection.fileno()

    @property
    def holds_message(self) -> bool:
        """Tell whether a whole object has come already, behind the last one."""
        return len(self._came) >= LENGTH_BYTES and len(self._came) >= self._end()

    @property
    def has_news(self) -> bool:
        """Tell whether something has come, or the other end is closed, so that to receive is not to wait for long."""
        if self.holds_message:
            return True
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _end(self) -> int:
        return LENGTH_BYTES + int.from_bytes(self._came[:LENGTH_BYTES], "little")

    def _expect(self, size: int) -> None:
        while len(self._came) < size:
            piece = self._connection.recv(max(_PIECE, size - len(self._came)))
            if not piece:
                raise EOFError(_CLOSED)
            self._came += piece

    def hang_up(self) -> None:
        """Have both ends come to their end, also for threads that wait at them; the file stays."""
        with self._hanging_up, suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give the file back once no thread uses it any more. Further calls do nothing."""
        self.hang_up()
        with self._sending, self._receiving, self._hanging_up:
            self._connection.close()


class ReadAhead(Channel):
    """A channel of which a thread reads each message as soon as it comes, whatever else this process does.

    So nobody who sends a long one waits until this process has come to the end of a step, or has got rid of a long
    answer that he does not read meanwhile. A limit is for what this process sends: for what comes it waits as long as
    there is another end.

    Args:
        connection: see ``Channel``.
        named: see ``Channel``.
    """

    def __init__(
        self, connection: socket.socket, named: Callable[[Any], Any] = lambda name: name
    ) -> None:
        super().__init__(connection, named)
        self._read: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._read_on, name="opgraft-reading", daemon=True).start()

    def receive_bytes(self) -> bytes:
        """Wait for a message, and return it as it came.

        Raises:
            EOFError: the other end is closed.
        """
        found = self._read.get()
        if found is None:
            self._read.put(None)  # it stays closed
            raise EOFError(_CLOSED)
        return found

    def _read_on(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    with suppress(TimeoutError):  # what has come of a message stays
                        self._read.put(super().receive_bytes())
        finally:
            self._read.put(None)


@contextmanager
def _silence_told() -> Iterator[None]:
    """Raise one error where the system finds a host silent, which is no ``TimeoutError`` as of a channel's limit is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _SILENCE:
            raise
        raise ConnectionAbortedError(errno.ETIMEDOUT, "the other host is silent") from error


def framed(data: bytes) -> memoryview:
    """Return bytes as channels send them, for ``receive_bytes``."""
    return memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def encoded(message: Any, name_of: Callable[[Any], Any] | None = None) -> memoryview:
    """Return an object as channels send it.

    Args:
        message: the object.
        name_of: see ``Channel.send``; it is asked about every part of the object, which takes time.

    Raises:
        Exception: what pickling it raises.
    """
    written = io.BytesIO()
    written.write(bytes(LENGTH_BYTES))
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    if name_of is not None:
        pickler.persistent_id = name_of  # type: ignore[method-assign]
    pickler.dump(message)
    data = written.getbuffer()
    data[:LENGTH_BYTES] = (len(data) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return data


def encoded_plain(message: tuple[Any, ...]) -> memoryview:
    """Return a message as channels send it, faster than ``encoded``: a tuple of numbers, texts and tuples of these.

    Raises:
        ValueError: something else is in it. Arrays and their numbers are not told from bytes.
    """
    return framed(marshal.dumps(message))
