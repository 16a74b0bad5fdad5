"""Weights that the model reads in the mapped file of the checkpoint, without a copy."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
from opgraft import ops
from opgraft.machine import memory
from opgraft.models import load_weights
from opgraft.models.mapped import addresses_of, leave_files
from opgraft.models.safetensors_file import open_safetensors
from safetensors.torch import save_file
from torch import nn

_DTYPE = torch.float16
"""oneDNN packs no weight of this dtype."""


class Shifted(nn.Linear):
    """A linear with a loader of its own, which changes the numbers."""

    def __init__(self) -> None:
        super().__init__(64, 1024, bias=False, dtype=_DTYPE)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter, loaded) -> None:
        parameter.data.copy_(loaded)
        parameter.data.add_(1)


class Model(nn.Module):
    """Layers of which the file has the parts in the order a, b, c."""

    packed_modules_mapping = {"near": {"a": 0, "b": 1}, "apart": {"d": 0, "f": 1}}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        sizes = {"params_dtype": _DTYPE, "bias": False}
        self.near = ops.MergedColumnParallelLinear(64, [512, 1024], **sizes)
        self.apart = ops.MergedColumnParallelLinear(64, [512, 512], **sizes)
        self.row = ops.RowParallelLinear(512, 128, **sizes)
        self.embed = ops.VocabParallelEmbedding(1024, 64, params_dtype=_DTYPE)
        self.wide = nn.Linear(64, 1024, bias=False)
        self.shifted = Shifted()
        self.norm = nn.LayerNorm(64, bias=False, dtype=_DTYPE)


_SHAPES = {
    "a": (512, 64),
    "b": (1024, 64),
    "d": (512, 64),
    "e.row": (128, 512),
    "f": (512, 64),
    "embed": (1024, 64),
    "wide": (1024, 64),
    "shifted": (1024, 64),
    "norm": (64,),
}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name.removeprefix('e.')}.weight": torch.rand(shape, generator=generator).to(_DTYPE)
        for name, shape in _SHAPES.items()
    }


def loaded(path: Path, tensors: dict[str, torch.Tensor]) -> Model:
    # The library writes tensors of one dtype in the order of their names.
    save_file(tensors, path)
    model = Model()
    load_weights(model, open_safetensors(path))
    return model


def in_files(model: nn.Module) -> set[str]:
    """Return the parameters that lie in a mapped file."""
    files = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".safetensors")
    ]
    return {
        name
        for name, parameter in model.named_parameters()
        if any(parameter.data_ptr() in file for file in files)
    }


needs_linux = pytest.mark.skipif(
    not Path("/proc/self/maps").is_file(), reason="the system does not tell what is mapped"
)


@needs_linux
def test_whole_weights_stay_in_the_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Also parts of a merged layer that follow one another there; what is converted or changed is copied."""
    model = loaded(tmp_path / "model.safetensors", tensors)
    assert in_files(model) == {"near.weight", "row.weight", "embed.weight"}
    expected = {
        "near": torch.cat([tensors["a.weight"], tensors["b.weight"]]),
        "apart": torch.cat([tensors["d.weight"], tensors["f.weight"]]),
        "shifted": tensors["shifted.weight"] + 1,
        **{name: tensors[f"{name}.weight"] for name in ("row", "embed", "norm")},
        "wide": tensors["wide.weight"].float(),
    }
    assert {name.removesuffix(".weight") for name, _ in model.named_parameters()} == set(expected)
    for name, numbers in expected.items():
        assert torch.equal(model.get_parameter(f"{name}.weight"), numbers), name


@needs_linux
def test_writes_do_not_reach_the_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Each model has numbers of its own."""
    path = tmp_path / "model.safetensors"
    model = loaded(path, tensors)
    before = path.read_bytes()
    with torch.no_grad():
        model.row.weight.zero_()
    assert path.read_bytes() == before
    assert not model.row.weight.any()
    assert torch.equal(model.embed.weight, tensors["embed.weight"])


class Rewrapped(nn.Module):
    """A layer whose hook changes the numbers in place, and puts them into another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(512, 512, dtype=_DTYPE), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        self.weight.data.add_(1)
        self.weight = nn.Parameter(self.weight.data.t(), requires_grad=False)


def test_numbers_that_a_hook_takes_over_stay(tmp_path: Path) -> None:
    """Pages are given back with the last tensor over them, not with the first parameter."""
    weight = torch.rand(512, 512).to(_DTYPE)
    save_file({"0.weight": weight}, tmp_path / "model.safetensors")
    model = nn.Sequential(Rewrapped())
    load_weights(model, open_safetensors(tmp_path / "model.safetensors"))
    assert torch.equal(model[0].weight, (weight + 1).t())


class Halved(nn.Module):
    """A layer whose hook makes a smaller weight, as packing does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4096, 512, dtype=_DTYPE), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight[::2].clone(), requires_grad=False)


@needs_linux
def test_pages_of_replaced_weights_are_given_back(tmp_path: Path) -> None:
    """Before the next weights are read."""
    path = tmp_path / "model.safetensors"
    save_file({f"{number}.weight": torch.rand(4096, 512).to(_DTYPE) for number in range(4)}, path)
    model = nn.Sequential(*(Halved() for _ in range(4)))
    weights = open_safetensors(path)
    load_weights(model, weights)
    resident = re.findall(
        rf"{path}\nSize:.*?\nRss: *(\d+)", Path("/proc/self/smaps").read_text(), re.DOTALL
    )
    assert resident
    assert sum(map(int, resident)) < 2048
    assert not in_files(model)


@pytest.mark.skipif(not memory._has_huge_pages(), reason="the system has no huge pages on demand")
def test_weights_leave_their_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Their addresses and numbers stay, and the file is needed no more."""
    path = tmp_path / "model.safetensors"
    model = loaded(path, tensors)
    begin = model.row.weight.data_ptr()
    with torch.no_grad():
        model.embed.weight[3] = 7
    thread = leave_files(model, wait=0)
    assert thread is not None
    thread.join()
    assert memory.bytes_in_files(addresses_of(model)) == 0
    # A process that still reads the file would be killed by its next read.
    with path.open("r+b") as file:
        file.truncate(0)
    assert model.row.weight.data_ptr() == begin
    assert torch.equal(model.row.weight, tensors["row.weight"])
    assert torch.equal(model.near.weight[:512], tensors["a.weight"])
    tensors["embed.weight"][3] = 7
    assert torch.equal(model.embed.weight, tensors["embed.weight"])
    assert leave_files(model, wait=0) is None


@pytest.mark.skipif(not memory._has_huge_pages(), reason="the system has no huge pages on demand")
def test_a_model_that_is_gone_stays_gone(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Its memory may belong to others when the thread begins."""
    path = tmp_path / "model.safetensors"
    model = loaded(path, tensors)
    thread = leave_files(model, wait=3)
    assert thread is not None
    del model
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    thread.join()
