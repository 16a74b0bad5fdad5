"""A decoder with random weights whose tokens are a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sleeps",
    "runs",
    "on",
    "mat",
    "in",
    "sun",
    "bread",
    "bakes",
    "well",
]
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


def word_tokenizer() -> Any:
    """A word-level tokenizer made on the spot."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "</s>", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106  # no secret
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def word_llama(folder: Path, *, chats: bool = False, **values: Any) -> Path:
    """A random Llama of two layers with that tokenizer, saved as a checkpoint folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    special = {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **{**sizes, **special, **values})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if chats:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
