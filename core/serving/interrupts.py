"""Interrupts that end no step of an engine in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Notes the first interrupt of a wait, and lets the second one raise.

    Attributes:
        noted: True after an interrupt.
        wake: called by the handler of the first interrupt.
    """

    def __init__(self) -> None:
        self.noted = False
        self.wake: Callable[[], object] = _nothing
        self._active = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Note an interrupt within the block. A block within another one adds nothing."""
        # Signals come to the main thread alone. The second interrupt is not for this handler.
        main = threading.current_thread() is threading.main_thread()
        if self._active or self.noted or not main:
            yield
            return
        former = signal.getsignal(signal.SIGINT)

        def note(number: int, frame: Any) -> None:
            # A user who interrupts again does not want to wait for the end of a step.
            signal.signal(signal.SIGINT, former)
            self.noted = True
            self.wake()

        self._active = True
        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)
            self._active = False


def _nothing() -> None:
    """Wake nobody."""
