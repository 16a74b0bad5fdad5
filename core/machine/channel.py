"""``Channel``: Python objects from process to process over a socket."""

from __future__ import annotations

import errno
import io
import marshal
import os
import pickle
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

LENGTH_BYTES = 8
"""Bytes of the length before each message."""

_PIECE = 1 << 16
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of the system for a host without an answer."""


class IncomingMessages:
    """Messages out of the bytes of a file.

    One read mostly holds a whole message. Each read gives the interpreter to other threads, so few
    reads are fast.

    Args:
        read: called with a number of bytes, returns at most so many. Empty at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._came = bytearray()

    @property
    def holds_message(self) -> bool:
        """Return True if a whole message is here already."""
        return len(self._came) >= LENGTH_BYTES and len(self._came) >= _end_of_message(self._came)

    def next(self) -> bytes:
        """Wait for the next message. A part of a message stays here if a read fails.

        Raises:
            EOFError: the other end is closed.
            OSError: the read failed.
        """
        if not self._came:
            piece = self._read(_PIECE)
            # The common case, without a copy.
            if _end_of_message(piece) == len(piece):
                return piece[LENGTH_BYTES:]
            self._came += piece
        while not self.holds_message:
            if not self.take():
                raise EOFError("the other end of the channel is closed")
        end = _end_of_message(self._came)
        message = bytes(self._came[LENGTH_BYTES:end])
        del self._came[:end]
        return message

    def take(self) -> bool:
        """Take in bytes that have come. Return False at the end."""
        piece = self._read(_PIECE)
        self._came += piece
        return bool(piece)


def _end_of_message(came: bytes | bytearray) -> int:
    """Return the end of the first message, if the bytes of the length have come."""
    return LENGTH_BYTES + int.from_bytes(came[:LENGTH_BYTES], "little")


