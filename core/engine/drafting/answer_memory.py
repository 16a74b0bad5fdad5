"""``AnswerMemory``: recent answers to requests of one cache salt."""

from __future__ import annotations

from collections.abc import Sequence

from opgraft.engine.drafting.guess import Guess
from opgraft.engine.drafting.suffix_automaton import SuffixAutomaton

LEAST_SIZE = 8
"""The size of a memory without tokens: it takes as many bytes as so many tokens."""


class AnswerMemory:
    """The recent answers of one salt, in two automata. The older one is dropped as a whole.

    Args:
        most: the size, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = max((most - LEAST_SIZE) // 2, 1)
        self._older = SuffixAutomaton()
        self._newer = SuffixAutomaton()

    @property
    def size(self) -> int:
        """The number of tokens, and ``LEAST_SIZE``."""
        return LEAST_SIZE + len(self._older.tokens) + len(self._newer.tokens)

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer, or the end of a long one."""
        kept = answer[-self._most :]
        if len(self._newer.tokens) + len(kept) > self._most:
            self._older = self._newer
            self._newer = SuffixAutomaton()
        self._newer.add(kept)

    def guess(self, last: Sequence[int], most: int) -> Guess:
        """Return the continuation of the longest part of an answer with the same end."""
        guesses = [each.guess(last, most) for each in (self._newer, self._older)]
        # Of equal matches, the newer one.
        return max(guesses, key=lambda guess: guess.matched)
