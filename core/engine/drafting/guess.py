"""``Guess``: tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_MATCH = 16
"""Last tokens to compare with earlier ones, at most."""


class Guess(NamedTuple):
    """The tokens after an earlier place, and how many last tokens match those before it."""

    matched: int
    tokens: Sequence[int]


NO_GUESS = Guess(0, ())