class Channel:
    """One end of a connection to a trusted process: received objects are unpickled.

    One thread may send while another receives. Any thread may close the channel; sends and receives
    fail then. The system may give the number of a closed file to another file at once, so the file
    is closed when no thread is in a send or receive.

    Args:
        connection: closed with the channel.
        named: returns the object for a name from ``encoded`` at the other end.
        pipe: descriptor to receive from, if the other end is a ``PipeSender``.
    """

    def __init__(
        self,
        connection: socket.socket,
        named: Callable[[Any], Any] = lambda name: name,
        pipe: int | None = None,
    ) -> None:
        self._connection = connection
        self._named = named
        read = connection.recv if pipe is None else partial(os.read, pipe)
        self._incoming = IncomingMessages(read)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._hanging_up = threading.Lock()

    def limit(self, seconds: float) -> None:
        """Let each send, and each read of a receive, raise ``TimeoutError`` after these seconds."""
        self._connection.settimeout(seconds)

    def send(self, message: Any) -> None:
        """Send an object.

        Raises:
            OSError: the other end is closed.
            Exception: the object cannot be pickled. Nothing was sent then.
        """
        self.send_encoded(encoded(message))

    def send_encoded(self, data: memoryview) -> None:
        """Send a message that ``encoded``, ``encoded_plain`` or ``framed`` returned.

        Raises:
            OSError: the other end is closed, or the other host is silent.
        """
        with self._sending:
            try:
                self._connection.sendall(data)
            except OSError as error:
                _expect_no_silence(error)
                raise

    def receive(self) -> Any:
        """Wait for an object.

        Raises:
            EOFError: the other end is closed.
            Exception: the object cannot be unpickled.
        """
        return self.unpickled(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Wait for a message, and return the bytes.

        Raises:
            EOFError: the other end is closed.
            OSError: the other host is silent.
        """
        with self._receiving:
            try:
                return self._incoming.next()
            except OSError as error:
                _expect_no_silence(error)
                raise

    def unpickled(self, pickled: bytes) -> Any:
        """Return the object of a message from ``encoded`` or ``encoded_plain``.

        Raises:
            Exception: the object cannot be unpickled.
        """
        if pickled[:1] != pickle.PROTO:
            return marshal.loads(pickled)  # noqa: S302 - see the class
        unpickler = pickle.Unpickler(io.BytesIO(pickled))  # noqa: S301 - see the class
        unpickler.persistent_load = self._named  # type: ignore[method-assign]
        return unpickler.load()

    def fileno(self) -> int:
        """Return the number of the file to wait at if ``holds_message`` is false."""
        return self._connection.fileno()

    @property
    def holds_message(self) -> bool:
        """Return True if a whole message has come behind the last one."""
        return self._incoming.holds_message

    @property
    def has_news(self) -> bool:
        """Return True if a receive waits for a short time at most.

        A message or a part of one has come, or the other end is closed.
        """
        if self.holds_message:
            return True
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """End the connection for both processes and all waiting threads. The file stays open."""
        # The other end may have ended the connection.
        with self._hanging_up, suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and close the file when no thread uses the file. Further calls do nothing."""
        self.hang_up()
        # A thread in a send or receive has left after the hang-up, and gives the locks back.
        with self._sending, self._receiving, self._hanging_up:
            self._connection.close()


class ReadAhead(Channel):
    """A channel with a thread that reads each message at once, during any work of this process.

    The other end never waits until this process has computed a step or read a long answer. On a
    network such a wait would look like a lost host.

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
        """Wait for a message, and return the bytes.

        Raises:
            EOFError: the other end is closed.
        """
        found = self._read.get()
        if found is None:
            # The next receive finds the end as well.
            self._read.put(None)
            raise EOFError("the other end of the channel is closed")
        return found

    def _read_on(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    # The time limit is meant for sends.
                    with suppress(TimeoutError):
                        self._read.put(super().receive_bytes())
        finally:
            self._read.put(None)


class PipeSender(Channel):
    """A channel that sends through a pipe and receives from the socket.

    A process that waits at a pipe wakes sooner than at a socket. One thread sends and receives. The
    other process may not read before a long answer is gone, so the channel takes answers in while
    the pipe is full.

    Args:
        connection: see ``Channel``.
        pipe: descriptor to write to. The owner closes the pipe.
    """

    def __init__(self, connection: socket.socket, pipe: int) -> None:
        super().__init__(connection)
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._room = select.poll()
        self._room.register(pipe, select.POLLOUT)
        self._room.register(connection, select.POLLIN)

    def send_encoded(self, data: memoryview) -> None:
        """Send a message that ``encoded``, ``encoded_plain`` or ``framed`` returned.

        Raises:
            TimeoutError: the other process does not read.
            OSError: the other end is closed.
        """
        with self._sending:
            try:
                written = os.write(self._pipe, data)
            # The pipe is full.
            except BlockingIOError:
                written = 0
            if written < len(data):
                self._write_with_patience(data[written:])

    def _write_with_patience(self, data: memoryview) -> None:
        seconds = self._connection.gettimeout()
        milliseconds = None if seconds is None else seconds * 1000
        while data:
            ready = dict(self._room.poll(milliseconds))
            if not ready:
                raise TimeoutError("the pipe of the channel is full")
            # Bytes of an answer stay until the next receive.
            if self.fileno() in ready and not self._incoming.take():
                raise BrokenPipeError("the channel is hung up")
            if self._pipe in ready:
                written = os.write(self._pipe, data)
                data = data[written:]


def _expect_no_silence(error: OSError) -> None:
    """Check that an error does not mean a silent host.

    The system's error for a silent host is a ``TimeoutError``, as for the time limit of a channel.

    Raises:
        ConnectionAbortedError: the host is silent.
    """
    if error.errno in _SILENCE:
        raise ConnectionAbortedError(errno.ETIMEDOUT, "the other host is silent") from error


def framed(data: bytes) -> memoryview:
    """Return bytes as channels send them, for ``receive_bytes``."""
    return memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def encoded(message: Any, name_of: Callable[[Any], Any] | None = None) -> memoryview:
    """Return an object as channels send it.

    Args:
        message: the object.
        name_of: called with each part of the object, which takes time. Returns a name if the other
            end has the part under this name, or ``None`` to send the part.

    Raises:
        Exception: the object cannot be pickled.
    """
    written = io.BytesIO()
    written.write(bytes(LENGTH_BYTES))
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    if name_of is not None:
        pickler.persistent_id = name_of  # type: ignore[method-assign]
    pickler.dump(message)
    data = written.getbuffer()
    length = len(data) - LENGTH_BYTES
    data[:LENGTH_BYTES] = length.to_bytes(LENGTH_BYTES, "little")
    return data


def encoded_plain(message: tuple[Any, ...]) -> memoryview:
    """Return a tuple of numbers, texts and tuples as channels send it, faster than ``encoded``.

    Raises:
        ValueError: the tuple holds another object. Arrays and array numbers pass as bytes.
    """
    return framed(marshal.dumps(message))
