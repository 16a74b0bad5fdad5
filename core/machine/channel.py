"""``Channel``: Python objects from process to process over a socket."""

from __future__ import annotations

import io
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LENGTH_BYTES = 8
"""Bytes before a message, which say how long it is."""

_PIECE = 1 << 16


class Channel:
    """One end of a connection to a process that is trusted as this one is, as what comes is unpickled.

    A message is one write, and mostly one read: with each, a thread gives its interpreter to others for a while.
    Any thread may close it. Sends and receives then fail, and its file is given back once nobody is in one: the
    number may be another file's at once.

    Args:
        connection: which the channel closes.
        named: the object of a name that ``send`` at the other end gave.
    """

    def __init__(self, connection: socket.socket, named: Callable[[Any], Any] = lambda name: name) -> None:
        self._connection = connection
        self._named = named
        self._came = bytearray()
        self._in_use, self._hanging_up = threading.Lock(), threading.Lock()

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
        """Send an object that ``encoded`` has made ready, as to several processes.

        Raises:
            OSError: the other end is closed.
        """
        with self._in_use:
            self._connection.sendall(data)

    def receive(self) -> Any:
        """Wait for an object.

        Raises:
            EOFError: the other end is closed.
            Exception: what unpickling it raises.
        """
        return self.unpickled(self.receive_pickled())

    def receive_pickled(self) -> bytes:
        """Wait for an object, and return it as it came.

        Raises:
            EOFError: the other end is closed.
        """
        with self._in_use:
            self._expect(LENGTH_BYTES)
            end = self._end()
            self._expect(end)
            pickled = bytes(self._came[LENGTH_BYTES:end])
            del self._came[:end]
        return pickled

    def unpickled(self, pickled: bytes) -> Any:
        """Return the object that came.

        Raises:
            Exception: what unpickling it raises.
        """
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

    def _end(self) -> int:
        return LENGTH_BYTES + int.from_bytes(self._came[:LENGTH_BYTES], "little")

    def _expect(self, size: int) -> None:
        while len(self._came) < size:
            piece = self._connection.recv(max(_PIECE, size - len(self._came)))
            if not piece:
                raise EOFError("the other end of the channel is closed")
            self._came += piece

    def hang_up(self) -> None:
        """Have both ends come to their end, also for threads that wait at them; the file stays."""
        with self._hanging_up, suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give the file back once no thread uses it any more. Further calls do nothing."""
        self.hang_up()
        with self._in_use, self._hanging_up:
            self._connection.close()


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
