"""Experts in the quantizations of linear layers, and in that of gpt-oss."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import (
    LoadConfig,
    ModelConfig,
    OpgraftConfig,
    ParallelConfig,
    QuantizationSettings,
)
from opgraft.distributed import get_ep_group
from opgraft.errors import QuantizationError
from opgraft.models import load_model
from opgraft.ops import FusedMoE, QuantizedFusedMoEMethod
from opgraft.ops.moe.quantized.storage import dequantize_expert
from safetensors.torch import load_file, save_file
from support.quantized_formats import FORMATS, Written
from support.random_decoders import DEEPSEEK_EXPERTS, LATENT, saved
from support.ranks import Ranks
from torch import Tensor

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([1, 5, 9, 33, 2, 71, 8])
SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
QWEN = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
V3 = {
    **LATENT,
    **DEEPSEEK_EXPERTS,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Mixtral": lambda: transformers.MixtralConfig(**{**SIZES, **EXPERTS}),
    "Qwen3Moe": lambda: transformers.Qwen3MoeConfig(**{**SIZES, **QWEN, "head_dim": 32}),
    "DeepseekV3": lambda: transformers.DeepseekV3Config(
        **{**SIZES, **V3, "moe_intermediate_size": 128, "n_shared_experts": 1}
    ),
}
CASES = [("Mixtral", form) for form in FORMATS if form != "gptq by activation"]
CASES += [("Qwen3Moe", "awq"), ("Qwen3Moe", "floats, blocks"), ("DeepseekV3", "fp8 blocks")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: a checkpoint in plain numbers."""
    folder = tmp_path_factory.mktemp("plain")
    for name, config in CONFIGS.items():
        saved(getattr(transformers, f"{name}ForCausalLM")(config()), folder / name)
    return {name: folder / name for name in CONFIGS}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def is_of_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


def write(
    folder: Path, source: Path, form: str, plain: str = "nothing"
) -> tuple[dict[str, Tensor], Any]:
    """Write a checkpoint whose experts have a form; return what they mean, and the model of that.

    Weights whose names the regular expression ``plain`` finds are not quantized.
    """
    shutil.copytree(source, folder)
    config, quantize = FORMATS[form]
    tensors, meant = {}, {}
    found = load_file(source / "model.safetensors")
    for name, weight in found.items():
        if not is_of_expert(name) or re.search(plain, name):
            tensors[name] = weight
            continue
        parts, meant[name] = quantize(weight)
        tensors |= {
            name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()
        }
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text("utf-8"))
    plain_layers = [
        "lm_head",
        "re:.*self_attn",
        "re:.*shared_experts",
        "re:.*layers\\.[0-9]+\\.mlp\\.[a-z_]+_proj",
    ]
    names = {"compressed-tensors": "ignore"}.get(config["quant_method"], "modules_to_not_convert")
    values["quantization_config"] = {**config, names: plain_layers}
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    dense = folder.with_name("dense")
    shutil.copytree(source, dense)
    save_file(
        {**found, **{k: v.float() for k, v in meant.items()}},
        dense / "model.safetensors",
        {"format": "pt"},
    )
    return meant, transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)


def loaded(folder: object, expert: int = 1, **quantization: Any) -> Any:
    return load_model(
        OpgraftConfig(
            model=ModelConfig(name=str(folder), dtype="float32"),
            load=LoadConfig(device="cpu", progress=False),
            parallel=ParallelConfig(expert=expert),
            quantization=QuantizationSettings(**quantization),
        )
    )


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model.compute_logits(model(TOKENS, torch.arange(len(TOKENS))))
    return logits


def expected_of(reference: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(TOKENS[None]).logits[0]
    return logits


def experts_of(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, FusedMoE)]


