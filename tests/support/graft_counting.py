"""A file that keeps account of calls, for forwards of another file."""

from __future__ import annotations

SEEN: list[int] = []
COUNTS = {"calls": 0}


def note() -> None:
    """Count a call."""
    COUNTS["calls"] += 1
