"""What the process of a test holds, and how much more after each round of the same work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

ROUNDS = 5


def rounds(growth: list[int]) -> Iterator[None]:
    """Yield ``ROUNDS`` times, and note how many objects or pieces of memory the process has more after each round.

    What the process held before is set aside: to look through it takes two seconds each time.
    """
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        before = _held()
        yield
        growth.append(max(now - then for now, then in zip(_held(), before, strict=True)))


def in_each(growth: list[int]) -> int:
    """Return the second least growth. A leak is in every round; threads and caches of earlier tests add to some.

    It is not the least one, because in one round something else may give memory back.
    """
    return sorted(growth)[1]


def _held() -> tuple[int, int]:
    """Return how many objects the garbage collector knows, and pieces of memory the interpreter."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()
