"""Checkpoints that are quantized already, written here as their tools write them, number by number."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.errors import OpgraftError, QuantizationError
from support.quantized_files import TOKENS, held, logits_of, model_of, write
from support.quantized_formats import FORMATS, GROUP, INT4, compressed
from support.ranks import Ranks

ROUNDS_INPUTS = ("fp8", "integers", "floats")
ON_RANKS = (
    "awq",
    "gptq",
    "fp8",
    "fp8 static",
    "fp8 blocks",
    "packed, zeros",
    "integers",
    "integers, groups",
    "floats",
)


def logits_on_rank(folder: Path, method: str | None = None) -> list[list[float]]:
    return logits_of(folder, method).tolist()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantized_checkpoint(form: str, llama: Any, single: Path, tmp_path: Path) -> None:
    """Its config tells what it is; layers hold exactly its numbers, and the model computes with them."""
    meant = write(tmp_path / "quantized", single, llama, form)
    model = model_of(tmp_path / "quantized")
    for number, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{number}"
        for module, parts in {
            layer.self_attn.qkv_proj: [f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv"],
            layer.self_attn.o_proj: [f"{prefix}.self_attn.o_proj.weight"],
            layer.mlp.gate_up_proj: [
                f"{prefix}.mlp.gate_proj.weight",
                f"{prefix}.mlp.up_proj.weight",
            ],
            layer.mlp.down_proj: [f"{prefix}.mlp.down_proj.weight"],
        }.items():
            assert torch.equal(held(module), torch.cat([meant[part] for part in parts]))
            assert sum(p.nbytes for p in module.parameters()) < module.weight.nbytes * 1.6 + 8 * 512
    reference = copy.deepcopy(llama)
    reference.load_state_dict(
        {name: weight.float() for name, weight in meant.items()}, strict=False
    )
    with torch.inference_mode():
        expected = reference(TOKENS[None]).logits[0]
    bound = 0.1 if form.startswith(ROUNDS_INPUTS) and form != "integers, groups" else 1e-4
    assert float((logits_of(tmp_path / "quantized") - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("form", ON_RANKS)
def test_two_ranks_have_a_half_each(
    form: str, two: Ranks, llama: Any, single: Path, tmp_path: Path
) -> None:
    """Two ranks give the logits of one; where inputs are rounded row by row, each rank rounds its part."""
    write(tmp_path / "quantized", single, llama, form)
    expected = logits_of(tmp_path / "quantized")
    bound = 0.05 if form in ("fp8", "integers", "floats") else 1e-4
    for answer in two.run(logits_on_rank, tmp_path / "quantized"):
        assert float((torch.tensor(answer) - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("form", ["awq", "gptq by activation", "fp8 blocks", "packed, zeros"])
def test_through_transformers(form: str, llama: Any, single: Path, tmp_path: Path) -> None:
    """Models of transformers' own definition hold quantized checkpoints in the same layers."""
    write(tmp_path / "quantized", single, llama, form)
    expected, got = (
        logits_of(tmp_path / "quantized"),
        logits_of(tmp_path / "quantized", None, "transformers"),
    )
    torch.testing.assert_close(
        got, expected, rtol=1e-3, atol=1e-4 if form != "fp8 blocks" else 0.05
    )


def test_static_scales_of_inputs(llama: Any, single: Path, tmp_path: Path) -> None:
    """A merged layer divides its input by the largest of the scales of the layers that it stands for."""
    write(tmp_path / "quantized", single, llama, "fp8 static")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    largest = max(float(llama.state_dict()[name].abs().max()) for name in names)
    scale = model_of(tmp_path / "quantized").model.layers[0].self_attn.qkv_proj.input_scale
    assert float(scale) == pytest.approx(0.01 + largest / 100)


