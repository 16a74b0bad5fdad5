"""``end_by_signal``: the end of a server by a signal."""

# Imported before torch.

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

FIRST_PROCESS = 1
"""The id of the first process of a container, to which the kernel sends handled signals only."""


def end_by_signal(number: int, frame: FrameType | None = None) -> NoReturn:
    """End the process at once, as a signal without a handler does."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # The first process of a container is still there.
    os._exit(128 + number)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """End the process at a SIGTERM within the block, also the first process of a container."""
    if os.getpid() != FIRST_PROCESS:
        # The kernel does not wait for Python to call a handler.
        yield
        return
    before = signal.signal(signal.SIGTERM, end_by_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
