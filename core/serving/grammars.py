"""``Grammars``: compiled grammars of a model, kept for later requests."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from typing import Any

from opgraft.base.timeline import phase
from opgraft.engine.sampling import Grammar, GrammarTokens, try_to_compile
from opgraft.engine.sampling_params import SamplingParams
from opgraft.serving.tokenizer import Tokenizer

_MOST = 128
_MOST_CHARACTERS = 1 << 22
"""Characters of the specs of kept grammars. The memory of a grammar grows with its spec."""


class Grammars:
    """Compiled grammars by the structured outputs of requests. Any thread may use this.

    Args:
        tokenizer: of the model.
        vocab_size: number of logits of the model.
        eos: tokens that end an output.
        share: called with each compiled grammar.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos: frozenset[int],
        share: Callable[[Grammar], None],
    ) -> None:
        self._backend = tokenizer.backend
        self._vocab_size = vocab_size
        self._eos = eos
        self._share = share
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Grammar, int]] = OrderedDict()

    @cached_property
    def _tokens(self) -> GrammarTokens:
        return GrammarTokens(self._backend, self._vocab_size, self._eos)

    def __len__(self) -> int:
        """Return the number of kept grammars."""
        return len(self._kept)

    def of(self, params: SamplingParams) -> Grammar:
        """Return the grammar of a structured output, compiled if it is new.

        Raises:
            InputError: the grammar cannot be compiled.
        """
        return self.find(params) or self._compiled(params)

    def find(self, params: SamplingParams) -> Grammar | None:
        """Return the kept grammar of a structured output, or None."""
        key, _ = _key_and_size(params.structured_output)
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    @phase("grammar")
    def compile_safely(self, params: SamplingParams) -> None:
        """Compile the grammar of a structured output, after a trial in another process.

        Raises:
            InputError: the grammar cannot be compiled, or not in time.
            ChildError: no process can be started for the trial.
        """
        if self.find(params) is None:
            try_to_compile(params.structured_output, self._tokens)
            self._compiled(params)

    def _compiled(self, params: SamplingParams) -> Grammar:
        grammar = Grammar(params.structured_output, self._tokens)
        # Workers in other processes need the compiled grammar, too.
        self._share(grammar)
        key, characters = _key_and_size(params.structured_output)
        if not characters:
            return grammar
        with self._lock:
            self._kept[key] = grammar, characters
            # The grammar without use for the longest time goes first.
            while len(self._kept) > _MOST or self._characters() > _MOST_CHARACTERS:
                self._kept.popitem(last=False)
        return grammar

    def _characters(self) -> int:
        return sum(characters for _, characters in self._kept.values())


def _key_and_size(wanted: Any) -> tuple[bytes, int]:
    """Return the key of a structured output, and the number of its characters.

    The number is 0 for values that are no JSON. Their grammars are not kept.
    """
    try:
        text = json.dumps(wanted)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return sha256(text.encode()).digest(), len(text)
