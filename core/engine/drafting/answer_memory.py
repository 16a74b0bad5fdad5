"""``SharedSuffixes``: drafts also from recent answers to requests of the same cache salt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from opgraft.config import OpgraftConfig
from opgraft.engine.drafting.prompt_lookup import Guess, PromptLookup
from opgraft.engine.drafting.suffix_automaton import SuffixAutomaton
from opgraft.engine.request import Request

LONGEST_MATCH = 16
"""Last tokens to look for, at most."""

LEAST_MATCH = 2
"""Last tokens to match, at least. A single one says little about the next."""


class AnswerMemory:
    """The recent answers of one salt, in two automata. The older one is dropped as a whole.

    Args:
        most: tokens in one automaton, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._older = SuffixAutomaton()
        self._newer = SuffixAutomaton()

    def __len__(self) -> int:
        return len(self._older.tokens) + len(self._newer.tokens)

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


class SharedSuffixes(PromptLookup):
    """Guesses by the tokens of the request, or by recent answers if these match more tokens.

    Requests share answers within their cache salt only, like blocks of the cache. If the answers of
    all salts exceed ``speculation.remembered_tokens``, the longest unused salt is forgotten.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        self._most = opgraft_config.speculation.remembered_tokens
        self._memories: OrderedDict[str | None, AnswerMemory] = OrderedDict()

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the continuation of the last tokens in the request or in a remembered answer."""
        own = self.guess(request, most)
        memory = self._memories.get(request.cache_salt)
        if memory is None:
            return own.tokens
        last = request.tokens(max(request.num_tokens - LONGEST_MATCH, 0))
        shared = memory.guess(last, most)
        if shared.matched < LEAST_MATCH or shared.matched <= own.matched:
            return own.tokens
        return shared.tokens

    def forget(self, request: Request) -> None:
        """Remember the answer of a request that has ended."""
        super().forget(request)
        if not request.output:
            return
        memory = self._memories.get(request.cache_salt)
        if memory is None:
            memory = AnswerMemory(max(self._most // 2, 1))
            self._memories[request.cache_salt] = memory
        self._memories.move_to_end(request.cache_salt)
        memory.add(request.output)
        while sum(map(len, self._memories.values())) > self._most:
            self._memories.popitem(last=False)
