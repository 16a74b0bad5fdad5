"""``end_by_signal``: the end of a server by a signal."""

# Imported before torch.

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a server."""

FIRST_PROCESS = 1
"""The id of the first process of a container, to which the kernel sends handled signals only."""


def end_by_signal(number: int, frame: FrameType | None = None) -> NoReturn:
    """End the process at once, as a signal without a handler does."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # The first process of a container is still there.
    os._exit(128 + number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the process at a SIGINT or SIGTERM within the block, also the first of a container.

    Python would raise ``KeyboardInterrupt``, which may be lost in an import of another package.
    Signals that the process ignores stay ignored.
    """
    # The kernel does not wait for Python to call a handler.
    handler = end_by_signal if os.getpid() == FIRST_PROCESS else signal.SIG_DFL
    usual = (signal.SIG_DFL, signal.default_int_handler)
    replaced = [number for number in SIGNALS if signal.getsignal(number) in usual]
    before = {number: signal.signal(number, handler) for number in replaced}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
