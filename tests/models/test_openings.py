"""A checkpoint is opened once while a model is loaded, by whoever asks for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opgraft.cli import run
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig
from opgraft.errors import CheckpointError
from opgraft.models import Weights, files, load_model, open_weights
from opgraft.models.files import opened_once
from opgraft.serving import input_processor

from .conftest import write_gguf


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened, by its name."""
    counted: Counter[str] = Counter()

    def counting(opener: Any) -> Any:
        def counted_opener(path: Path) -> Any:
            counted[path.name] += 1
            return opener(path)

        return counted_opener

    for name in ("open_gguf", "open_safetensors"):
        monkeypatch.setattr(files, name, counting(getattr(files, name)))
    return counted


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize("kind", ["gguf", "sharded"])
def test_loading_opens_each_file_once(
    kind: str, implementation: str, llama, sharded, tmp_path, openings
) -> None:
    """The loader, the model's config and its quantization read one checkpoint; the next loading opens it again."""
    name = sharded
    if kind == "gguf":
        name = tmp_path / "model.gguf"
        write_gguf(name, llama, "Q8_0")
    config = OpgraftConfig(
        model=ModelConfig(name=str(name), implementation=implementation),
        load=LoadConfig(progress=False),
    )
    load_model(config)
    assert openings
    assert set(openings.values()) == {1}
    load_model(config)
    assert set(openings.values()) == {2}


def test_an_answer_opens_the_file_once(llama, tmp_path, monkeypatch, openings) -> None:
    """The tokenizer is looked for in the checkpoint that was loaded."""
    file = tmp_path / "model.gguf"
    write_gguf(file, llama, "Q8_0")
    seen = []

    def find_tokenizer(weights: Weights) -> None:
        seen.append(weights.path)
        raise CheckpointError("seen")

    monkeypatch.setattr(input_processor, "find_tokenizer", find_tokenizer)
    CliRunner().invoke(run.command, [str(file), "hi"])
    assert seen == [file]
    assert openings == {file.name: 1}


def test_blocks_and_failures(single, tmp_path, openings) -> None:
    """An inner block shares with the outer one; other checkpoints are opened; what failed is tried again."""
    with opened_once():
        first = open_weights(single)
        with opened_once():
            assert open_weights(str(single)) is first
        assert open_weights(single) is first
        assert open_weights(single / "model.safetensors") is not first
        for _ in range(2):
            with pytest.raises(CheckpointError, match="is no folder and no file"):
                open_weights(tmp_path / "later.gguf")
    assert open_weights(single) is not first
    assert openings == {"model.safetensors": 3}
