"""Tokens of a GGUF file that llama.cpp knows by their text, as many files have no key for them.

Source: "auto-detect special tokens by text" in ``src/llama-vocab.cpp`` of llama.cpp (2026).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

TOKENS = "tokenizer.ggml.tokens"

_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
"""Texts of tokens that end an answer, unless ``_within_answers`` has them."""

_FILL_IN_TOKENS = MappingProxyType(
    {
        "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        "fim_sep": ("<|file_sep|>",),
    }
)
"""By a part of a key: the texts of tokens that end an answer if the file lacks the key."""

_KEYS = ("eot", "eom", *_FILL_IN_TOKENS)


def ends_of_answers(metadata: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids of tokens that end an answer, beside ``eos_token_id``."""
    known = _ids_by_text(metadata)
    found = set(known.values())
    for key in _KEYS:
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            found.add(int(token))
    # Last, as a key may name such a token, too.
    for text in _within_answers(known):
        found.discard(known[text])
    yield from sorted(found)


def with_control_tokens(metadata: Mapping[str, Any], types: list[int], control: int) -> list[int]:
    """Return the types of all tokens, with ``control`` for tokens that usually end an answer.

    Some files call such a token an ordinary one, and a text with it would be cut into letters.
    """
    for token in _ids_by_text(metadata).values():
        types[token] = control
    return types


def _ids_by_text(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of tokens that usually end an answer, by their texts."""
    ids: dict[str, int] = {}
    wanted = _ENDS.union(*_FILL_IN_TOKENS.values())
    for index, token in enumerate(metadata.get(TOKENS, ())):
        if token in wanted:
            ids[token] = index
    found = {}
    for text, index in ids.items():
        if text in _ENDS:
            found[text] = index
    for key, texts in _FILL_IN_TOKENS.items():
        present = [text for text in texts if text in ids]
        # A key in the file is the word of the model's makers, and no text is searched for then.
        if present and f"tokenizer.ggml.{key}_token_id" not in metadata:
            first = present[0]
            found[first] = ids[first]
    return found


def _within_answers(known: Collection[str]) -> Iterator[str]:
    """Yield the texts of tokens after which an answer goes on, as other tokens end the answer."""
    has_call = "<|call|>" in known or "<|calls|>" in known
    # Models with channels end each message with this token.
    if "<|end|>" in known and has_call and ("<|return|>" in known or "<|flush|>" in known):
        yield "<|end|>"
    if "</s>" in known and "<|tool_response>" in known:
        yield "</s>"
