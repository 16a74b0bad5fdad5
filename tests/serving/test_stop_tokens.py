"""The tokens at which an answer ends, as a checkpoint tells of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opgraft.errors import CheckpointError
from opgraft.models.files import Weights
from opgraft.serving.stop_tokens import stop_tokens


def stops(path: Path, **metadata: Any) -> frozenset[int]:
    tokenizer, config = SimpleNamespace(eos_token_id=1), SimpleNamespace(eos_token_id=[1, 2])
    return stop_tokens(tokenizer, config, Weights(path, {}, metadata), 200)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"eos_token_id": [1, 107]}, {1, 2, 107}),
        ({"eos_token_id": 5}, {1, 2, 5}),
        ({"top_k": 3}, {1, 2}),
    ],
)
def test_ends_of_turns(content: dict[str, Any], expected: set[int], tmp_path: Path) -> None:
    """``generation_config.json`` has more of them than the model's config, as in Gemma: all count."""
    assert stops(tmp_path) == {1, 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(content), "utf-8")
    assert stops(tmp_path) == expected
    file = tmp_path / "model.safetensors"
    file.touch()
    assert stops(file) == expected


@pytest.mark.parametrize("value", ["</s>", [1, None, "x"], 1.5, True])
def test_ends_that_are_no_tokens(value: object, tmp_path: Path) -> None:
    """Other than ids are refused with the file's name."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}), "utf-8")
    with pytest.raises(
        CheckpointError, match=r"generation_config.json: eos_token_id is .*expected a token id"
    ):
        stops(tmp_path)


@pytest.mark.parametrize("value", [200, [1, -1], 10**30])
def test_ends_beyond_the_vocabulary(value: object, tmp_path: Path) -> None:
    """No answer would ever have them."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}), "utf-8")
    with pytest.raises(
        CheckpointError, match=r"is no token of the model, whose vocabulary has 200: take the files"
    ):
        stops(tmp_path)


def test_ends_of_turns_in_gguf(tmp_path: Path) -> None:
    """A GGUF file has a key for them beside the end of the text."""
    metadata = {"general.architecture": "llama", "tokenizer.ggml.eot_token_id": 32007}
    assert stops(tmp_path / "model.gguf", **metadata) == {1, 2, 32007}


ENDS = {
    "a chat model without a key": (["a", "<|im_end|>", "<|endoftext|>"], {}, {1, 2}),
    "a key and a text": (["a", "<end_of_turn>"], {"eot_token_id": 0}, {0, 1}),
    "a model of code": (["<fim_pad>", "<|fim_pad|>", "<|file_sep|>"], {}, {1, 2}),
    "a model of code with a key": (["<fim_pad>", "<|fim_pad|>"], {"fim_pad_token_id": 0}, {0}),
    "messages that go on": (["<|end|>", "<|return|>", "<|call|>"], {}, {1, 2}),
    "messages that go on by key": (
        ["<|end|>", "<|flush|>", "<|calls|>"],
        {"eot_token_id": 0},
        {1, 2},
    ),
    "an answer of a tool": (["</s>", "<|tool_response>"], {}, {1}),
    "a turn that ends": (["<|end|>", "<|return|>"], {}, {0, 1}),
    "no such token": (["a", "b"], {}, set()),
}


@pytest.mark.parametrize("case", ENDS)
def test_ends_by_text_in_gguf(case: str, tmp_path: Path) -> None:
    """As llama.cpp does, tokens are known by their text where the file has no key."""
    tokens, keys, expected = ENDS[case]
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    metadata |= {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens}
    tokenizer = config = SimpleNamespace(eos_token_id=None)
    weights = Weights(tmp_path / "model.gguf", {}, metadata)
    assert stop_tokens(tokenizer, config, weights, 200) == expected
