"""Damaged and hostile files are refused before anything is allocated, and the error lists all that is wrong."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opgraft.config import ModelConfig, OpgraftConfig
from opgraft.errors import CheckpointError, InputError
from opgraft.models import load_model, open_weights
from opgraft.models.config import check_config
from safetensors.torch import save_file

from .conftest import gguf


@pytest.fixture
def file(tmp_path) -> Path:
    """A sound file of three tensors."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 8), "b": torch.ones(8), "c": torch.ones(2, 2)}, path)
    return path


@pytest.fixture
def gguf_file(tmp_path) -> Path:
    """A sound GGUF file of two tensors."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_head_count(2)
    writer.add_tensor("output.weight", np.ones((4, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parts_of(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(name: str, **values: object) -> Callable[[dict], None]:
    def edit(header: dict) -> None:
        header[name] = {**header[name], **values}

    return edit


EDITS = [
    (entry("a", dtype="F99"), "unknown variant `F99`"),
    (entry("a", dtype=["F32"]), "invalid type: sequence"),
    (entry("a", shape=[4, 9]), "invalid shape, data type, or offset"),
    (entry("a", shape=[4, -8]), "invalid value: integer `-8`"),
    (entry("a", shape=[2**62, 2**62]), "overflow"),
    (entry("a", shape=True), "invalid type: boolean"),
    (entry("a", data_offsets=[0]), "invalid length 1"),
    (entry("a", data_offsets=[128, 0]), "invalid offset"),
    (entry("b", data_offsets=[0, 32]), "invalid offset"),
    (entry("c", data_offsets=[160, 176]), None),
    (
        entry("c", data_offsets=[1000, 1016]),
        "cut short: 176 of 1016 bytes are there, without all of 1 of 3 tensors, from 'c' on",
    ),
    (lambda header: header.pop("b"), "invalid offset for tensor"),
    (lambda header: header.pop("c"), "file not fully covered"),
    (lambda header: header.update(b=3), "invalid type: integer `3`"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_an_edited_header(file, edit, message: str | None) -> None:
    """Dtypes, shapes and places that contradict each other or the file are named, or the file is as sound as before."""
    header, data = parts_of(file)
    edit(header)
    write(file, header, data)
    if message is None:
        assert len(open_weights(file).tensors) == 3
        return
    with pytest.raises(CheckpointError, match=message):
        open_weights(file)


def test_dtypes_that_torch_lacks_are_in_one_error(file) -> None:
    """A dtype of the format that torch has no dtype for is named for each tensor."""
    write(file, {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, bytes(3))
    with pytest.raises(CheckpointError, match=r"cannot be read: tensor 'a': torch has no dtype F6"):
        open_weights(file)


def test_a_file_that_is_cut_short_is_one_problem(file) -> None:
    """However many tensors are cut, the sizes and their number are told once."""
    file.write_bytes(file.read_bytes()[:-160])
    with pytest.raises(
        CheckpointError,
        match=r"file \(the file is cut short: 16 of 176 bytes .* 3 of 3 tensors, from 'a'",
    ):
        open_weights(file)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"]
    + [
        (len(t).to_bytes(8, "little") + t)
        for t in (b'{"a":1,"a":2}', b"[" * 9999, b"\xff\xfe", b'{"a":' + b"9" * 9999)
    ],
)
def test_what_is_no_header(file, content: bytes) -> None:
    """Files without a header, or with one that is no JSON object."""
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        open_weights(file)


def test_shards_that_contradict_their_index(sharded, tmp_path) -> None:
    """Paths out of the folder, missing shards, a tensor in two of them, or in another than the index says."""
    folder = shutil.copytree(sharded, tmp_path / "checkpoint")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())

    def with_map(**values: str) -> Path:
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], **values}}))
        return folder

    for path in ("../model.safetensors", "/etc/model.safetensors", "a\\b.safetensors", ".."):
        with pytest.raises(CheckpointError, match="which is refused"):
            open_weights(with_map(x=path))
    with pytest.raises(CheckpointError, match=r"is no .safetensors file: it is refused"):
        open_weights(with_map(x="pytorch_model.bin"))
    with pytest.raises(
        CheckpointError, match=r"2 problems: one.safetensors .*missing; two.safetensors .*missing"
    ):
        open_weights(with_map(x="one.safetensors", y="two.safetensors"))
    with pytest.raises(CheckpointError, match="it is in none of the files"):
        open_weights(with_map(x=content["weight_map"]["lm_head.weight"]))
    shutil.copy(folder / content["weight_map"]["lm_head.weight"], folder / "again.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tensor '[\w.]+' is in again.safetensors and model-"
    ):
        open_weights(with_map(x="again.safetensors"))


def test_pickles_are_refused(tmp_path) -> None:
    """A folder with pickles only, and a pickle by its name."""
    torch.save({}, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="pickle"):
            open_weights(path)
    with pytest.raises(
        CheckpointError, match=r"'smollm' is no folder and no file.*did you mean 'smollm2'"
    ):
        open_weights("smollm")
    with pytest.raises(CheckpointError, match=r"or one of 'minilm', 'smollm2'$"):
        open_weights("zebra")


def test_an_empty_name_is_no_checkpoint(sharded, monkeypatch) -> None:
    """An empty name, as of a variable that is not set, does not mean the current folder; a dot does."""
    monkeypatch.chdir(sharded)
    for opening in (
        open_weights,
        lambda name: load_model(OpgraftConfig(model=ModelConfig(name=name))),
    ):
        with pytest.raises(CheckpointError, match="'' is no folder and no file"):
            opening("")
    assert open_weights(".").tensors


def test_parts_of_a_split_file(gguf_file) -> None:
    """The parts of a GGUF file that was split belong together."""
    part = gguf_file.rename(gguf_file.parent / "model-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"a part of 2: model-00002-of-00002.gguf is missing"):
        open_weights(part)


def test_a_missing_library_is_no_damage(gguf_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library gguf, the error of a sound file names the library and the way to install it."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"^gguf cannot be imported .*'opgraft\[demo\]'") as caught:
        open_weights(gguf_file)
    assert not isinstance(caught.value, CheckpointError)


def test_edited_gguf_headers(gguf_file) -> None:
    """Counts, types, places and lengths that the file does not have are refused at once."""
    content = gguf_file.read_bytes()
    name = content.index(b"output.weight") + len(b"output.weight")
    edits = {
        (0, b"GGML"): "does not begin with GGUF",
        (4, struct.pack("<I", 9)): "version 9 is not read here",
        (8, struct.pack("<Q", 2**63)): "a count of 9223372036854775808 needs more bytes",
        (16, struct.pack("<Q", 2**40)): "needs more bytes",
        (24, struct.pack("<Q", 2**64 - 1)): "within a header that needs",
        (name, struct.pack("<I", 7)): "has 7 dimensions, at most 4",
        (name + 4, struct.pack("<Q", 33)): "overlap|cut short|no multiple",
        (name + 20, struct.pack("<I", 77)): "its type 77 is not known to gguf",
        (
            name + 20,
            struct.pack("<I", 14),
        ): r"rows of 32 are no whole blocks of Q6_K \(256 values\)",
        (name + 24, struct.pack("<Q", 2**62)): "the file is cut short",
        (name + 24, struct.pack("<Q", 5)): "no multiple of 32",
    }
    for (place, new), message in edits.items():
        gguf_file.write_bytes(content[:place] + new + content[place + len(new) :])
        with pytest.raises(CheckpointError, match=message):
            open_weights(gguf_file)
    gguf_file.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="the file is cut short"):
        open_weights(gguf_file)


def test_a_name_that_is_no_architecture(gguf_file) -> None:
    """An architecture that is not known is named, with the nearest that are."""
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"llama", b"llamb"))
    with pytest.raises(
        CheckpointError, match="'llamb', which is not known here: did you mean 'llama'"
    ):
        open_weights(gguf_file)


def read_all(path: Path) -> None:
    """Open a file and read what it has; the only error is CheckpointError."""
    try:
        tensors = open_weights(path).tensors
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert tensor[...].shape == tensor.shape


MUTATIONS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6)
QUICK = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mutated(content: bytes, changes: list[tuple[int, int]], span: int) -> bytes:
    changed = bytearray(content)
    for place, value in changes:
        changed[place % span] = value
    return bytes(changed)


@QUICK
@example(changes=[(7, 255)])
@given(changes=MUTATIONS)
def test_mutated_safetensors(file, changes) -> None:
    """Whatever bytes of the header are changed, the file is refused by a CheckpointError or read whole."""
    content = (
        file.read_bytes()
        if not (file.parent / "sound").exists()
        else (file.parent / "sound").read_bytes()
    )
    (file.parent / "sound").write_bytes(content)
    file.write_bytes(mutated(content, changes, 8 + int.from_bytes(content[:8], "little")))
    read_all(file)


@QUICK
@given(changes=MUTATIONS)
def test_mutated_gguf(gguf_file, changes) -> None:
    """The same for GGUF."""
    sound = gguf_file.parent / "sound"
    content = sound.read_bytes() if sound.exists() else gguf_file.read_bytes()
    sound.write_bytes(content)
    gguf_file.write_bytes(mutated(content, changes, len(content) - 700))
    read_all(gguf_file)


def test_a_config_that_names_code_elsewhere(tmp_path) -> None:
    """Implementations of a hub are refused at any depth."""
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"_attn_implementation": "someone/kernel"}})
    )
    with pytest.raises(CheckpointError, match="may take it from a hub"):
        check_config(tmp_path / "config.json")
