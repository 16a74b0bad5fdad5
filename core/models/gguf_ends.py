"""Tokens of a GGUF file that llama.cpp knows by their text, as many files have no key for them.

Source: "auto-detect special tokens by text" in ``src/llama-vocab.cpp`` of llama.cpp (2026).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
"""Texts of tokens that end an answer in any case."""

_FILL_IN_TOKENS = MappingProxyType(
    {
        "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        "fim_sep": ("<|file_sep|>",),
    }
)
"""By a part of a key: the texts of tokens that end an answer if the file lacks the key."""

_KEYS = ("eot", "eom", *_FILL_IN_TOKENS)

_CHANNEL_TOKENS = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
"""Vocabularies with such a pair end a message with ``<|end|>``, and the answer goes on."""


def ends_of_answers(metadata: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids of tokens that end an answer, beside ``eos_token_id``."""
    for key in _KEYS:
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            yield int(token)
    yield from _ids_by_text(metadata)


def with_control_tokens(metadata: Mapping[str, Any], types: list[int], control: int) -> list[int]:
    """Return the types of all tokens, with ``control`` for those that end an answer by their text.

    Some files call such a token an ordinary one, and a text with it would be cut into letters.
    """
    for token in _ids_by_text(metadata):
        types[token] = control
    return types


def _ids_by_text(metadata: Mapping[str, Any]) -> list[int]:
    ids: dict[str, int] = {}
    wanted = _ENDS.union(*_FILL_IN_TOKENS.values())
    for index, token in enumerate(metadata.get(TOKENS, ())):
        if token in wanted:
            ids[token] = index
    found = [ids[text] for text in ids if text in _ENDS and not _goes_on(text, ids)]
    for key, texts in _FILL_IN_TOKENS.items():
        present = [ids[text] for text in texts if text in ids]
        if present and f"tokenizer.ggml.{key}_token_id" not in metadata:
            found.append(present[0])
    return sorted(found)


def _goes_on(text: str, ids: Mapping[str, int]) -> bool:
    if text != "<|end|>":
        return False
    return any(first in ids and second in ids for first, second in _CHANNEL_TOKENS)
