"""Interrupts at a line of one's choice."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class InterruptAt:
    """Raises ``KeyboardInterrupt`` at the n-th line that runs in files of some names."""

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
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace
