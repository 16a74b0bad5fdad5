"""``Grammars``: the compiled grammars of structured outputs that a model was asked for."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from opgraft.engine.sampling import Grammar, GrammarTokens, try_to_compile
from opgraft.engine.sampling_params import SamplingParams

_MOST_GRAMMARS = 128
_MOST_GRAMMAR_CHARACTERS = 1 << 22
"""Of the specs of compiled grammars that are kept, those that were used last: what they take grows with these."""


class Grammars:
    """Grammars, each compiled once and kept for a while; from any thread.

    Args:
        tokens: returns the tokens of the model, when the first grammar is asked for.
    """

    def __init__(self, tokens: Callable[[], GrammarTokens]) -> None:
        self._tokens = tokens
        self._grammars: OrderedDict[bytes, tuple[Grammar, int]] = OrderedDict()
        self._keeping = threading.Lock()

    def of(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a structured output.

        Raises:
            InputError: it cannot be compiled.
        """
        return None if params.structured_output is None else self._kept(params) or self._compiled(params)

    def compile_safely(self, params: SamplingParams) -> None:
        """Compile the grammar of a structured output, if that ends in time.

        Raises:
            InputError: it cannot be compiled, or takes too long.
            ChildError: no process can be started to try it.
        """
        try_to_compile(params.structured_output, self._tokens())
        self._compiled(params)

    def knows(self, params: SamplingParams) -> bool:
        """Tell whether a request can be prepared without the compilation of a grammar."""
        return params.structured_output is None or self._kept(params) is not None

    def _kept(self, params: SamplingParams) -> Grammar | None:
        key, _ = _key(params.structured_output)
        with self._keeping:
            if key not in self._grammars:
                return None
            self._grammars.move_to_end(key)
            return self._grammars[key][0]

    def _compiled(self, params: SamplingParams) -> Grammar:
        grammar = Grammar(params.structured_output, self._tokens())
        key, characters = _key(params.structured_output)
        with self._keeping:
            self._grammars[key] = grammar, characters
            while (
                len(self._grammars) > _MOST_GRAMMARS
                or sum(size for _, size in self._grammars.values()) > _MOST_GRAMMAR_CHARACTERS
            ):
                self._grammars.popitem(last=False)
        return grammar


def _key(wanted: Any) -> tuple[bytes, int]:
    """Return what a structured output is kept by, and its size; what is no JSON is never asked for again."""
    try:
        text = json.dumps(wanted)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return sha256(text.encode()).digest(), len(text)
