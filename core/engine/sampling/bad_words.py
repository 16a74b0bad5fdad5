"""The tokens of bad words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def bad_word_tokens(words: Iterable[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that bad words are banned as.

    A word stands at the beginning of a text and after a space, so it is taken with and without one before it, as vLLM
    does. Other splits of the same text into tokens are not banned.

    Args:
        words: not empty.
        tokenizer: of transformers, for its ``encode``.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(tokens for tokens in found if tokens)