def cut(folder: Path) -> str:
    """Return what is wrong with a checkpoint on this rank."""
    try:
        model_of(folder)
    except OpgraftError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("gptq by activation", "has inputs in groups in the order of their activations"),
        (
            "fp8 large blocks",
            "128 \\+ 64 \\+ 64 outputs on this rank, which the checkpoint's blocks of 128 do not divide",
        ),
    ],
)
def test_what_ranks_cannot_share(
    form: str, message: str, two: Ranks, llama: Any, single: Path, tmp_path: Path
) -> None:
    """A rank's part that cuts groups or blocks is an error that names the layer."""
    write(tmp_path / "quantized", single, llama, form)
    for answer in two.run(cut, tmp_path / "quantized"):
        assert re.search(message, answer)


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("awq", {"bits": 3}, r"awq has bits 3, and 4 can be read"),
        ("awq", {"version": "gemv"}, r"awq has version 'gemv'"),
        ("awq", {"zero_point": False}, r"awq has zero_point False"),
        (
            "awq",
            {"group_size": 96},
            r"qkv_proj has 256 inputs on this rank, which the checkpoint's groups of 96 do not",
        ),
        ("awq", {"group_size": "many"}, r"awq has group_size 'many', expected a number of inputs"),
        ("gptq", {"bits": 2}, r"gptq has bits 2, and 4, 8 can be read"),
        ("gptq", {"checkpoint_format": "marlin"}, r"gptq has checkpoint_format 'marlin'"),
        ("fp8", {"activation_scheme": "other"}, r"fp8 has activation_scheme 'other'"),
        ("fp8 blocks", {"scale_fmt": "e5m3"}, r"fp8 has scale_fmt 'e5m3', and 'float', "),
        ("fp8", {"fmt": "e5m2"}, r"fp8 has fmt 'e5m2', and 'e4m3', "),
        ("fp8", {"weight_block_size": [0, 1]}, r"fp8 has blocks of \[0, 1\], expected two numbers"),
        ("fp8 static", {"weight_block_size": [64, 64]}, r"fp8 has blocks and static scales"),
        ("packed", {"format": "marlin-24"}, r"has the format 'marlin-24' with weights of type int"),
        ("packed", {"config_groups": 3}, r"has config_groups 3"),
        (
            "awq",
            {"modules_to_not_convert": 5},
            r"awq has modules_to_not_convert 5, expected a list of names",
        ),
        (
            "fp8",
            {"ignored_layers": "lm_head"},
            r"fp8 has ignored_layers 'lm_head', expected a list of names",
        ),
        (
            "packed",
            {"ignore": [3]},
            r"compressed-tensors has ignore \[3\], expected a list of names",
        ),
        (
            "packed",
            {"config_groups": {"a": {"targets": "Linear"}}},
            r"has targets 'Linear', expected a list",
        ),
        (
            "packed",
            {"config_groups": {"a": {"weights": "int4"}}},
            r"has weights 'int4', expected settings",
        ),
        (
            "packed",
            {"config_groups": {"a": {"input_activations": 8}}},
            r"has input_activations 8, expected settings",
        ),
        ("packed", {"sparsity_config": {"format": "sparse-24"}}, r"has format 'sparse-24'"),
    ],
)
def test_settings_that_cannot_be_read(
    form: str, settings: dict[str, Any], message: str, llama: Any, single: Path, tmp_path: Path
) -> None:
    """What a checkpoint says of its quantization is checked before anything is loaded."""
    write(tmp_path / "quantized", single, llama, form, **settings)
    with pytest.raises(QuantizationError, match=message):
        model_of(tmp_path / "quantized")


def test_a_quantization_that_the_checkpoint_has_not(single: Path) -> None:
    """A quantization that is read from checkpoints cannot be made of a plain one."""
    for method in ("awq", "gptq", "compressed-tensors", "gguf"):
        with pytest.raises(QuantizationError, match="a quantization that is made while loading"):
            model_of(single, method=method)


@pytest.mark.parametrize(
    ("method", "bound"), [("int8", 0.02), ("int8_dynamic", 0.03), ("int4", 1e-4), ("fp8", 0.1)]
)
def test_quantized_while_loading_on_two_ranks(
    method: str, bound: float, two: Ranks, single: Path
) -> None:
    """Each rank quantizes its part: groups round as on one rank; rows, of which a rank has a part, not quite."""
    expected = logits_of(single, method=method)
    for answer in two.run(logits_on_rank, single, method):
        assert float((torch.tensor(answer) - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize(
    "targets", [["re:.*_proj$"], ["Linear"], [r"re:.*(q|k|v|o|gate|up|down)_proj"]]
)
def test_targets(targets: list[str], llama: Any, single: Path, tmp_path: Path) -> None:
    """Layers of a group are named, or all; one that no group names is plain."""
    config = compressed("pack-quantized", INT4)
    config["config_groups"]["group_0"]["targets"] = targets
    write(tmp_path / "quantized", single, llama, "packed", config_groups=config["config_groups"])
    assert (
        model_of(tmp_path / "quantized").model.layers[0].mlp.gate_up_proj.weight.dtype
        == torch.uint8
    )


@pytest.mark.parametrize(
    ("form", "file", "settings"),
    [
        (
            "awq",
            "quant_config.json",
            {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"},
        ),
        (
            "gptq",
            "quantize_config.json",
            {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
        ),
    ],
)
def test_settings_in_a_file_of_their_own(
    form: str, file: str, settings: dict[str, Any], llama: Any, single: Path, tmp_path: Path
) -> None:
    """Older tools write the settings beside config.json."""
    folder = tmp_path / "quantized"
    write(folder, single, llama, form)
    expected = logits_of(folder)
    shutil.copy(single / "config.json", folder)
    (folder / file).write_text(json.dumps(settings), "utf-8")
    assert torch.equal(logits_of(folder), expected)
