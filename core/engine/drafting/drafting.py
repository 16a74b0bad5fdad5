"""``Drafting``: asks for guesses, and chooses the number of tokens to verify."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.binding.pluggable_class import choose_class
from opgraft.config import OpgraftConfig
from opgraft.engine.drafting.prompt_lookup import PromptLookup
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.drafting.shared_suffixes import SharedSuffixes
from opgraft.engine.drafting.step_times import StepTimes
from opgraft.engine.request import Request
from opgraft.engine.step import Step

_METHODS: Mapping[str, type[Proposer]] = MappingProxyType(
    {"ngram": PromptLookup, "suffix": SharedSuffixes}
)

_FIRST_CHANCE = 0.25
"""The chance of a right token, before guesses are compared."""

_OF_REQUEST = 1 / 8
"""The weight of the newest guess in the chance of a request."""

_OF_ALL = 1 / 64
"""The weight of the newest guess in the first chance of new requests."""


class _Guess:
    """The last guess of a request, made at ``at`` tokens, and the chance of a right token."""

    # Every guess is compared with the next tokens, also if no step verified it: that is free.

    __slots__ = ("at", "chance", "tokens")

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self.at = 0
        self.tokens: Sequence[int] = ()

    def outcomes(self, request: Request) -> list[bool]:
        """Return True for each right token, and False for the first wrong one."""
        found = []
        came = request.tokens(self.at, self.at + len(self.tokens))
        for guess, token in zip(self.tokens, came, strict=False):
            found.append(guess == token)
            if guess != token:
                break
        return found

    def most_worth(self, share: float) -> int:
        """Return the number of guessed tokens to verify.

        A token pays if the chance that it is right exceeds ``share``, the cost of its row.
        """
        count = 0
        chance = self.chance
        while count < len(self.tokens) and chance > share:
            count += 1
            chance *= self.chance
        return count


class Drafting:
    """The drafts of all requests.

    Attributes:
        proposer: guesses, until a call of it fails.
        times: of recent steps.
        vocab_size: number of tokens of the vocabulary. A guess ends before an id beyond.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        config = opgraft_config.speculation
        self.proposer = proposer_of(opgraft_config)
        self.times = StepTimes()
        self.vocab_size = sys.maxsize
        self._has_failed = False
        self._most = config.max_tokens
        self._adaptive = config.adaptive
        self._chance = _FIRST_CHANCE
        self._guessed: dict[str, _Guess] = {}

    def draft(self, request: Request, most: int, rows: int) -> tuple[int, ...]:
        """Return at most ``most`` tokens to verify in the next step, of ``rows`` other tokens."""
        guessed = self._guessed.get(request.request_id)
        if guessed is None:
            guessed = _Guess(self._chance)
            self._guessed[request.request_id] = guessed
        for is_right in guessed.outcomes(request):
            guessed.chance += (is_right - guessed.chance) * _OF_REQUEST
            self._chance += (is_right - self._chance) * _OF_ALL
        guessed.at = request.num_tokens
        most = min(most, self._most)
        guess = self._ask(self.proposer.propose, request, most) or ()
        known = takewhile(range(self.vocab_size).__contains__, guess[:most])
        guessed.tokens = tuple(known)
        if not self._adaptive:
            return guessed.tokens
        share = self.times.share_of_row(rows)
        return guessed.tokens[: guessed.most_worth(share)]

    def observe(self, step: Step, seconds: float) -> None:
        """Note the time of a computed step. Steps with prompts do not count."""
        # A token of a prompt comes with the sequence.
        if step.sequences and all(each.token is not None for each in step.sequences):
            rows = sum(each.count for each in step.sequences)
            self.times.add(rows, seconds)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._guessed.pop(request.request_id, None)
        self._ask(self.proposer.forget, request)

    def forget_all(self) -> None:
        """Forget all requests. Their last tokens may be gone."""
        self._guessed.clear()
        self._ask(self.proposer.forget_all)

    def _ask(self, method: Callable[..., Any], *given: Any) -> Any:
        """Return the answer of the proposer; ``None`` once a call of it has failed."""
        if self._has_failed:
            return None
        try:
            return method(*given)
        except Exception as error:
            self._has_failed = True
            name = type(self.proposer).__qualname__
            logger.exception(
                "nothing is drafted any more, because the proposer %s failed: %s. Mend it, or "
                "leave speculation.method out",
                name,
                described(error),
            )
            return None


def proposer_of(opgraft_config: OpgraftConfig) -> Proposer:
    """Return the proposer for ``speculation.method``. The proposer of a plugin replaces all."""
    chosen: type[Proposer] = choose_class(Proposer).cls
    if chosen is Proposer:
        chosen = _METHODS[str(opgraft_config.speculation.method)]
    return chosen(opgraft_config)


def drafting_of(opgraft_config: OpgraftConfig) -> Drafting | None:
    """Return the drafting of an engine; ``None`` if the settings ask for none."""
    if opgraft_config.speculation.method is None:
        return None
    return Drafting(opgraft_config)
