"""Interrupts that end no step of an engine in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Take note of an interrupt, for who asks what is yielded between steps; a second one is raised at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals come to the main thread alone
        return
    former = signal.getsignal(signal.SIGINT)
    noted = threading.Event()

    def note(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, former)
        noted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, former)