def held(layer: Any, name: str, expert: int, inputs: int) -> Tensor:
    codes, scales, offsets = (
        getattr(layer, f"{name}_{part}") for part in ("weight", "scales", "offsets")
    )
    of_one = (codes[expert], scales[expert], None if offsets is None else offsets[expert])
    return dequantize_expert(*of_one, inputs, torch.float64)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_a_quantized_checkpoint(
    family: str, form: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    """Experts hold exactly the checkpoint's numbers, and logits are those of transformers with these in plain."""
    meant, reference = write(tmp_path / "quantized", plain[family], form)
    model = loaded(tmp_path / "quantized")
    (layer, *_) = experts_of(model)
    assert isinstance(layer.quant_method, QuantizedFusedMoEMethod)
    assert layer.w13_weight.element_size() == 1
    assert not [name for name in layer._modules if name.isdigit()]
    number = "1" if family == "DeepseekV3" else "0"
    names = sorted(name for name in meant if f".layers.{number}." in name and ".experts.1." in name)
    down, gate, up = names if family != "Mixtral" else (names[1], names[0], names[2])
    assert torch.equal(held(layer, "w13", 1, 128), torch.cat([meant[gate], meant[up]]))
    assert torch.equal(held(layer, "w2", 1, 128), meant[down])
    torch.testing.assert_close(logits_of(model), expected_of(reference), rtol=1e-5, atol=1e-5)


BOUNDS = {"int8": 0.02, "int8_dynamic": 0.03, "int4": 0.2, "fp8": 0.1}
"""The most that logits differ from those of the plain model, as a part of their norm."""


@pytest.mark.parametrize("method", BOUNDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_quantized_while_loading(method: str, family: str, plain: dict[str, Path]) -> None:
    """One setting quantizes the experts of a plain checkpoint: less memory, nearly the same logits."""
    model, expected = (
        loaded(plain[family], by_prefix={"*.experts": method}),
        logits_of(loaded(plain[family])),
    )
    for layer in experts_of(model):
        numbers = 3 * 4 * 128 * 128
        assert layer.w13_weight.nbytes + layer.w2_weight.nbytes == numbers // (
            2 if method == "int4" else 1
        )
    assert float((logits_of(model) - expected).norm() / expected.norm()) < BOUNDS[method]


def test_experts_that_are_skipped(plain: dict[str, Path]) -> None:
    """Patterns name layers of experts as they do linear layers."""
    model = loaded(plain["Mixtral"], method="int8", skip=["model.layers.0.mlp.experts"])
    first, second = experts_of(model)
    assert first.w13_weight.dtype == torch.float32
    assert second.w13_weight.dtype == torch.int8


def test_experts_that_were_not_loaded() -> None:
    """The error names the layer, and experts whose weights are not all there."""
    from opgraft.quantization import Int8Config

    layer = FusedMoE(4, 2, 8, 4, quant_config=Int8Config(), prefix="mlp.experts")
    for expert, part, shape in ((0, "w1", (4, 8)), (0, "w3", (4, 8)), (1, "w1", (4, 8))):
        layer.w13_weight.weight_loader(layer.w13_weight, torch.zeros(shape), (expert, part))
    with pytest.raises(
        QuantizationError, match=r"FusedMoE 'mlp.experts': weights of the experts 1, 2, 3, which"
    ):
        layer.process_weights_after_loading()


def test_inputs_by_activation(plain: dict[str, Path], tmp_path: Path) -> None:
    """An order of inputs for each expert is refused, with the layer's name."""
    write(tmp_path / "quantized", plain["Mixtral"], "gptq by activation")
    with pytest.raises(
        QuantizationError, match=r"experts.0.gate_up_proj: its inputs are in groups by activation"
    ):
        loaded(tmp_path / "quantized")


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("skipped", ["0", "2", "2.down"])
def test_a_checkpoint_with_some_plain_experts(
    family: str, skipped: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    """Experts of a layer are all quantized or none, and the error names one of each, wherever the plain one stands."""
    folder = tmp_path / "quantized"
    pattern = {"2.down": "2.(w2|down_proj)"}.get(skipped, f"{skipped}[.]")
    write(folder, plain[family], "fp8 blocks", rf"layers\.1.*experts\.{pattern}")
    number, _, which = skipped.partition(".")
    with pytest.raises(QuantizationError) as caught:
        loaded(folder)
    assert f"model.layers.1.mlp.experts.{number}.{which or 'gate_up'}_proj is plain" in str(
        caught.value
    )
    assert f"{'1' if number == '0' else '0'}.gate_up_proj is quantized" in str(caught.value)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_router_that_is_named_by_a_part_of_the_names_of_experts(
    family: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    """AutoAWQ names the plain router ``gate``, a part of ``gate_proj``: the tensors decide."""
    folder = tmp_path / "quantized"
    _, reference = write(folder, plain[family], "awq")
    values = json.loads((folder / "config.json").read_text("utf-8"))
    values["quantization_config"]["modules_to_not_convert"] = ["gate"]
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    model = loaded(folder)
    assert isinstance(experts_of(model)[0].quant_method, QuantizedFusedMoEMethod)
    torch.testing.assert_close(logits_of(model), expected_of(reference), rtol=1e-5, atol=1e-5)


def test_gates_and_ups_in_turn() -> None:
    """An activation that takes rows of gate and up in turn is refused: formats of linear layers stack them."""
    from opgraft.quantization import AWQConfig

    config = AWQConfig.from_config({"bits": 4, "group_size": 8, "zero_point": True})
    with pytest.raises(
        QuantizationError,
        match=r"mlp.experts: its activation swigluoai takes rows of gate and up in",
    ):
        FusedMoE(4, 2, 16, 16, quant_config=config, prefix="mlp.experts", activation="swigluoai")


def on_rank(
    folder: str, shared: bool, quantization: dict[str, Any]
) -> tuple[Tensor, tuple[int, ...]]:
    model = loaded(folder, expert=get_ep_group().world_size if shared else 1, **quantization)
    return logits_of(model), tuple(experts_of(model)[0].w13_weight.shape)


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8 blocks", "packed, zeros", "int4"])
@pytest.mark.parametrize("shared", [False, True])
def test_two_ranks(
    form: str, shared: bool, two: Ranks, plain: dict[str, Path], tmp_path: Path
) -> None:
    """Two ranks, with a half of each expert or with half of the experts, give the logits of one."""
    settings = {"method": form} if form == "int4" else {}
    folder = plain["Mixtral"]
    if not settings:
        folder = tmp_path / "quantized"
        write(folder, plain["Mixtral"], form)
    alone, shape = on_rank(str(folder), False, settings)
    for logits, part in two.run(on_rank, str(folder), shared, settings):
        assert part == ((2, *shape[1:]) if shared else (4, shape[1] // 2, shape[2]))
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


GPT_OSS = {
    **SIZES,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 5,
}


def mxfp4(weight: Tensor) -> Written:
    """Round ``[experts, out, in]``; return blocks and scales as gpt-oss has them, and what they stand for."""
    generator = torch.Generator().manual_seed(weight.shape[1])
    blocks = torch.randint(
        0, 256, (*weight.shape[:2], weight.shape[2] // 32, 16), generator=generator
    )
    scales = torch.randint(120, 124, blocks.shape[:3], generator=generator)
    return {"blocks": blocks.to(torch.uint8), "scales": scales.to(torch.uint8)}, torch.empty(0)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint in MXFP4, and transformers' model with the numbers that transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = tmp_path_factory.mktemp("oss") / "model"
    reference = saved(transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS)), folder)
    tensors = load_file(folder / "model.safetensors")
    state = reference.state_dict()
    for name in [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        parts, _ = mxfp4(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_{end}": part for end, part in parts.items()}
        state[name].copy_(
            convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)
        )
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text("utf-8"))
    skipped = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return folder, reference


def test_gpt_oss(gpt_oss: tuple[Path, Any]) -> None:
    """Experts stay in four bits, and logits are those of transformers with the same numbers in plain."""
    folder, reference = gpt_oss
    model = loaded(folder)
    for layer in experts_of(model):
        assert layer.w13_weight.dtype == torch.uint8
        sizes = [
            p.nbytes for name, p in layer.named_parameters(recurse=False) if "bias" not in name
        ]
        assert sum(sizes) == 3 * 4 * 128 * 128 * 17 // 32
    expected = expected_of(reference)
    assert expected.abs().max() > 0.1, "the model's logits are too small to tell a difference"
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_gpt_oss_on_two_ranks(shared: bool, gpt_oss: tuple[Path, Any], two: Ranks) -> None:
    """Two ranks, with a half of each expert or with half of the experts, give the logits of one."""
    expected = expected_of(gpt_oss[1])
    for logits, _ in two.run(on_rank, str(gpt_oss[0]), shared, {}):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_mxfp4_of_a_plain_checkpoint(plain: dict[str, Path]) -> None:
    """It is read, not made."""
    with pytest.raises(QuantizationError, match="mxfp4 is read from checkpoints that have it"):
        loaded(plain["Mixtral"], method="mxfp4")
