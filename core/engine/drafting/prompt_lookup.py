"""``PromptLookup``: drafts the continuation of an earlier place in prompt and answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opgraft.config import OpgraftConfig
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.request import Request

LENGTHS = (4, 2)
"""Numbers of last tokens to look for, in this order. Longer ones guess better."""


class Guess(NamedTuple):
    """The continuation of an earlier place of the last tokens.

    Attributes:
        matched: number of equal tokens before the place.
        tokens: after the place.
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
        """Append tokens."""
        known = self.tokens
        for token in tokens:
            place = len(known)
            # N-grams are noted with the next token, so the last ones find earlier places.
            for length in LENGTHS:
                if length <= place:
                    ngram = tuple(known[place - length :])
                    self._places[ngram] = place
            known.append(token)

    def guess(self, most: int) -> Guess:
        """Return the continuation of the latest earlier place of the last tokens."""
        for length in LENGTHS:
            ngram = tuple(self.tokens[-length:])
            place = self._places.get(ngram)
            if place is None:
                continue
            following = self.tokens[place : place + most]
            # Near the end, the text is taken to go on repeating itself.
            while len(following) < most:
                following += following[: most - len(following)]
            return Guess(length, following)
        return NO_GUESS


class PromptLookup(Proposer):
    """Guesses by the tokens of the request alone.

    This pays for answers with parts of their prompt: edited text and code, summaries, extracts.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        self._indices: dict[str, TokenIndex] = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the continuation of an earlier place of the last tokens."""
        return self.guess(request, most).tokens

    def guess(self, request: Request, most: int) -> Guess:
        """Return the guess with the number of matched tokens."""
        index = self._indices.get(request.request_id)
        if index is None:
            index = TokenIndex()
            self._indices[request.request_id] = index
        new_tokens = request.tokens(len(index.tokens))
        index.extend(new_tokens)
        return index.guess(most)

    def forget(self, request: Request) -> None:
        """Release the index of a request."""
        self._indices.pop(request.request_id, None)

    def forget_all(self) -> None:
        """Release the indices of all requests."""
        self._indices.clear()
