"""Vocabularies of the libraries that write chats, and small models that say what a request asks for."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from opgraft.serving.harmony import MARKERS, VOCABULARY
from support.random_decoders import written

tokenizers = pytest.importorskip("tokenizers")

MARKERS_OF_MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"),
)
THOUGHT = ("[THINK]", "[/THINK]")
WORDS = ("weather", '{"city": "', "Rome", '"}', "why", "so it is")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
HARMONY_SIZE = 201_088
SPECIAL = 32
"""Places for special tokens, which come first."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def write_tekken(folder: Path, version: str = "v13", *, thinks: bool = True) -> Path:
    """Write a ``tekken.json`` of bytes, ``WORDS`` and special tokens, and return the folder."""
    texts = [*MARKERS_OF_MISTRAL, *(THOUGHT if thinks else ())]
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    rows = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode("utf-8", "replace"),
        }
        for rank, token in enumerate(tokens)
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(texts)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + SPECIAL,
        "default_num_special_tokens": SPECIAL,
        "version": version,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tekken.json"
    file.write_text(json.dumps({"config": config, "vocab": rows, "special_tokens": special}))
    return folder


def harmony_folder() -> Path:
    """Return the folder with the vocabulary of gpt-oss, which ``make test-formats`` fetches.

    The library takes this vocabulary alone: it compares the SHA-256. So there is no small one.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "opgraft" / "vocabularies"
    if not (folder / VOCABULARY).is_file():
        pytest.skip(f"{folder} has no {VOCABULARY}: make test-formats fetches it")
    return folder


def write_mistral(folder: Path) -> Path:
    """Write a model of Mistral's family whose only vocabulary is a ``tekken.json``."""
    write_tekken(folder)
    sizes = {"vocab_size": 256 + len(WORDS) + SPECIAL, "max_position_embeddings": 4096}
    written("Mistral", folder, **sizes, num_hidden_layers=1, tie_word_embeddings=False)
    return _without_opinion(folder)


@cache
def bytes_of_harmony() -> Any:
    """Return a tokenizer of the bytes and markers of gpt-oss, under their ids.

    Other ids have texts that nobody writes, as llguidance takes no vocabulary with gaps.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # The first 256 ids of the vocabulary are bytes, the visible ones first.
    visible = [letter for letter in letters if ord(letter) < 256]
    hidden = [letter for letter in letters if ord(letter) >= 256]
    vocabulary = {letter: number for number, letter in enumerate([*visible, *hidden])}
    taken = {*vocabulary.values(), *MARKERS.values()}
    gaps = {f"{hidden[0]}{token}": token for token in range(HARMONY_SIZE) if token not in taken}
    model = tokenizers.models.BPE({**vocabulary, **gaps, **MARKERS}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    return tokenizer


def write_gpt_oss(folder: Path) -> Path:
    """Write a model of gpt-oss's family. Its tokenizer has the bytes and markers, under their ids."""
    sizes = {"vocab_size": HARMONY_SIZE, "max_position_embeddings": 4096, "eos_token_id": 200_002}
    written("GptOss", folder, **sizes, num_hidden_layers=1, tie_word_embeddings=False)
    tokenizer = bytes_of_harmony()
    tokenizer.save(str(folder / "tokenizer.json"))
    return _without_opinion(folder)


def _without_opinion(folder: Path) -> Path:
    """Make every next token as likely as any other, so that the biases of a request decide."""
    safetensors = pytest.importorskip("safetensors.torch")
    file = folder / "model.safetensors"
    weights = safetensors.load_file(file)
    weights["lm_head.weight"].zero_()
    safetensors.save_file(weights, file, metadata={"format": "pt"})
    return folder


def saying(tokens: Sequence[int]) -> dict[str, Any]:
    """Return sampling by which a model without an opinion says some tokens, each different."""
    assert len(set(tokens)) == len(tokens)
    step = 3 / len(tokens)
    biases = {str(token): 6 - place * step for place, token in enumerate(tokens)}
    penalties = {"presence_penalty": 2, "frequency_penalty": 2}
    return {"logit_bias": biases, **penalties, "temperature": 0}
