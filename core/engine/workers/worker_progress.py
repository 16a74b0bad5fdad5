"""The record of what a worker does, which its executor reads where it hangs or has ended."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_STAGE_BYTES = 128
RECORD_BYTES = 1 << 16
_COLLECTIVES = os.sep + os.path.join("distributed", "")
"""Part of the paths of the modules in which ranks wait for each other."""

WAITS = "opgraft waits"
"""The name that native code gives its thread while it waits for other ranks: no stack of Python tells that."""


class Progress(NamedTuple):
    """The stage of a worker, and how far it has come.

    Attributes:
        finished: the number of calls that it has come to the end of.
        stage: what it does, or did last.
    """

    finished: int
    stage: str


def anonymous_file(size: int) -> int:
    """Return a descriptor of a file without a name, which ends with the processes that have it."""
    if sys.platform == "linux":
        file = os.memfd_create("opgraft")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.truncate(file, size)
    return file


class ProgressRecord:
    """Memory of two processes in which the stage of a worker stands first, and its stack where it is asked for.

    Args:
        file: descriptor of the memory, of ``RECORD_BYTES``.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, RECORD_BYTES)

    def answer_signals(self, file: int) -> None:
        """Have this process write the stack of its main thread whenever ``SIGUSR1`` comes, whatever it does.

        Where it crashes, it writes its stack to stderr.

        Args:
            file: descriptor of the memory.
        """
        faulthandler.enable()
        os.lseek(file, _STAGE_BYTES, os.SEEK_SET)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)

    def write(self, progress: Progress) -> None:
        """Put what is being done in the place of what was."""
        text = f"{progress.finished} {progress.stage}".encode()[:_STAGE_BYTES]
        self._memory[:_STAGE_BYTES] = text.ljust(_STAGE_BYTES)

    def read(self) -> Progress:
        """Return what the worker does.

        Raises:
            ValueError: the record is closed.
        """
        finished, _, stage = self._text(0, _STAGE_BYTES).partition(" ")
        return Progress(int(finished or 0), stage or "starting")

    def stack(self) -> str:
        """Return what the worker has written of its stack, the innermost call first; empty before it has.

        Raises:
            ValueError: the record is closed.
        """
        return self._text(_STAGE_BYTES, RECORD_BYTES)

    def _text(self, first: int, end: int) -> str:
        return self._memory[first:end].decode(errors="replace").strip("\0 ")

    def close(self) -> None:
        """Give the memory back, as far as this process has it."""
        self._memory.close()


def thread_name(process: int | str) -> str:
    """Return the name of the main thread of a process, by its id or as ``self``; empty if unknown."""
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
    return ""


def waits_for_others(stack: str) -> bool:
    """Return True for the stack of a rank in a collective. The first line names the thread."""
    name, *lines = stack.splitlines() or [""]
    return name == WAITS or any(
        _COLLECTIVES in line for line in lines if line.lstrip().startswith("File")
    )
