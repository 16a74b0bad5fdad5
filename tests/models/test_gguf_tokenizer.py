"""Tokenizers of GGUF files give the ids of llama.cpp, or are refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from opgraft.errors import VocabularyError
from opgraft.models.files import open_weights
from opgraft.models.gguf_splits import REFUSED, VOCABULARIES
from opgraft.models.gguf_tokenizer import gguf_tokenizer
from opgraft.models.settings_keys import GGUF_TOKENIZER
from opgraft.serving.tokenizer import Tokenizer, find_tokenizer, open_tokenizer
from support.gguf_vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    TEXTS,
    UNKNOWN,
    USER_DEFINED,
    byte_spelled,
    write_vocabulary,
)
from support.small_tokenizers import trained_tokenizer

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

RECORDED = json.loads(Path(__file__).with_name("llama_cpp.json").read_text(encoding="utf-8"))
PIECES = {name: row["texts"] for row in RECORDED["pieces"] for name in row["names"]}

APPROXIMATED = {
    "a\u00a0b": ("deepseek-llm", "deepseek-coder"),
    "camelCase HTTPServer": ("youtu", "tiny_aya", "cohere2moe", "kimi-k2"),
    "abc123def 5678ghi": ("tiny_aya", "cohere2moe"),
    "\uff11\uff12 \u4e2d\u6587A": ("tiny_aya", "cohere2moe"),
    "1 2 3 word1": ("tiny_aya", "cohere2moe", "afmoe"),
}
"""Texts that llama.cpp cuts otherwise than the models' own ``tokenizer.json``, whose expressions it approximates."""

MARKS = (
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0967",
    "e\u0301a combining",
    "\u0e44\u0e17\u0e22 \u0e97",
)
WITHOUT_MARKS = ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tiny_aya")
WITHOUT_MARKS += ("cohere2moe", "kimi-k2")
"""Names for which llama.cpp takes marks for signs, such as accents, and the model for letters."""


def cut(name: str, text: str) -> str:
    """Return the pieces of a text, as the file of llama.cpp's has them."""
    parts = tokenizers.pre_tokenizers
    splits = [
        parts.Split(tokenizers.Regex(split), behavior="isolated")
        for split in VOCABULARIES[name].splits
    ]
    pieces = parts.Sequence(splits).pre_tokenize_str(text)
    return "|".join(byte_spelled(piece) for piece, _ in pieces)


def is_approximated(name: str, text: str) -> bool:
    return name in APPROXIMATED.get(text, ()) or (text in MARKS and name in WITHOUT_MARKS)


def test_every_name_of_llama_cpp_is_read_or_refused() -> None:
    """A name is in one of two tables, and no name is in both or of nobody."""
    assert set(RECORDED["names"]) == {*VOCABULARIES, *REFUSED}
    assert not VOCABULARIES.keys() & REFUSED.keys()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_text_is_cut_as_in_llama_cpp(name: str) -> None:
    """Each text has the pieces that llama.cpp makes, which the recorded file has."""
    for text, expected in zip(TEXTS, PIECES[name], strict=True):
        if not is_approximated(name, text):
            assert cut(name, text) == expected, text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_words_that_stay_whole_and_the_token_that_begins_a_text(name: str) -> None:
    """Both are as in llama.cpp."""
    vocabulary = VOCABULARIES[name]
    flags = {"begins": vocabulary.begins, "whole_words": vocabulary.whole_words}
    assert flags == RECORDED["flags"][name]


