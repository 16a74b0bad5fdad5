"""Byte-level tokenizers of GGUF files, made by the library tokenizers alone, which takes a tenth of a second.

Transformers makes the same ones in seconds: its own modules come first, and its reader makes an object per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.text import described

SPECIAL_TOKENS: Mapping[str, str] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""The names of transformers, and the keys of a GGUF file that hold the ids."""

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are found whole in a text; only the first are special."""

_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""The expressions that split a text before merging, by ``tokenizer.ggml.pre``; None is that of GPT-2."""


def byte_level_tokenizer(metadata: Mapping[str, Any], file: Path) -> Any | None:
    """Make the ``tokenizers.Tokenizer`` of a file with a byte-level vocabulary.

    Returns:
        It, or None where the file has a vocabulary of another kind or one that is split in a way not known here.

    Raises:
        CheckpointError: the vocabulary is damaged.
        InputError: tokenizers is not installed.
    """
    pre = metadata.get("tokenizer.ggml.pre")
    if (
        metadata.get("tokenizer.ggml.model") != "gpt2"
        or not isinstance(pre, str)
        or pre not in _SPLITS
    ):
        return None
    tokenizers = import_extra("tokenizers")
    try:
        tokenizer = _merging(metadata)
        tokenizer.pre_tokenizer = _pre_tokenizer(_SPLITS[pre])
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens(_added(metadata, _CONTROL))
        tokenizer.add_tokens(_added(metadata, _USER_DEFINED))
        special = special_tokens(metadata)
        tokenizer.add_special_tokens([*special.values()])
        begin, end = (
            bool(metadata.get("tokenizer.ggml.add_bos_token")),
            bool(metadata.get("tokenizer.ggml.add_eos_token")),
        )
        _surround(
            tokenizer,
            special.get("bos_token") if begin else None,
            special.get("eos_token") if end else None,
        )
    except (
        Exception
    ) as error:  # the library raises plain exceptions, and damaged values nearly anything
        raise CheckpointError(
            f"{file}: its tokenizer is damaged: {described(error)}. Download it again."
        ) from error
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a file names by their ids."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        name: tokens[metadata[key]]
        for name, key in SPECIAL_TOKENS.items()
        if metadata.get(key) is not None
    }


def _surround(tokenizer: Any, begin: str | None, end: str | None) -> None:
    """Make a ``tokenizers.Tokenizer`` put these tokens around a text."""
    processors = import_extra("tokenizers").processors
    around = [token for token in (begin, end) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([begin] if begin is not None else ()), "$A", *([end] if end is not None else ())],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
    )


def _merging(metadata: Mapping[str, Any]) -> Any:
    tokenizers = import_extra("tokenizers")
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token if alphabet.issuperset(token) else _spelled(token): index
        for index, token in enumerate(metadata["tokenizer.ggml.tokens"])
    }
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))


def _spelled(token: str) -> str:
    """Spell a token in the alphabet of bytes."""
    byte_level = import_extra("tokenizers").pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(token))


def _pre_tokenizer(split: str | None) -> Any:
    tokenizers = import_extra("tokenizers")
    parts = tokenizers.pre_tokenizers
    if split is None:
        return parts.ByteLevel(add_prefix_space=False)
    isolated = parts.Split(tokenizers.Regex(split), behavior="isolated")
    return parts.Sequence([isolated, parts.ByteLevel(add_prefix_space=False, use_regex=False)])


def _added(metadata: Mapping[str, Any], kind: int) -> list[Any]:
    """Return the tokens of one type; control tokens outside of the alphabet of bytes are labelled so by mistake."""
    tokenizers = import_extra("tokenizers")
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    kinds = metadata.get("tokenizer.ggml.token_type", [0] * len(metadata["tokenizer.ggml.tokens"]))
    return [
        tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, its in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True)
        if its == kind and alphabet.issuperset(token)
    ]
