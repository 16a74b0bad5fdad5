"""Seconds of a call, by two clocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "peers"))
from protocol import cpu_seconds  # a script's folder is not a package

Seconds = Mapping[str, float]
"""By clock, ``seconds`` and ``cpu_seconds``; or ``bytes``."""


def taken(call: Callable[[], object], number: int = 1) -> Seconds:
    """Return the seconds of a call, of ``number`` calls on average."""
    wall = time.perf_counter()
    cpu = cpu_seconds()
    for _ in range(number):
        call()
    return {
        "seconds": (time.perf_counter() - wall) / number,
        "cpu_seconds": (cpu_seconds() - cpu) / number,
    }
