"""Make tokenizers of GGUF files by the library tokenizers alone, in a tenth of a second.

Keys and their defaults have the meaning of llama.cpp (``src/llama-vocab.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opgraft.base.text import described
from opgraft.errors import VocabularyError, close_matches
from opgraft.models.extras import import_extra
from opgraft.models.gguf_ends import TOKENS, with_control_tokens
from opgraft.models.gguf_splits import REFUSED, VOCABULARIES, VocabularyCuts
from opgraft.models.settings_keys import GGUF_TOKENIZER, refusals

SPECIAL_TOKENS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
        "sep_token": "tokenizer.ggml.seperator_token_id",
        "cls_token": "tokenizer.ggml.cls_token_id",
        "mask_token": "tokenizer.ggml.mask_token_id",
    }
)
"""The names of transformers, and the keys of a GGUF file that hold the ids."""

_SENTENCE_PIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""The usual ids of a vocabulary "llama" without these keys."""

NO_TOKENIZER = ("none", "no_vocab")
"""Values of ``tokenizer.ggml.model`` for a file without a tokenizer."""

_REFUSED_MODELS: Mapping[str, str] = {
    "bert": "a WordPiece vocabulary, which only encoders have",
    "t5": "a Unigram vocabulary, which only models with an encoder and a decoder have",
    "rwkv": "a vocabulary of RWKV, which is not read here",
    "plamo2": "a vocabulary of PLaMo 2, which is not read here",
    "gemma4": "a vocabulary of Gemma 4, which is not read from GGUF files here",
    "hybriddna": "a vocabulary of DNA, which is not read here",
    "whitespace": "a vocabulary of words that a trie takes apart, which is not read here",
    "test": "no vocabulary, but a hash for tests of llama.cpp",
}
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of tokens.

Tokens of the first three types are found whole in a text. User-defined tokens are not special.
"""

_TEMPLATE = "tokenizer.chat_template"
_PHI3 = ("phi-3", "phi3")
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that leave the spaces after them alone."""


def gguf_tokenizer(metadata: Mapping[str, Any], file: Path) -> Any:
    """Make the ``tokenizers.Tokenizer`` of a file.

    Raises:
        VocabularyError: the vocabulary is damaged, or the kind or a setting is not read here.
            Prompts of token ids need no tokenizer.
        InputError: tokenizers is not installed.
    """
    make, surrounds = _maker(metadata, file)
    problems = refusals(GGUF_TOKENIZER, metadata)
    if problems:
        raise _unread(file, "; ".join(problems))
    import_extra("tokenizers")
    try:
        tokenizer = make(metadata)
        added = list(_added(metadata))
        tokenizer.add_tokens(added)
        special = special_tokens(metadata)
        known = {token.content for token in added}
        # Files without types of tokens still name the special ones by their ids.
        unmarked = [text for text in special.values() if text not in known]
        tokenizer.add_special_tokens(unmarked)
        begins, ends = _flags(metadata, surrounds)
        first = [_token_of_name(special, "bos_token", file)] if begins else []
        last = [_token_of_name(special, "eos_token", file)] if ends else []
        _surround(tokenizer, [*first, "$A", *last])
    except VocabularyError:
        raise
    # The library raises plain exceptions, and damaged values may raise any.
    except Exception as error:
        raise VocabularyError(
            f"{file}: its tokenizer is damaged: {described(error)}. Download it again, or give "
            "prompts as token ids."
        ) from error
    return tokenizer


def _token_of_name(special: Mapping[str, str], name: str, file: Path) -> str:
    """Return the token at the beginning or the end of each text.

    Raises:
        VocabularyError: the file names no such token.
    """
    if name in special:
        return special[name]
    verb = "begins" if name == "bos_token" else "ends"
    raise _unread(file, f"a text {verb} with a token, and {SPECIAL_TOKENS[name]} is missing")


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a file by their names in transformers, as text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    is_llama = metadata.get("tokenizer.ggml.model") == "llama"
    usual = _SENTENCE_PIECE_IDS if is_llama else {}
    found = {}
    for name, key in SPECIAL_TOKENS.items():
        number = metadata.get(key, usual.get(name))
        if number is not None:
            found[name] = tokens[number]
    return found


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a file by name; the one without a name is "default"."""
    found = {}
    for key, value in metadata.items():
        if not isinstance(value, str):
            continue
        if key == _TEMPLATE:
            found["default"] = value
        elif key.startswith(f"{_TEMPLATE}."):
            name = key.removeprefix(f"{_TEMPLATE}.")
            found[name] = value
    return found


def _unread(file: object, reason: str) -> VocabularyError:
    return VocabularyError(
        f"{file}: {reason}. Give prompts as token ids, or take the checkpoint as safetensors."
    )


def _maker(metadata: Mapping[str, Any], file: Path) -> tuple[Any, bool]:
    """Return the function that makes the tokenizer, and the usual value of ``add_bos_token``."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "llama":
        return _sentence_pieces, True
    if model == "gpt2":
        vocabulary = _vocabulary(metadata, file)
        return lambda given: _byte_level(given, vocabulary), vocabulary.begins
    if isinstance(model, str) and model in _REFUSED_MODELS:
        raise _unread(file, f"tokenizer.ggml.model is {model!r}, {_REFUSED_MODELS[model]}")
    known = close_matches(str(model)[:80], ("gpt2", "llama"))
    raise _unread(file, f"tokenizer.ggml.model is {model!r:.80}, which is not known: {known}")


