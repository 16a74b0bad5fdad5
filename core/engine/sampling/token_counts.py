"""Counts of the tokens that a request has so far."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable


class TokenCounts:
    """Tokens of a request, each once, and how often each is in the output: none of the times for those of the prompt.

    It grows with the output and stays while others come and go, so that nothing is counted twice.

    Args:
        prompt, output: token ids.
        vocabulary: tokens that logits are given for; others are left out.

    Attributes:
        tokens: in the order of their slots, int64.
        counts: of each slot, float32.
    """

    __slots__ = ("_slots", "counts", "tokens", "vocabulary")

    def __init__(self, prompt: Iterable[int], output: Iterable[int], vocabulary: int) -> None:
        found = dict.fromkeys(prompt, 0) | Counter(output)
        kept = {token: count for token, count in found.items() if token < vocabulary}
        self.vocabulary = vocabulary
        self.tokens = array("q", kept)
        self.counts = array("f", kept.values())
        self._slots = {token: slot for slot, token in enumerate(kept)}

    def add(self, token: int) -> int | None:
        """Count a token of the output, and return its slot; ``None`` where it is beyond the vocabulary."""
        if token >= self.vocabulary:
            return None
        slot = self._slots.setdefault(token, len(self.tokens))
        if slot == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[slot] += 1
        return slot
