"""A tokenizer of a small vocabulary, trained on the fly."""

from __future__ import annotations

from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the cat sat on the mat; 12 cats, 123 mats, don't they're we've été naïve 漢字 漢 😀 \n\n  the  that then"


def trained_tokenizer() -> Any:
    """Train a byte-level vocabulary of 400 tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    return tokenizer
