"""Interrupts at a line of one's choice."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any


class InterruptAt:
    """Raises ``KeyboardInterrupt`` at the n-th line that runs in files of some names.

    Lines that begin with ``with`` or ``try`` are left out, since no signal is handled there. A trace
    sees the first a second time at the end of the block, before the lock of the block is free, and
    the second before the block of a ``with`` line above has begun.
    """

    def __init__(self, number: int, files: tuple[str, ...]) -> None:
        self.left, self.files = number, files

    def __enter__(self) -> InterruptAt:
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line" and not _handles_no_signal(frame):
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def _handles_no_signal(frame: FrameType) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "try:"))
