"""A small decoder with a tokenizer of its own, and ``LLM`` over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opgraft.serving.llm import LLM
from support.random_decoders import written

VOCABULARY = 400
CONTEXT = 64


def write_model(folder: Path, tokenizer: Any = None, **values: Any) -> Path:
    """Write a Llama of one layer with random weights and, if given, a tokenizer of the library tokenizers."""
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
    written("Llama", folder, **{**sizes, **values})
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def open_llm(folder: Path, **settings: Any) -> LLM:
    given = {
        "cache.num_blocks": 100,
        "cache.block_size": 4,
        "load.progress": False,
        "max_num_seqs": 4,
        **settings,
    }
    return LLM(str(folder), dtype="float32", **given)
