"""Tokenizers of small vocabularies and of the real language model, beside those that transformers makes of the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from opgraft.models.config import load_tokenizer
from opgraft.models.files import Weights, open_weights
from opgraft.serving.tokenizer import Tokenizer, open_tokenizer
from support.small_tokenizers import trained_tokenizer

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

CONTROL, USER_DEFINED = 3, 4


@pytest.fixture(scope="session")
def trained():
    """A byte-level vocabulary of 400 tokens."""
    return trained_tokenizer()


@pytest.fixture(scope="session")
def write_gguf(trained, tmp_path_factory):
    """A function that writes a GGUF file with that vocabulary, control and user-defined tokens, and no weights."""
    import json

    model = json.loads(trained.to_str())["model"]

    def write(
        pre: str, architecture: str = "llama", *, bos: bool = False, template: str | None = None
    ) -> Path:
        path = tmp_path_factory.mktemp("gguf") / f"{pre}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count):
            add(64)
        writer.add_feed_forward_length(64)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        tokens = [
            *sorted(model["vocab"], key=model["vocab"].get),
            "<|endoftext|>",
            "<|im_start|>",
            "<think>",
            "<|▁x|>",
        ]
        kinds = [1] * (len(tokens) - 4) + [CONTROL, CONTROL, USER_DEFINED, CONTROL]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(tokens.index("<|im_start|>"))
        writer.add_eos_token_id(tokens.index("<|endoftext|>"))
        writer.add_add_bos_token(bos)
        if template:
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def smollm2_weights() -> Weights:
    pytest.importorskip("transformers")
    return open_weights("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_weights) -> Tokenizer:
    return open_tokenizer(smollm2_weights)


@pytest.fixture(scope="session")
def smollm2_of_transformers(smollm2_weights):
    """Digits are pieces of their own, as the model's own ``tokenizer.json`` has it; transformers forgets that."""
    with pytest.MonkeyPatch.context() as patched:
        # The library gguf reads each of 98,000 strings by slices of a memmap, which cost twice those of an array.
        patched.setattr(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        loaded = load_tokenizer(smollm2_weights)
    parts = tokenizers.pre_tokenizers
    loaded.backend_tokenizer.pre_tokenizer = parts.Sequence(
        [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
    )
    return loaded
