"""Checkpoints that are quantized already, written here as their tools write them, number by number."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig, QuantizationSettings
from opgraft.errors import OpgraftError, QuantizationError
from opgraft.models import load_model
from opgraft.ops.quantized_linear.storage import dequantize
from ranks import Ranks
from safetensors.torch import save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
GROUP = 64
TOKENS = torch.tensor([1, 5, 9, 33, 2, 71, 8])
Written = tuple[dict[str, Tensor], Tensor]
"""What a checkpoint has for a layer, by the ends of the names, and the weight that it stands for, in float64."""


def words(numbers: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last dimension into int32, the first of ``order`` into the lowest bits."""
    count = 32 // bits
    grouped = numbers.long().reshape(*numbers.shape[:-1], -1, count)
    word = sum(grouped[..., which] << bits * place for place, which in enumerate(order or range(count)))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).contiguous()


def rounded(weight: Tensor, bits: int, size: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, zeros and scales of groups, and what they stand for."""
    groups, top = weight.double().reshape(weight.shape[0], -1, size), 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(-1) * 2 / top).half().double()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((groups.amax(-1) - groups.amin(-1)) / top).half().double()
        zeros = (-groups.amin(-1) / scales).round().clamp(1, top)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, top)
    plain = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1), zeros, scales, plain.flatten(1)


def awq(weight: Tensor) -> Written:
    codes, zeros, scales, plain = rounded(weight, 4, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order), "scales": scales.T.half()}
    return tensors, plain


def gptq(weight: Tensor, bits: int = 4, first: int = 1, symmetric: bool = False, shuffled: bool = False) -> Written:
    inputs = weight.shape[1]
    generator = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=generator) if shuffled else torch.arange(inputs)
    codes, zeros, scales, sorted_plain = rounded(weight[:, order], bits, GROUP, symmetric)
    groups, numbers, plain = torch.empty(inputs, dtype=torch.int32), torch.empty_like(codes), torch.empty_like(codes)
    for place, which in enumerate(order.tolist()):
        groups[which] = place // GROUP
        numbers[:, which], plain[:, which] = codes[:, place], sorted_plain[:, place]
    tensors = {"qweight": words(numbers, bits).T, "qzeros": words(zeros.T - first, bits)}
    return {**tensors, "scales": scales.T.half(), "g_idx": groups}, plain


def packed(weight: Tensor, bits: int = 4, symmetric: bool = True, size: int = GROUP) -> Written:
    codes, zeros, scales, plain = rounded(weight, bits, size, symmetric)
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales.half()}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    return tensors if symmetric else {**tensors, "weight_zero_point": words(zeros.T, bits).T}, plain


def integers(weight: Tensor, size: int | None) -> Written:
    groups = weight.double().reshape(weight.shape[0], -1, size or weight.shape[1])
    scales = (groups.abs().amax(-1) / 127).bfloat16()
    codes = (groups / scales[..., None].double()).round().clamp(-127, 127)
    plain = codes * scales[..., None].double()
    return {"weight": codes.flatten(1).to(torch.int8), "weight_scale": scales}, plain.flatten(1)


def fp8(weight: Tensor, block: tuple[int, int] | None, static: bool = False, name: str = "weight_scale") -> Written:
    height, width = block or weight.shape
    height, width = min(height, weight.shape[0]), width if width > 0 else weight.shape[1]
    blocks = weight.double().reshape(weight.shape[0] // height, height, weight.shape[1] // width, width)
    scales = (blocks.abs().amax((1, 3)) / 448).float()
    codes = (blocks / scales[:, None, :, None].double()).to(FP8)
    plain = (codes.double() * scales[:, None, :, None].double()).reshape(weight.shape)
    tensors = {"weight": codes.reshape(weight.shape), name: scales if block else scales.reshape(())}
    if static:
        tensors["input_scale"] = torch.tensor(0.01 + weight.abs().max().item() / 100)
    return tensors, plain


def compressed(layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    settings = {"format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **settings}


TOKEN8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
TOKEN_FP8 = {**TOKEN8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}

FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": (GPTQ, gptq),
    "gptq symmetric": (GPTQ, lambda weight: gptq(weight, symmetric=True)),
    "gptq v2, 8 bits": ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, 8, 0)),
    "gptq by activation": ({**GPTQ, "desc_act": True}, lambda weight: gptq(weight, shuffled=True)),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda weight: fp8(weight, None)),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda weight: fp8(weight, None, True)),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
        lambda weight: fp8(weight, (64, 64), name="weight_scale_inv"),
    ),
    "fp8 large blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda weight: fp8(weight, (128, 128), name="weight_scale_inv"),
    ),
    "packed": (compressed("pack-quantized", INT4), packed),
    "packed, zeros": (
        compressed("pack-quantized", {**INT4, "symmetric": False}),
        lambda weight: packed(weight, symmetric=False),
    ),
    "packed, 8 bits": (
        compressed("pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}),
        lambda weight: packed(weight, 8, size=weight.shape[1]),
    ),
    "integers": (
        compressed("int-quantized", {**INT4, "num_bits": 8, "strategy": "channel"}, TOKEN8),
        lambda weight: integers(weight, None),
    ),
    "integers, groups": (compressed("int-quantized", {**INT4, "num_bits": 8}), lambda weight: integers(weight, GROUP)),
    "floats": (
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}, TOKEN_FP8),
        lambda weight: fp8(weight, (1, -1)),
    ),
    "floats, static": (
        compressed(
            "float-quantized", {**FLOAT8, "strategy": "tensor"}, {**FLOAT8, "strategy": "tensor", "dynamic": False}
        ),
        lambda weight: fp8(weight, None, True),
    ),
    "floats, blocks": (
        compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [64, 64]}, TOKEN_FP8),
        lambda weight: fp8(weight, (64, 64)),
    ),
}
ROUNDS_INPUTS = ("fp8", "integers", "floats")
ON_RANKS = ("awq", "gptq", "fp8", "fp8 static", "fp8 blocks", "packed, zeros", "integers", "integers, groups", "floats")


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(folder: Path, plain: Path, llama: Any, form: str, **settings: Any) -> dict[str, Tensor]:
    """Write a checkpoint of a form; return its weights in float64."""
    shutil.copytree(plain, folder)
    config, quantize = FORMATS[form]
    tensors, meant = {}, {}
    for name, weight in llama.state_dict().items():
        if not is_quantized(name):
            tensors[name] = weight.clone()
            continue
        parts, meant[name] = quantize(weight)
        tensors |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values["quantization_config"] = {**config, **settings}
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return meant


def model_of(folder: Path, method: str | None = None, implementation: str = "auto") -> Any:
    config = OpgraftConfig(
        model=ModelConfig(name=str(folder), dtype="float32", implementation=implementation),
        load=LoadConfig(device="cpu", progress=False),
        quantization=QuantizationSettings(method=method),
    )
    return load_model(config)


def logits_of(folder: Path, method: str | None = None, implementation: str = "auto") -> Tensor:
    model = model_of(folder, method, implementation)
    with torch.inference_mode():
        logits: Tensor = model.compute_logits(model(TOKENS, torch.arange(len(TOKENS))))
    return logits


def logits_on_rank(folder: Path, method: str | None = None) -> list[list[float]]:
    return logits_of(folder, method).tolist()


def held(layer: Any) -> Tensor:
    """Return the weight that a layer holds, in float64, inputs in their own order."""
    if layer.weight.dtype != FP8:
        plain = dequantize(layer.weight, layer.scales, layer.offsets, layer.input_size, torch.float64)
        order = getattr(layer, "input_order", None)
        return plain if order is None else plain[:, order.argsort()]
    rows, columns = layer.weight_scale.shape
    down, across = layer.weight.shape[0] // rows, layer.weight.shape[1] // columns
    scales = layer.weight_scale.double().repeat_interleave(down, 0).repeat_interleave(across, 1)
    return layer.weight.double() * scales


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
            layer.mlp.gate_up_proj: [f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"],
            layer.mlp.down_proj: [f"{prefix}.mlp.down_proj.weight"],
        }.items():
            assert torch.equal(held(module), torch.cat([meant[part] for part in parts]))
            assert sum(p.nbytes for p in module.parameters()) < module.weight.nbytes * 1.6 + 8 * 512
    reference = copy.deepcopy(llama)
    reference.load_state_dict({name: weight.float() for name, weight in meant.items()}, strict=False)
    with torch.inference_mode():
        expected = reference(TOKENS[None]).logits[0]
    bound = 0.1 if form.startswith(ROUNDS_INPUTS) and form != "integers, groups" else 1e-4
    assert float((logits_of(tmp_path / "quantized") - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("form", ON_RANKS)
def test_two_ranks_have_a_half_each(form: str, two: Ranks, llama: Any, single: Path, tmp_path: Path) -> None:
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
    expected, got = logits_of(tmp_path / "quantized"), logits_of(tmp_path / "quantized", None, "transformers")
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 if form != "fp8 blocks" else 0.05)


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
def test_what_ranks_cannot_share(form: str, message: str, two: Ranks, llama: Any, single: Path, tmp_path: Path) -> None:
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
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, r"gptq has dynamic"),
        ("fp8", {"activation_scheme": "other"}, r"fp8 has activation_scheme 'other'"),
        ("fp8", {"weight_block_size": [0, 1]}, r"fp8 has blocks of \[0, 1\], expected two numbers"),
        ("fp8 static", {"weight_block_size": [64, 64]}, r"fp8 has blocks and static scales"),
        ("packed", {"format": "marlin-24"}, r"has the format 'marlin-24' with weights of type int"),
        ("packed", {"config_groups": 3}, r"has config_groups 3"),
        ("awq", {"modules_to_not_convert": 5}, r"awq has modules_to_not_convert 5, expected a list of names"),
        ("fp8", {"ignored_layers": "lm_head"}, r"fp8 has ignored_layers 'lm_head', expected a list of names"),
        ("packed", {"ignore": [3]}, r"compressed-tensors has ignore \[3\], expected a list of names"),
        ("packed", {"config_groups": {"a": {"targets": "Linear"}}}, r"has targets 'Linear', expected a list"),
        ("packed", {"config_groups": {"a": {"weights": "int4"}}}, r"has weights 'int4', expected settings"),
        ("packed", {"config_groups": {"a": {"input_activations": 8}}}, r"has input_activations 8, expected settings"),
        ("packed", {"sparsity_config": {"format": "sparse-24"}}, r"has format 'sparse-24'"),
        ("packed", {"ignore": ["*.q_proj"]}, r"q_proj match a pattern and .* none, but they are one layer"),
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


@pytest.mark.parametrize(("method", "bound"), [("int8", 0.02), ("int8_dynamic", 0.03), ("int4", 1e-4), ("fp8", 0.1)])
def test_quantized_while_loading_on_two_ranks(method: str, bound: float, two: Ranks, single: Path) -> None:
    """Each rank quantizes its part: groups round as on one rank; rows, of which a rank has a part, not quite."""
    expected = logits_of(single, method=method)
    for answer in two.run(logits_on_rank, single, method):
        assert float((torch.tensor(answer) - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("targets", [["re:.*_proj$"], ["Linear"], [r"re:.*(q|k|v|o|gate|up|down)_proj"]])
def test_targets(targets: list[str], llama: Any, single: Path, tmp_path: Path) -> None:
    """Layers of a group are named, or all; one that no group names is plain."""
    config = compressed("pack-quantized", INT4)
    config["config_groups"]["group_0"]["targets"] = targets
    write(tmp_path / "quantized", single, llama, "packed", config_groups=config["config_groups"])
    assert model_of(tmp_path / "quantized").model.layers[0].mlp.gate_up_proj.weight.dtype == torch.uint8


@pytest.mark.parametrize(
    ("form", "file", "settings"),
    [
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"}),
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
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
