"""What the process of a test holds, and how much more after each round of the same work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

ROUNDS = 5


def rounds(growth: list[int]) -> Iterator[None]:
    """Yield ``ROUNDS`` times, and note how many objects or pieces of memory the process has more after each round.

    What the process held before is set aside: to look through it takes two seconds each time.

    A leak is in every round. What else changes, as threads and caches of earlier tests, is in few: their median tells.
    """
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        before = _held()
        yield
        growth.append(max(now - then for now, then in zip(_held(), before, strict=True)))


def _held() -> tuple[int, int]:
    """Return how many objects the garbage collector knows, and pieces of memory the interpreter."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()
