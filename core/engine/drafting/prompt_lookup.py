"""``PromptLookup``: drafts the continuation of an earlier place in prompt and answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opgraft.config import OpgraftConfig
from opgraft.engine.drafting.guess import LONGEST_MATCH, NO_GUESS, Guess
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.request import Request

LENGTHS = (4, 2)
"""Numbers of last tokens to look for, the better one first."""

NOTED_AT_ONCE = 2048
"""Tokens of a request to note in a step, at most: others wait for the end of the step."""


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
            return Guess(self._matched(place, length), following)
        return NO_GUESS

    def _matched(self, place: int, matched: int) -> int:
        """Return how many last tokens are those before a place, where ``matched`` ones are."""
        known = self.tokens
        most = min(LONGEST_MATCH, place)
        while matched < most and known[place - 1 - matched] == known[-1 - matched]:
            matched += 1
        return matched


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
        noted = len(index.tokens)
        end = min(noted + NOTED_AT_ONCE, request.num_tokens)
        index.extend(request.tokens(noted, end))
        if end < request.num_tokens:
            return NO_GUESS
        return index.guess(most)

    def forget(self, request: Request) -> None:
        """Release the index of a request."""
        self._indices.pop(request.request_id, None)

    def forget_all(self) -> None:
        """Release the indices of all requests."""
        self._indices.clear()