def _vocabulary(metadata: Mapping[str, Any], file: Path) -> VocabularyCuts:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if isinstance(name, str) and name in VOCABULARIES:
        return VOCABULARIES[name]
    if isinstance(name, str) and name in REFUSED:
        raise _unread(file, f"tokenizer.ggml.pre is {name!r}, which is not read: {REFUSED[name]}")
    known = close_matches(str(name)[:80], VOCABULARIES)
    raise _unread(file, f"tokenizer.ggml.pre is {name!r:.80}, which is not known: {known}")


def _flags(metadata: Mapping[str, Any], begins: bool) -> tuple[bool, bool]:
    """Return two flags: a text begins with a token, and a text ends with a token."""
    begin = metadata.get("tokenizer.ggml.add_bos_token", begins)
    return bool(begin), bool(metadata.get("tokenizer.ggml.add_eos_token"))


def _surround(tokenizer: Any, pieces: list[str]) -> None:
    """Make a ``tokenizers.Tokenizer`` put tokens around a text.

    Example: ``["<s>", "$A"]`` puts the token ``<s>`` before the text, the piece ``$A``.
    """
    around = dict.fromkeys(piece for piece in pieces if piece != "$A")
    ids = [(token, tokenizer.token_to_id(token)) for token in around]
    processors = import_extra("tokenizers").processors
    tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def _byte_level(metadata: Mapping[str, Any], vocabulary: VocabularyCuts) -> Any:
    """Make the tokenizer of a vocabulary of bytes. Merges join bytes to longer pieces."""
    tokenizers = import_extra("tokenizers")
    model = tokenizers.models.BPE(
        vocab=_spelled_vocabulary(metadata),
        merges=[_pair(merge) for merge in metadata["tokenizer.ggml.merges"]],
        ignore_merges=vocabulary.whole_words,
    )
    tokenizer = tokenizers.Tokenizer(model)
    parts = tokenizers.pre_tokenizers
    splits = [
        parts.Split(tokenizers.Regex(split), behavior="isolated") for split in vocabulary.splits
    ]
    # The expressions have cut the text, so that ByteLevel must not cut by its own.
    bytes_of = parts.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = parts.Sequence([*splits, bytes_of])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """Return the two pieces of a merge. The first one may itself be a space."""
    border = merge.index(" ", 1)
    return merge[:border], merge[border + 1 :]


def _types(metadata: Mapping[str, Any]) -> Sequence[int]:
    # 0 is no type, so that the file has no token of a special type.
    usual = [0] * len(metadata[TOKENS])
    types = list(metadata.get("tokenizer.ggml.token_type", usual))
    return with_control_tokens(metadata, types, _CONTROL)


def _spelled_vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return token → id. Tokens of merged bytes are spelled in the alphabet of bytes."""
    tokenizers = import_extra("tokenizers")
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {}
    rows = zip(metadata["tokenizer.ggml.tokens"], _types(metadata), strict=True)
    for index, (token, kind) in enumerate(rows):
        # Tokens that are found whole keep their spelling, in any alphabet.
        whole = kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        if whole or alphabet.issuperset(token):
            vocabulary[token] = index
        else:
            vocabulary[_spelled(token)] = index
    return vocabulary


def _spelled(token: str) -> str:
    """Spell a token in the alphabet of bytes."""
    parts = import_extra("tokenizers").pre_tokenizers
    byte_level = parts.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = byte_level.pre_tokenize_str(token)
    return "".join(piece for piece, _ in pieces)


def _sentence_pieces(metadata: Mapping[str, Any]) -> Any:
    """Make the tokenizer of a vocabulary of characters. The merge with the best score is first."""
    tokenizers = import_extra("tokenizers")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, metadata["tokenizer.ggml.scores"], _types(metadata)),
        unk_token=special_tokens(metadata).get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    prefixed = _prefixes_space(metadata)
    normalizers = tokenizers.normalizers
    decoders = tokenizers.decoders
    # SentencePiece writes a space as "▁" within its tokens.
    steps = [normalizers.Replace(" ", "▁")]
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.insert(0, normalizers.Prepend("▁"))
        # The space that was put before the text.
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _prefixes_space(metadata: Mapping[str, Any]) -> bool:
    """Return True if a space is put before a text."""
    # Gemma never has a space, and early files of Gemma have no such key.
    usual = not str(metadata.get("general.architecture")).startswith("gemma")
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", usual))


def _merges(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, the best score first."""
    ranked = []
    # A file has scores and no merges. The library wants merges, in the order of their ranks.
    for token, index in vocabulary.items():
        # Merges never make these: they come whole, or as the bytes of an unknown character.
        if types[index] in (_CONTROL, _BYTE):
            continue
        for border in range(1, len(token)):
            left = token[:border]
            right = token[border:]
            if left not in vocabulary or right not in vocabulary:
                continue
            ids = (vocabulary[left], vocabulary[right])
            row = (-scores[index], index, ids, (left, right))
            ranked.append(row)
    ranked.sort()
    return [pair for *_, pair in ranked]


def _added(metadata: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tokens that are found whole in a text."""
    added_token = import_extra("tokenizers").AddedToken
    # llama.cpp tells Phi-3 by the name of the model, and not by the architecture.
    name = str(metadata.get("general.name")).lower()
    takes_spaces = any(part in name for part in _PHI3)
    lstrip: tuple[str, ...] = ()
    if metadata["tokenizer.ggml.model"] == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre") or "default"
        lstrip = VOCABULARIES[pre].lstrip
    tokens = metadata["tokenizer.ggml.tokens"]
    for token, kind in zip(tokens, _types(metadata), strict=True):
        if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        yield added_token(
            token,
            normalized=False,
            special=kind != _USER_DEFINED,
            lstrip=token in lstrip,
            rstrip=takes_spaces and token not in _PHI3_PLAIN,
        )
