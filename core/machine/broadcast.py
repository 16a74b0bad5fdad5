"""Messages that are written once, to memory that several processes share, and read by all of them."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from opgraft.machine.channel import LENGTH_BYTES, ReadAhead

SLOTS, SLOT_BYTES = 32, 1 << 16

_TOKEN = struct.Struct("<II")  # a slot, and the bytes in it
BY_CHANNEL = _TOKEN.pack(0, 0)
"""A token for a message that comes by the channel itself."""


def anonymous_file(size: int) -> int:
    """Return a descriptor of a file without a name, which is gone with the last process that has it open."""
    if sys.platform == "linux":
        file = os.memfd_create("opgraft")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.truncate(file, size)
    return file


class SharedSlots:
    """Slots in shared memory, of which each message takes the next.

    A token tells its readers, one by one and through the kernel, where it is, so that what is in the slot is there when
    they look. A slot is written again once all of them are known to be done with what was in it.

    Args:
        finished: returns the number of messages that all readers are done with.

    Attributes:
        file: descriptor of the memory.
        close: gives the memory back, as far as this process has it; done too when nobody has this object any more.
    """

    def __init__(self, finished: Callable[[], int]) -> None:
        self.file = anonymous_file(SLOTS * SLOT_BYTES)
        self._memory = mmap.mmap(self.file, SLOTS * SLOT_BYTES)
        self.close = weakref.finalize(self, _close, self._memory, self.file)
        self._ask_finished = finished
        self._finished = 0

    def write(self, number: int, data: memoryview) -> bytes:
        """Write a message and return its token: ``BY_CHANNEL`` where it is too long, or readers are behind.

        Args:
            number: of the message, which count from 0.
            data: as ``encoded`` returns it.
        """
        size = len(data) - LENGTH_BYTES
        if size > SLOT_BYTES or not self._is_free(number):
            return BY_CHANNEL
        slot = number % SLOTS
        self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + size] = data[LENGTH_BYTES:]
        return _TOKEN.pack(slot, size)

    def _is_free(self, number: int) -> bool:
        if number >= self._finished + SLOTS:
            self._finished = self._ask_finished()
        return number < self._finished + SLOTS


def _close(memory: mmap.mmap, file: int) -> None:
    memory.close()
    os.close(file)


class SharedChannel(ReadAhead):
    """A channel whose messages are read from ``SharedSlots``, where tokens say so.

    Args:
        connection: for other messages, and for those to the other end.
        named: see ``Channel``.
        file: of the slots.
        tokens: descriptor of the pipe that tokens come by.
    """

    def __init__(
        self, connection: socket.socket, named: Callable[[Any], Any], file: int, tokens: int
    ) -> None:
        super().__init__(connection, named)
        self._memory = mmap.mmap(file, SLOTS * SLOT_BYTES)
        self._tokens = tokens

    def receive_bytes(self) -> bytes:
        """Wait for a message, and return it as it came.

        Raises:
            EOFError: the other end is closed.
        """
        token = os.read(self._tokens, _TOKEN.size)  # each is one write, and so one read
        if not token:
            raise EOFError("the other end of the channel is closed")
        if token == BY_CHANNEL:
            return super().receive_bytes()
        slot, size = _TOKEN.unpack(token)
        return self._memory[slot * SLOT_BYTES : slot * SLOT_BYTES + size]
