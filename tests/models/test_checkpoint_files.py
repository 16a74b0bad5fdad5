"""Files of a checkpoint folder: which of them are read if a folder has those of several saves."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.errors import CheckpointError
from opgraft.models import open_weights
from opgraft.models.files import INDEX, WHOLE
from safetensors.torch import save_file

NAME = "model.norm.weight"


def write_whole(folder: Path, llama: Any) -> torch.Tensor:
    """Write the file of a later save beside what is there; return a weight that differs."""
    tensors = {name: each.clone() for name, each in llama.state_dict().items()}
    tensors[NAME] = torch.full_like(tensors[NAME], 2.0)
    save_file(tensors, folder / WHOLE, {"format": "pt"})
    return tensors[NAME]


def read(folder: Path) -> torch.Tensor:
    return torch.as_tensor(open_weights(folder).tensors[NAME][...])


@pytest.mark.parametrize("left", ["all", "index", "broken index"])
def test_a_whole_file_counts_more_than_the_index_of_an_earlier_save(
    left: str, llama: Any, sharded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers model.safetensors is read, whatever an earlier save has left, and the log says so."""
    folder = tmp_path / "saved"
    shutil.copytree(sharded, folder)
    if left != "all":
        for shard in folder.glob("model-*.safetensors"):
            shard.unlink()
    if left == "broken index":
        (folder / INDEX).write_text("{", "utf-8")
    expected = write_whole(folder, llama)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(read(folder), expected)
    assert f"{INDEX} beside it is not" in caplog.text


def test_an_index_that_names_the_whole_file(llama: Any, sharded: Path, tmp_path: Path) -> None:
    """An index that names model.safetensors among its files belongs to the same save and is read."""
    folder = tmp_path / "saved"
    shutil.copytree(sharded, folder)
    values = json.loads((folder / INDEX).read_text("utf-8"))
    first = sorted(set(values["weight_map"].values()))[0]
    (folder / first).rename(folder / WHOLE)
    names = {name: WHOLE if file == first else file for name, file in values["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}), "utf-8")
    assert torch.equal(read(folder), llama.state_dict()[NAME])
    assert set(open_weights(folder).tensors) == set(llama.state_dict())


def test_an_index_that_is_given_is_read(llama: Any, sharded: Path, tmp_path: Path) -> None:
    """Whoever gives the path of an index means its shards."""
    folder = tmp_path / "saved"
    shutil.copytree(sharded, folder)
    write_whole(folder, llama)
    assert torch.equal(read(folder / INDEX), llama.state_dict()[NAME])


def test_an_index_without_its_shards(sharded: Path, tmp_path: Path) -> None:
    """Without model.safetensors the shards that an index names have to be there."""
    folder = tmp_path / "saved"
    shutil.copytree(sharded, folder)
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"is listed in model\.safetensors\.index\.json and"):
        open_weights(folder)


def test_an_adapter_beside_the_weights(llama: Any, tmp_path: Path) -> None:
    """What an adapter would change is not left out in silence."""
    write_whole(tmp_path, llama)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds an adapter .*merge_and_unload"):
        read(tmp_path)
