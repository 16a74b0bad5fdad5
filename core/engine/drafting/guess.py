"""``Guess``: tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_MATCH = 16
"""Last tokens to compare with earlier ones, at most."""


class Guess(NamedTuple):
    """The continuation of an earlier place of the last tokens.

    Attributes:
        matched: number of equal tokens before the place.
        tokens: after the place.
    """

    matched: int
    tokens: Sequence[int]


NO_GUESS = Guess(0, ())
