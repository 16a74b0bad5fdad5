"""``SharedSuffixes``: drafts also from recent answers to requests of one salt and adapter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from opgraft.config import OpgraftConfig
from opgraft.engine.drafting.answer_memory import AnswerMemory
from opgraft.engine.drafting.guess import LONGEST_MATCH
from opgraft.engine.drafting.prompt_lookup import PromptLookup
from opgraft.engine.drafting.proposer import Proposer
from opgraft.engine.request import Request

LEAST_MATCH = 2
"""Last tokens to match, at least. A single one says little about the next."""


class SharedSuffixes(Proposer):
    """Guesses by the tokens of the request, or by recent answers if these match more tokens."""

    # Requests share answers within their salt and adapter only, like blocks of the cache. The
    # memory that was unused for the longest time goes first.

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        self._own = PromptLookup(opgraft_config)
        self._most = opgraft_config.speculation.remembered_tokens
        self._memories: OrderedDict[bytes, AnswerMemory] = OrderedDict()
        self._size = 0

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the continuation of the last tokens in the request or in a remembered answer."""
        own = self._own.guess(request, most)
        memory = self._memories.get(_key(request))
        if memory is None:
            return own.tokens
        last = request.tokens(max(request.num_tokens - LONGEST_MATCH, 0))
        shared = memory.guess(last, most)
        if shared.matched < LEAST_MATCH or shared.matched <= own.matched or not shared.tokens:
            return own.tokens
        return shared.tokens

    def forget(self, request: Request) -> None:
        """Remember the answer of a request that has ended."""
        self._own.forget(request)
        if not request.output:
            return
        key = _key(request)
        memory = self._memories.pop(key, None)
        if memory is None:
            memory = AnswerMemory(self._most)
        else:
            self._size -= memory.size
        memory.add(request.output)
        self._memories[key] = memory
        self._size += memory.size
        while self._size > self._most:
            _, forgotten = self._memories.popitem(last=False)
            self._size -= forgotten.size

    def forget_all(self) -> None:
        """Release the indices of all requests."""
        self._own.forget_all()


def _key(request: Request) -> bytes:
    # A salt itself may be a long text.
    salt = request.cache_salt
    key = b"" if salt is None else sha256(salt.encode("utf-8", "surrogatepass")).digest()
    return key + request.lora_digest.encode()
