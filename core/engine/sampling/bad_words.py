"""The tokens of bad words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def bad_word_tokens(words: Iterable[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences to ban for bad words.

    A word may stand at the beginning of a text, or after a space. So each word gives two sequences,
    with and without a space, as in vLLM. Other splits of the same text into tokens are not banned.

    Args:
        words: not empty.
        tokenizer: of transformers.
    """
    # A dictionary, as a set with an order.
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            found[tuple(tokens)] = None
    return tuple(tokens for tokens in found if tokens)
