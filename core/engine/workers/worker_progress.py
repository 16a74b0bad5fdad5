"""The record of a worker's stage, for the executor if the worker hangs or has ended."""

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
"""Part of the path of a module with collectives, in which ranks wait for each other."""

WAITS = "opgraft waits"
"""The name of a thread in native code that waits for other ranks. Python's stack does not tell."""


class Progress(NamedTuple):
    """The stage of a worker, and the number of its calls.

    Attributes:
        finished: the number of calls that the worker has ended.
        stage: the work of the worker now, or its last work.
    """

    finished: int
    stage: str


def anonymous_file(size: int) -> int:
    """Return a descriptor of a file without a name, which ends with the last process."""
    if sys.platform == "linux":
        file = os.memfd_create("opgraft")
    else:
        with tempfile.TemporaryFile() as opened:
            file = os.dup(opened.fileno())
    os.truncate(file, size)
    return file


class ProgressRecord:
    """Memory of two processes: the stage of a worker, then its stack, if the stack was asked for.

    Args:
        file: descriptor of ``RECORD_BYTES`` of memory.
    """

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, RECORD_BYTES)

    def answer_signals(self, file: int) -> None:
        """Make this process write the stack of its main thread on ``SIGUSR1``.

        On a crash, the process writes the stack to stderr.

        Args:
            file: descriptor of the memory.
        """
        faulthandler.enable()
        os.lseek(file, _STAGE_BYTES, os.SEEK_SET)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)

    def write(self, progress: Progress) -> None:
        """Replace the stage."""
        text = f"{progress.finished} {progress.stage}".encode()[:_STAGE_BYTES]
        self._memory[:_STAGE_BYTES] = text.ljust(_STAGE_BYTES)

    def read(self) -> Progress:
        """Return the stage of the worker.

        Raises:
            ValueError: the record is closed.
        """
        finished, _, stage = self._text(0, _STAGE_BYTES).partition(" ")
        return Progress(int(finished or 0), stage or "starting")

    def stack(self) -> str:
        """Return the stack that the worker has written, the innermost call first.

        Empty before the worker was asked.

        Raises:
            ValueError: the record is closed.
        """
        return self._text(_STAGE_BYTES, RECORD_BYTES)

    def _text(self, first: int, end: int) -> str:
        return self._memory[first:end].decode(errors="replace").strip("\0 ")

    def close(self) -> None:
        """Release the memory in this process."""
        self._memory.close()


def thread_name(process: int | str) -> str:
    """Return the name of the main thread of a process, by its id or ``self``; empty if unknown."""
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
    return ""


def waits_for_others(stack: str) -> bool:
    """Return True for the stack of a rank in a collective. The first line names the thread."""
    name, *lines = stack.splitlines() or [""]
    if name == WAITS:
        return True
    files = [line for line in lines if line.lstrip().startswith("File")]
    return any(_COLLECTIVES in line for line in files)