def test_expressions_of_transformers() -> None:
    """Names that transformers knows cut random texts as its expressions do, marks of letters too."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    draw = random.Random(0)  # noqa: S311  # no secret
    letters = "aB 1\n\r'sZ\u00e9\u0301\u4e2d\uff11\u0928\u0947.,/_\u3000\t"
    texts = ["".join(draw.choices(letters, k=12)) for _ in range(100)]
    parts = tokenizers.pre_tokenizers
    for name, expression in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        split = parts.Split(tokenizers.Regex(expression), behavior="isolated")
        for text in texts:
            pieces = [byte_spelled(piece) for piece, _ in split.pre_tokenize_str(text)]
            assert cut(name, text) == "|".join(pieces), (name, text)


def opened(file: Path) -> Tokenizer:
    return open_tokenizer(open_weights(file))


def bytes_file(file: Path, pre: str | None = "gpt-2", **keys: Any) -> Path:
    """Write a vocabulary of bytes with special tokens; keys are those after ``tokenizer.ggml.``."""
    model = json.loads(trained_tokenizer().to_str())["model"]
    plain = sorted(model["vocab"], key=model["vocab"].get)
    special = {"<|begin|>": CONTROL, "<|end|>": CONTROL, "<\uff5cx\u2581y\uff5c>": CONTROL}
    special |= {"<think>": USER_DEFINED, "  \n": USER_DEFINED, "<oov>": UNKNOWN, "<mask>": CONTROL}
    tokens = [*plain, *special]
    usual = {"bos_token_id": tokens.index("<|begin|>"), "eos_token_id": tokens.index("<|end|>")}
    usual["merges"] = [" ".join(merge) for merge in model["merges"]]
    given = {**usual, **({} if pre is None else {"pre": pre}), **keys}
    named = {f"tokenizer.ggml.{key}": value for key, value in given.items() if value is not None}
    types = [NORMAL] * len(plain) + list(special.values())
    write_vocabulary(file, tokens, types, keys=named)
    return file


def test_special_tokens_are_found_whole(tmp_path: Path) -> None:
    """Control, user-defined and unknown tokens have their own ids, in whichever alphabet they are written."""
    ours = opened(bytes_file(tmp_path / "m.gguf"))
    size = ours.vocab_size
    text = "<|end|><\uff5cx\u2581y\uff5c><think>  \n<oov><mask>"
    assert ours.encode(text) == list(range(size - 6, size))
    assert ours.decode(ours.encode(text)) == "<think>  \n"


def test_special_tokens_by_name(tmp_path: Path) -> None:
    """Each id has the name of transformers, whose templates ask for it."""
    ids = {
        "bos_token_id": 65,
        "eos_token_id": 66,
        "unknown_token_id": 67,
        "padding_token_id": 68,
        "seperator_token_id": 69,
        "cls_token_id": 70,
        "mask_token_id": 71,
    }
    ours = opened(bytes_file(tmp_path / "m.gguf", **ids))
    names = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
    expected = {
        f"{name}_token": ours.backend.id_to_token(number)
        for name, number in zip(names, ids.values(), strict=True)
    }
    assert ours.special_tokens == expected


ADDED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the key": ({"add_bos_token": True}, "gpt-2", ["<|begin|>", "a"]),
    "the name": ({}, "tekken", ["<|begin|>", "a"]),
    "the key beside the name": ({"add_bos_token": False}, "llama-bpe", ["a"]),
    "an end": ({"add_eos_token": True}, "gpt-2", ["a", "<|end|>"]),
    "both": ({"add_eos_token": True}, "llama3", ["<|begin|>", "a", "<|end|>"]),
    "neither": ({"add_sep_token": True}, "roberta-bpe", ["a"]),
}


@pytest.mark.parametrize("row", ADDED)
def test_what_is_put_around_a_text(row: str, tmp_path: Path) -> None:
    """It is as the keys say, else as is usual for the name."""
    keys, pre, expected = ADDED[row]
    ours = opened(bytes_file(tmp_path / "m.gguf", pre, **keys))
    assert [ours.backend.id_to_token(number) for number in ours.encode("a")] == expected
    assert ours.encode("a", add_special_tokens=False) == [ours.backend.token_to_id("a")]


def test_spaces_beside_special_tokens(tmp_path: Path) -> None:
    """Special tokens of Phi-3 take in what follows, and the mask of three encoders what precedes."""
    file = tmp_path / "m.gguf"
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<|user|>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        "a",
    ]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, *[BYTE] * 256, NORMAL, NORMAL]
    keys = {"tokenizer.ggml.scores": [0.0] * len(tokens), "general.name": "Phi-3 Mini"}
    write_vocabulary(file, tokens, types, kind="llama", architecture="phi3", keys=keys)
    ours = opened(file)
    assert ours.encode("<|user|> \n a") == [1, 3, len(tokens) - 2, len(tokens) - 1]
    masked = opened(bytes_file(tmp_path / "mask.gguf", "jina-v2-de"))
    ids = [masked.backend.token_to_id(token) for token in ("a", "<mask>")]
    assert masked.encode("a <mask>") == ids


def test_a_file_that_names_no_split(tmp_path: Path) -> None:
    """It is read as llama.cpp reads it: under the name "default"."""
    text = "don't 12345 a(b)"
    older = opened(bytes_file(tmp_path / "older.gguf", None))
    assert older.encode(text) == opened(bytes_file(tmp_path / "m.gguf", "default")).encode(text)


def pieces_file(file: Path, architecture: str = "llama", **keys: Any) -> Path:
    """Write a vocabulary of characters with scores, as of Llama 2."""
    plain = ["\u2581", "a", "b", "c", "ab", "\u2581a", "bc", "\u2581ab", "cc", "\u2581\u2581"]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *plain, "   ", "<|x|>"]
    types = [
        UNKNOWN,
        CONTROL,
        CONTROL,
        *[BYTE] * 256,
        *[NORMAL] * len(plain),
        USER_DEFINED,
        CONTROL,
    ]
    scores = [0.0] * 259 + [-9.0, -8.0, -8.0, -8.0, -3.0, -2.0, -1.0, -6.0, -5.0, -4.0, 0.0, 0.0]
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    named["tokenizer.ggml.scores"] = scores
    write_vocabulary(file, tokens, types, architecture=architecture, kind="llama", keys=named)
    return file


SENTENCE_PIECES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the best score first": ({}, "abc", ["<s>", "\u2581a", "bc"]),
    "bytes": ({}, "\u00e9", ["<s>", "\u2581", "<0xC3>", "<0xA9>"]),
    "no space before": ({"add_space_prefix": False}, "abc", ["<s>", "a", "bc"]),
    "a space before each part": ({}, "a<|x|>b", ["<s>", "\u2581a", "<|x|>", "\u2581", "b"]),
    "a space that is there": ({}, " a", ["<s>", "\u2581", "\u2581a"]),
    "a token of spaces": ({"add_space_prefix": False}, "a   b", ["<s>", "a", "   ", "b"]),
    "no beginning": ({"add_bos_token": False}, "a", ["\u2581a"]),
    "an end": ({"add_eos_token": True}, "a", ["<s>", "\u2581a", "</s>"]),
    "harmless keys": ({"remove_extra_whitespaces": True}, "a", ["<s>", "\u2581a"]),
}


@pytest.mark.parametrize("row", SENTENCE_PIECES)
def test_vocabularies_of_sentence_pieces(row: str, tmp_path: Path) -> None:
    """Ids are those of llama.cpp, with its defaults for the keys that the file leaves out."""
    keys, text, expected = SENTENCE_PIECES[row]
    ours = opened(pieces_file(tmp_path / "m.gguf", **keys))
    assert ours.backend.encode(text).tokens == expected
    assert ours.decode(ours.encode(text)) == text.replace("<|x|>", " ")
    assert {"bos_token": "<s>", "eos_token": "</s>"}.items() <= ours.special_tokens.items()


def test_gemma_puts_no_space_before_a_text(tmp_path: Path) -> None:
    """Early files of Gemma do not say so."""
    ours = opened(pieces_file(tmp_path / "m.gguf", "gemma"))
    assert ours.backend.encode("a b").tokens == ["<s>", "a", "\u2581", "b"]


def test_templates_by_name(tmp_path: Path) -> None:
    """Each key of a template is one."""
    file = tmp_path / "m.gguf"
    keys = {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"}
    keys |= {"tokenizer.chat_templates": ["tool_use"]}
    tokens = ["a", "b", "ab"]
    write_vocabulary(file, tokens, [NORMAL] * 3, keys={**keys, "tokenizer.ggml.merges": ["a b"]})
    assert opened(file).chat_templates == {"default": "d", "tool_use": "t"}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        name: ({"pre": name}, f"tokenizer.ggml.pre is '{name}', which is not read")
        for name in REFUSED
    },
    "a name of tomorrow": (
        {"pre": "qwen9"},
        "is 'qwen9', which is not known: did you mean 'qwen2'",
    ),
    "a key of tomorrow": (
        {"fold_case": True},
        "tokenizer.ggml.fold_case is True, and which is not",
    ),
}


@pytest.mark.parametrize("row", REFUSALS)
def test_vocabularies_that_are_refused(row: str, tmp_path: Path) -> None:
    """The error names the key and its value."""
    keys, message = REFUSALS[row]
    with pytest.raises(VocabularyError, match=message):
        opened(bytes_file(tmp_path / "m.gguf", **keys))


@pytest.mark.parametrize(
    "kind", ["bert", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "test", "new"]
)
def test_kinds_that_are_refused(kind: str, tmp_path: Path) -> None:
    """So is the kind of vocabulary; a file without one has no tokenizer."""
    file = tmp_path / "m.gguf"
    write_vocabulary(file, ["a"], [NORMAL], kind=kind)
    with pytest.raises(VocabularyError, match=rf"tokenizer\.ggml\.model is '{kind}'"):
        opened(file)
    write_vocabulary(file, ["a"], [NORMAL], kind="none")
    assert find_tokenizer(open_weights(file)) is None


@pytest.mark.parametrize("ends", [["<|im_end|>"], ["<|return|>", "<|call|>", "<|end|>"]])
def test_the_end_of_an_answer_is_one_token(ends: list[str], tmp_path: Path) -> None:
    """A file may call it an ordinary token: llama.cpp knows it by its text, and cuts it into no letters."""
    weights = open_weights(bytes_file(tmp_path / "m.gguf"))
    kinds = dict(
        zip(
            weights.metadata["tokenizer.ggml.tokens"],
            weights.metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
    )
    kinds |= dict.fromkeys(ends, NORMAL)
    tokens = list(kinds)
    metadata = {
        **weights.metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": list(kinds.values()),
    }
    tokenizer = gguf_tokenizer(metadata, weights.path)
    ids = tokenizer.encode(f"a{ends[-1]}", add_special_tokens=False).ids
    assert len(ids) == 2
    assert ids[-1] == tokens.index(ends[-1])


def test_a_damaged_vocabulary(tmp_path: Path) -> None:
    """Merges of tokens that the vocabulary has not, and ids beyond it, are errors that name the file."""
    weights = open_weights(bytes_file(tmp_path / "m.gguf"))
    damage = {
        "tokenizer.ggml.merges": ["zz zz"],
        "tokenizer.ggml.eos_token_id": 10**6,
        "tokenizer.ggml.token_type": [1],
        "tokenizer.ggml.tokens": [],
    }
    for key, value in damage.items():
        with pytest.raises(
            VocabularyError, match=r"m\.gguf: its tokenizer is damaged: .*Download it again"
        ):
            gguf_tokenizer({**weights.metadata, key: value}, weights.path)
    lost = {
        "bos_token_id": ({"tokenizer.ggml.add_bos_token": True}, "a text begins with a token"),
        "eos_token_id": ({"tokenizer.ggml.add_eos_token": True}, "a text ends with a token"),
    }
    for name, (flag, words) in lost.items():
        key = f"tokenizer.ggml.{name}"
        metadata = {**weights.metadata, **flag}
        metadata.pop(key, None)
        with pytest.raises(VocabularyError, match=rf"{words}, and {key} is missing\. Give prompts"):
            gguf_tokenizer(metadata, weights.path)


def test_every_key_that_is_read_has_a_row_here() -> None:
    """The tests of this file and of the engine's stop tokens try each key that is read."""
    files = [Path(__file__), Path(__file__).with_name("test_gguf_generation.py")]
    tried = "".join(file.read_text(encoding="utf-8") for file in files)
    read = [row.name.rpartition(".")[2] for row in GGUF_TOKENIZER if row.fate == "read"]
    ends = {f"{end}_token_id" for end in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")}
    assert [name for name in read if name not in tried and name not in ends] == []
