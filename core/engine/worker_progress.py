"""The record of what a worker does, which its executor reads where it hangs or has ended."""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import NamedTuple

_STAGE_BYTES = 128
_COLLECTIVES = os.sep + os.path.join("distributed", "")
"""Part of the paths of the modules in which ranks wait for each other."""


class Progress(NamedTuple):
    """The stage of a worker, and how far it has come.

    Attributes:
        finished: the number of calls that it has come to the end of.
        stage: what it does, or did last.
    """

    finished: int
    stage: str


class ProgressRecord:
    """A file of a worker in which its stage stands first, and its stack where it is asked for.

    Args:
        file: descriptor of a file that both processes have open.
    """

    def __init__(self, file: int) -> None:
        self._file = file

    def answer_signals(self) -> None:
        """Have this process write the stack of its main thread whenever ``SIGUSR1`` comes, whatever it does.

        Where it crashes, it writes its stack to stderr.
        """
        faulthandler.enable()
        os.lseek(self._file, _STAGE_BYTES, os.SEEK_SET)
        faulthandler.register(signal.SIGUSR1, self._file, all_threads=False)

    def write(self, progress: Progress) -> None:
        """Put what is being done in the place of what was."""
        text = f"{progress.finished} {progress.stage}".encode()[:_STAGE_BYTES]
        os.pwrite(self._file, text.ljust(_STAGE_BYTES), 0)

    def read(self) -> Progress:
        """Return what the worker does."""
        finished, _, stage = os.pread(self._file, _STAGE_BYTES, 0).decode(errors="replace").strip().partition(" ")
        return Progress(int(finished or 0), stage or "starting")

    def stack(self) -> str:
        """Return what the worker has written of its stack, the innermost call first; empty before it has."""
        return os.pread(self._file, 1 << 16, _STAGE_BYTES).decode(errors="replace")


def waits_for_others(stack: str) -> bool:
    """Tell whether a stack is that of a rank in a collective."""
    return any(_COLLECTIVES in line for line in stack.splitlines() if line.lstrip().startswith("File"))
