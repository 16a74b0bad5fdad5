"""``Grammars``: compiled grammars of a model, kept for the requests that ask for them again."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from typing import Any

from opgraft.engine.sampling import Grammar, GrammarTokens, try_to_compile
from opgraft.engine.sampling_params import SamplingParams
from opgraft.serving.tokenizer import Tokenizer

_MOST = 128
_MOST_CHARACTERS = 1 << 22
"""Of the specs of the grammars that are kept, those that were used last: what they take grows with these."""


class Grammars:
    """Grammars by what is asked for; from any thread.

    Args:
        tokenizer: of the model.
        vocab_size: tokens that it gives logits for.
        eos: tokens that end an output.
        share: called with each that is compiled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos: frozenset[int],
        share: Callable[[Grammar], None],
    ) -> None:
        self._backend, self._vocab_size, self._eos = tokenizer.backend, vocab_size, eos
        self._share = share
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Grammar, int]] = OrderedDict()

    @cached_property
    def _tokens(self) -> GrammarTokens:
        return GrammarTokens(self._backend, self._vocab_size, self._eos)

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)

    def of(self, params: SamplingParams) -> Grammar:
        """Return the grammar of a structured output, which is compiled once.

        Raises:
            InputError: it cannot be compiled.
        """
        return self.find(params) or self._compiled(params)

    def find(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a structured output, if it is kept."""
        key, _ = _key(params.structured_output)
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def compile_safely(self, params: SamplingParams) -> None:
        """Compile the grammar of a structured output, if that ends in time.

        Raises:
            InputError: it cannot be compiled, or takes too long.
            ChildError: no process can be started to try it.
        """
        if self.find(params) is None:
            try_to_compile(params.structured_output, self._tokens)
            self._compiled(params)

    def _compiled(self, params: SamplingParams) -> Grammar:
        grammar = Grammar(params.structured_output, self._tokens)
        self._share(grammar)
        key, characters = _key(params.structured_output)
        if not characters:
            return grammar
        with self._lock:
            self._kept[key] = grammar, characters
            while (
                len(self._kept) > _MOST
                or sum(size for _, size in self._kept.values()) > _MOST_CHARACTERS
            ):
                self._kept.popitem(last=False)
        return grammar


def _key(wanted: Any) -> tuple[bytes, int]:
    """Return what a structured output is kept by, and its size; 0 for what is no JSON, which is not kept."""
    try:
        text = json.dumps(wanted)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return sha256(text.encode()).digest(), len(text)
