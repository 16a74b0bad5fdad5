"""Counts of the tokens of a request so far."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable


class TokenCounts:
    """The different tokens of a request, each with the number of times in the output.

    A token of the prompt alone has the number 0. The counts grow with the output, and are kept when
    other requests come and go. So no token is counted again.

    Args:
        prompt, output: token ids.
        vocabulary: number of logits of a row. Tokens beyond it are left out.

    Attributes:
        tokens: in the order of their slots, int64.
        counts: of each slot, float32.
    """

    __slots__ = ("_slots", "counts", "tokens", "vocabulary")

    def __init__(self, prompt: Iterable[int], output: Iterable[int], vocabulary: int) -> None:
        # Counts of the output replace the zeros of the prompt.
        found = dict.fromkeys(prompt, 0) | Counter(output)
        kept = {token: count for token, count in found.items() if token < vocabulary}
        self.vocabulary = vocabulary
        self.tokens = array("q", kept)
        self.counts = array("f", kept.values())
        self._slots = {token: slot for slot, token in enumerate(kept)}

    def add(self, token: int) -> int | None:
        """Count a token of the output. Return its slot; ``None`` for one beyond the vocabulary."""
        if token >= self.vocabulary:
            return None
        slot = self._slots.setdefault(token, len(self.tokens))
        if slot == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[slot] += 1
        return slot
