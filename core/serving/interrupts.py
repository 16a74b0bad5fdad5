"""Interrupts that end no step of an engine in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_noted(wake: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Take note of a first interrupt, and raise a second one at once.

    Args:
        wake: called by the handler of the first interrupt.

    Yields:
        A function that returns True after an interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals come to the main thread alone
        return
    former = signal.getsignal(signal.SIGINT)
    noted = threading.Event()

    def note(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, former)
        noted.set()
        wake()

    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, former)
