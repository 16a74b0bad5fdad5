"""``PromptLookup``: the tokens that followed the same tokens earlier in prompt and answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opgraft.config import OpgraftConfig
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.request import Request

LENGTHS = (4, 2)
"""Numbers of last tokens to look for, in this order. Longer ones guess better."""


class Guess(NamedTuple):
    """The next tokens, by an earlier occurrence of the last tokens.

    Attributes:
        matched: number of last tokens that are the same.
        tokens: which followed.
    """

    matched: int
    tokens: Sequence[int]


NO_GUESS = Guess(0, ())


class TokenIndex:
    """The tokens of a request, with the latest place of each n-gram."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Only n-grams with a token behind them are noted."""
        known = self.tokens
        for token in tokens:
            place = len(known)
            for length in LENGTHS:
                if length <= place:
                    self._places[tuple(known[place - length :])] = place
            known.append(token)

    def guess(self, most: int) -> Guess:
        """Return what followed the last tokens at their latest earlier place."""
        for length in LENGTHS:
            place = self._places.get(tuple(self.tokens[-length:]))
            if place is not None:
                # A text that repeats itself has the place in its last period.
                period = len(self.tokens) - place
                tokens = [self.tokens[place + number % period] for number in range(most)]
                return Guess(length, tokens)
        return NO_GUESS


class PromptLookup(Proposer):
    """Guesses that a text goes on as it did after the same tokens before.

    This pays for answers that repeat their prompt: edited text and code, summaries, extracts.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        self._indices: dict[str, TokenIndex] = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return what followed the last tokens of the request earlier in it."""
        return self.guess(request, most).tokens

    def guess(self, request: Request, most: int) -> Guess:
        """Return the guess by the tokens of the request alone."""
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = TokenIndex()
        index.extend(request.tokens(len(index.tokens)))
        return index.guess(most)

    def forget(self, request: Request) -> None:
        """Release the index of a request."""
        self._indices.pop(request.request_id, None)

    def forget_all(self) -> None:
        """Release the indices of all requests."""
        self._indices.clear()
