"""Settings of quantized checkpoints as tools write them: zeros, formats, heads, plain layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.errors import CheckpointError, QuantizationError
from opgraft.models.build import describe_model
from support.quantized_files import (
    TOKENS,
    config_of,
    held,
    is_quantized,
    model_of,
    write,
    write_layers,
)
from support.quantized_formats import (
    FORMATS,
    GPTQ,
    GROUP,
    INT4,
    Written,
    awq,
    gptq,
    packed,
    rounded,
    words,
)
from torch import Tensor

Form = Callable[[Tensor], Written]


def storing(stored: int, zero: int, bits: int = 4) -> Form:
    """Return a form of GPTQ whose zeros are all ``zero``, each stored as the number ``stored``."""

    def quantize(weight: Tensor) -> Written:
        tensors, _ = gptq(weight, bits, symmetric=True)
        groups = weight.double().reshape(weight.shape[0], -1, GROUP)
        scales = tensors["scales"].T.double()
        codes = ((groups / scales[..., None]).round() + zero).clamp(0, 2**bits - 1)
        plain = ((codes - zero) * scales[..., None]).flatten(1)
        tensors["qweight"] = words(codes.flatten(1), bits).T
        tensors["qzeros"] = words(torch.full(tensors["scales"].shape, stored), bits)
        return tensors, plain

    return quantize


def borrowing(weight: Tensor) -> Written:
    """Write zeros from 0 as GPTQModel does, which takes 1 from each by one subtraction."""
    codes, zeros, scales, _ = rounded(weight, 4, GROUP)
    zeros = (zeros - 5).clamp(min=0)
    assert int((zeros == 0).sum()) > 0
    groups = codes.reshape(*zeros.shape, -1)
    plain = (groups - zeros[..., None]) * scales[..., None]
    tensors = {"qweight": words(codes).T, "qzeros": words(zeros.T) - 0x11111111}
    tensors["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {**tensors, "scales": scales.T.half()}, plain.flatten(1)


def uniform(weight: Tensor) -> Written:
    return storing(7, 8)(weight)


AWQ = FORMATS["awq"][0]
PACKED = FORMATS["packed"][0]
ROWS: Mapping[str, tuple[Mapping[str, Any], Form]] = {
    "sym, 8 stored": ({**GPTQ, "sym": True, "checkpoint_format": "gptq"}, storing(8, 8)),
    "sym, 7 stored": ({**GPTQ, "sym": True}, storing(7, 8)),
    "sym, 0 stored": ({**GPTQ, "sym": True}, storing(0, 8)),
    "sym, 7 stored, v2": ({**GPTQ, "sym": True, "format": "gptq_v2"}, storing(7, 8)),
    "sym, 128 stored": ({**GPTQ, "sym": True, "bits": 8}, storing(128, 128, 8)),
    "8 stored, sym not given": (GPTQ, storing(8, 8)),
    "7 stored, v2, sym not given": ({**GPTQ, "format": "gptq_v2"}, storing(7, 7)),
    "8 stored, v2, sym not given": ({**GPTQ, "format": "gptq_v2"}, storing(8, 8)),
    "8 stored, not sym": ({**GPTQ, "sym": False}, storing(8, 9)),
    "8 stored, v2 by format": ({**GPTQ, "sym": False, "format": "gptq_v2"}, storing(8, 8)),
    "zeros from 0, v2 by format": (
        {**GPTQ, "sym": False, "format": "GPTQ_V2"},
        lambda weight: gptq(weight, first=0),
    ),
    "zeros from 0 in the first format": ({**GPTQ, "sym": False}, borrowing),
    "the older name counts more": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq", "format": "gptq_v2"},
        gptq,
    ),
    "gptq in capitals": ({**GPTQ, "quant_method": "GPTQ", "checkpoint_format": "GPTQ"}, gptq),
    "settings that are null": (
        {**GPTQ, "checkpoint_format": None, "desc_act": None, "dynamic": None, "sym": None},
        gptq,
    ),
    "a number with a point": ({**GPTQ, "bits": 4.0}, gptq),
    "awq in capitals": ({**AWQ, "quant_method": "AWQ", "version": "GEMM"}, awq),
    "awq, layout by format": (
        {"quant_method": "awq", "group_size": GROUP, "format": "GEMM", "backend": "auto"},
        awq,
    ),
    "compressed-tensors in capitals": (
        {
            **PACKED,
            "quant_method": "COMPRESSED-TENSORS",
            "format": "PACK-QUANTIZED",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**INT4, "type": "INT", "strategy": "GROUP"},
                }
            },
        },
        packed,
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_layers_hold_the_numbers_that_the_format_defines(
    row: str, llama: Any, single: Path, tmp_path: Path
) -> None:
    """A layer holds exactly the numbers that the checkpoint stands for."""
    settings, quantize = ROWS[row]
    folder = tmp_path / "quantized"
    meant = write_layers(
        folder, single, llama, settings, lambda name: quantize if is_quantized(name) else None
    )
    layer = model_of(folder).model.layers[0]
    prefix = "model.layers.0.self_attn"
    expected = torch.cat([meant[f"{prefix}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(held(layer.self_attn.qkv_proj), expected)
    assert torch.equal(held(layer.mlp.down_proj), meant["model.layers.0.mlp.down_proj.weight"])


def test_symmetric_and_different_zeros_contradict(llama: Any, single: Path, tmp_path: Path) -> None:
    """A checkpoint that says it is symmetric, and stores different zeros, is refused."""
    write(tmp_path / "quantized", single, llama, "gptq", sym=True)
    with pytest.raises(QuantizationError, match=r"has different zeros .* set sym to false"):
        model_of(tmp_path / "quantized")


def with_head(forms: str) -> list[str]:
    return [form for form in FORMATS if ("blocks" in form) == (forms == "blocks")]


def expect_head(folder: Path, llama: Any, meant: Mapping[str, Tensor], implementation: str) -> None:
    model = model_of(folder, None, implementation)
    rows = llama.config.vocab_size
    assert torch.equal(held(model.lm_head)[:rows], meant["lm_head.weight"])
    hidden = torch.randn(3, llama.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model.logits_processor(model.lm_head, hidden)
    expected = hidden.double() @ meant["lm_head.weight"].T
    # some forms round the inputs to 8 bits
    bound = 1e-5 if model.lm_head.weight.dtype == torch.uint8 else 0.1
    assert logits.shape == expected.shape
    assert float((logits - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("form", with_head("rows"))
def test_a_quantized_head(form: str, llama: Any, single: Path, tmp_path: Path) -> None:
    """A quantized head holds exactly the numbers of its tensors, and gives their logits."""
    config, quantize = FORMATS[form]
    settings = {**config, "lm_head": True} if config["quant_method"] in ("awq", "gptq") else config
    if "ignore" in config:
        settings = {**config, "ignore": []}
    names = {"lm_head.weight": quantize}
    meant = write_layers(tmp_path / "quantized", single, llama, settings, names.get)
    expect_head(tmp_path / "quantized", llama, meant, "auto")
    if form in ("gptq", "packed"):
        expect_head(tmp_path / "quantized", llama, meant, "transformers")


@pytest.mark.parametrize("form", with_head("blocks"))
def test_a_quantized_head_in_blocks(form: str, tmp_path: Path) -> None:
    """Blocks of rows of a head share a scale."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128}
    more = {"num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more)).eval()
    model.save_pretrained(tmp_path / "plain")
    config, quantize = FORMATS[form]
    names = {"lm_head.weight": quantize}
    folder = tmp_path / "quantized"
    meant = write_layers(folder, tmp_path / "plain", model, {**config, "ignore": []}, names.get)
    expect_head(folder, model, meant, "auto")


PLAIN: Mapping[str, tuple[Mapping[str, Any], Form, Callable[[str], bool]]] = {
    "awq, a part of names": (
        {**AWQ, "modules_to_not_convert": ["self_attn."]},
        awq,
        lambda name: ".self_attn." in name,
    ),
    "awq, a layer": (
        {**AWQ, "modules_to_not_convert": ["layers.0."]},
        awq,
        lambda name: ".layers.0." in name,
    ),
    "awq, within a name": (
        {**AWQ, "modules_to_not_convert": ["down"]},
        awq,
        lambda name: "down" in name,
    ),
    "gptq, dynamic": (
        {**GPTQ, "dynamic": {r"-:model\.layers\.0\.": {}, "-:.*down_proj": {}}},
        gptq,
        lambda name: ".layers.0." in name or "down" in name,
    ),
    "gptq, listed in blocks": (
        {
            **GPTQ,
            "modules_in_block_to_quantize": [
                ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"],
                ["mlp.down_proj"],
            ],
        },
        gptq,
        lambda name: "o_proj" in name or "gate" in name or "up_proj" in name,
    ),
    "fp8, ignored": (
        {**FORMATS["fp8"][0], "ignored_layers": ["model.layers.1.mlp.down_proj"]},
        FORMATS["fp8"][1],
        lambda name: "layers.1.mlp.down" in name,
    ),
}


@pytest.mark.parametrize("row", PLAIN)
def test_plain_layers_by_the_settings(row: str, llama: Any, single: Path, tmp_path: Path) -> None:
    """A list of plain layers is read as its tool reads it, with the weights and without them."""
    settings, quantize, is_plain = PLAIN[row]
    folder = tmp_path / "quantized"

    def form_of(name: str) -> Form | None:
        return quantize if is_quantized(name) and not is_plain(name) else None

    meant = write_layers(folder, single, llama, settings, form_of)
    loaded = model_of(folder)
    (folder / "model.safetensors").unlink()
    for model in (loaded, describe_model(config_of(folder))):
        for number, layer in enumerate(model.model.layers):
            for path in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
                merged = path.replace("q_proj", "qkv_proj").replace("up_proj", "gate_up_proj")
                method = type(layer.get_submodule(merged).quant_method).__name__
                plain = f"model.layers.{number}.{path}.weight" not in meant
                assert (method == "UnquantizedLinearMethod") == plain, (path, method)
    last = loaded.model.layers[1]
    expected = meant.get("model.layers.1.mlp.down_proj.weight")
    if expected is not None:
        assert torch.equal(held(last.mlp.down_proj), expected)


@pytest.mark.parametrize("form", ["awq", "gptq", "packed", "fp8"])
def test_plain_layers_that_no_setting_names(
    form: str, llama: Any, single: Path, tmp_path: Path
) -> None:
    """The tensors tell which layers are plain if the settings do not."""
    config, quantize = FORMATS[form]
    write_layers(
        tmp_path / "quantized",
        single,
        llama,
        config,
        lambda name: quantize if is_quantized(name) and "o_proj" not in name else None,
    )
    model = model_of(tmp_path / "quantized")
    weight = model.model.layers[1].self_attn.o_proj.weight
    assert torch.equal(weight, llama.model.layers[1].self_attn.o_proj.weight)


def test_bits_that_differ_by_layer(llama: Any, single: Path, tmp_path: Path) -> None:
    """A rule of ``dynamic`` gives the layers that it matches bits and groups of their own."""
    dynamic = {"+:.*\\.down_proj": {"bits": 8}, "-:.*\\.layers\\.1\\.": {}}

    def form_of(name: str) -> Form | None:
        if not is_quantized(name) or (".layers.1." in name and "down_proj" not in name):
            return None
        return (lambda weight: gptq(weight, 8)) if "down_proj" in name else gptq

    meant = write_layers(
        tmp_path / "quantized", single, llama, {**GPTQ, "dynamic": dynamic}, form_of
    )
    model = model_of(tmp_path / "quantized")
    for number, layer in enumerate(model.model.layers):
        name = f"model.layers.{number}.mlp.down_proj.weight"
        assert layer.mlp.down_proj.weight.dtype == torch.int8
        assert torch.equal(held(layer.mlp.down_proj), meant[name])


GROUPS = {"weights": INT4, "input_activations": None}


@pytest.mark.parametrize(
    "groups",
    [
        [["re:.*q_proj"], ["re:.*[kv]_proj", "re:.*(gate|o|down)_proj"], ["re:.*up_proj"]],
        [["re:.*q_proj"], ["Linear"]],
        [["model.layers.0.self_attn.v_proj"], ["re:.*v_proj"], ["Linear"]],
    ],
)
def test_parts_of_a_merged_layer_in_groups_of_one_scheme(
    groups: list[list[str]], llama: Any, single: Path, tmp_path: Path
) -> None:
    """Parts of a merged layer may stand in several groups that have the same settings."""
    config = {
        f"group_{number}": {**GROUPS, "targets": targets} for number, targets in enumerate(groups)
    }
    meant = write(tmp_path / "quantized", single, llama, "packed", config_groups=config)
    layer = model_of(tmp_path / "quantized").model.layers[0].self_attn.qkv_proj
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(held(layer), torch.cat([meant[name] for name in names]))


def test_a_name_counts_more_than_an_expression_and_an_expression_more_than_all(
    llama: Any, single: Path, tmp_path: Path
) -> None:
    """A layer takes the group that lists its name, whichever group comes first."""
    eight = {**GROUPS, "weights": {**INT4, "num_bits": 8}}
    config = {
        "group_0": {**eight, "targets": ["Linear"]},
        "group_1": {**GROUPS, "targets": ["re:.*_proj"]},
        "group_2": {**eight, "targets": ["model.layers.1.mlp.down_proj"]},
    }

    def form_of(name: str) -> Form | None:
        if name == "model.layers.1.mlp.down_proj.weight":
            return lambda weight: packed(weight, 8)
        return packed if is_quantized(name) else None

    settings = {**PACKED, "config_groups": config}
    meant = write_layers(tmp_path / "quantized", single, llama, settings, form_of)
    layer = model_of(tmp_path / "quantized").model.layers[1].mlp
    assert torch.equal(held(layer.down_proj), meant["model.layers.1.mlp.down_proj.weight"])
    assert layer.gate_up_proj.weight.dtype == torch.uint8


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        (
            "packed",
            {
                "config_groups": {
                    "a": {**GROUPS, "targets": ["re:.*q_proj"]},
                    "b": {"weights": {**INT4, "num_bits": 8}, "targets": ["Linear"]},
                }
            },
            r"q_proj, .*k_proj, .*v_proj in config_groups with different settings",
        ),
        (
            "gptq",
            {"dynamic": {".*q_proj": {"bits": 8}}},
            r"q_proj, .* different settings \(dynamic",
        ),
        ("gptq", {"dynamic": {"+:(": {}}}, r"has dynamic '\+:\(', which is no regular expression"),
        ("gptq", {"dynamic": ["a"]}, r"has dynamic \['a'\], expected regular expressions"),
        ("gptq", {"format": "marlin"}, r"gptq has format 'marlin'"),
        ("gptq", {"is_marlin_format": True}, r"gptq has is_marlin_format True"),
        ("gptq", {"sym": "yes"}, r"gptq has sym 'yes'"),
        ("gptq", {"lm_head": "yes"}, r"gptq has lm_head 'yes'"),
        ("gptq", {"pack_dtype": "int16"}, r"gptq has pack_dtype 'int16'"),
        ("gptq", {"modules_in_block_to_quantize": [3]}, r"has 3 in modules_in_block_to_quantize"),
        ("awq", {"version": None, "format": "gemv_fast"}, r"awq has format 'gemv_fast'"),
        ("awq", {"backend": "llm-awq"}, r"awq has backend 'llm-awq'"),
    ],
)
def test_settings_that_are_refused(
    form: str, settings: dict[str, Any], message: str, llama: Any, single: Path, tmp_path: Path
) -> None:
    """A setting that cannot be read, or that contradicts another, is named."""
    write(tmp_path / "quantized", single, llama, form, **settings)
    with pytest.raises(QuantizationError, match=message):
        model_of(tmp_path / "quantized")


def test_one_part_of_a_merged_layer_is_plain(llama: Any, single: Path, tmp_path: Path) -> None:
    """A checkpoint with one of several merged layers plain is refused, and the error names them."""
    config, quantize = FORMATS["packed"]
    write_layers(
        tmp_path / "quantized",
        single,
        llama,
        {**config, "ignore": ["lm_head", "re:.*q_proj"]},
        lambda name: quantize if is_quantized(name) and "q_proj" not in name else None,
    )
    with pytest.raises(QuantizationError, match=r"q_proj is plain in the checkpoint and .*k_proj"):
        model_of(tmp_path / "quantized")


def with_biases(llama: Any, value: float) -> dict[str, Tensor]:
    weights = {name: weight for name, weight in llama.state_dict().items() if is_quantized(name)}
    return {
        name.removesuffix("weight") + "bias": torch.full((len(weight),), value).half()
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("form", ["gptq", "awq", "packed"])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_biases_of_zeros_are_left_out(
    form: str, implementation: str, llama: Any, single: Path, tmp_path: Path
) -> None:
    """A bias of zeros has no effect, so a layer without a bias leaves it out."""
    config, quantize = FORMATS[form]
    meant = write_layers(
        tmp_path / "quantized",
        single,
        llama,
        config,
        lambda name: quantize if is_quantized(name) else None,
        beside=with_biases(llama, 0.0),
    )
    model = model_of(tmp_path / "quantized", None, implementation)
    reference = copy.deepcopy(llama)
    reference.load_state_dict({name: each.float() for name, each in meant.items()}, strict=False)
    with torch.inference_mode():
        got = model.compute_logits(model(TOKENS, torch.arange(len(TOKENS))))
        expected = reference(TOKENS[None]).logits[0]
    assert float((got - expected).norm() / expected.norm()) < 1e-4


def test_other_biases_without_a_place_are_refused(llama: Any, single: Path, tmp_path: Path) -> None:
    """A bias that is not all zeros, and one of a layer that the model does not have, are named."""
    folder = tmp_path / "quantized"
    config, quantize = FORMATS["gptq"]
    beside = with_biases(llama, 0.0)
    beside["model.layers.1.mlp.down_proj.bias"][3] = 0.5
    beside["model.layers.1.mlp.other_proj.bias"] = torch.zeros(2)
    write_layers(
        folder,
        single,
        llama,
        config,
        lambda name: quantize if is_quantized(name) else None,
        beside=beside,
    )
    with pytest.raises(CheckpointError, match="2 problems") as found:
        model_of(folder)
    for name in ("down_proj.bias", "other_proj.bias"):
        assert f"model.layers.1.mlp.{name}' has no place" in str(found.value)


def test_a_plain_checkpoint_beside_settings_of_an_older_one(
    llama: Any, single: Path, tmp_path: Path
) -> None:
    """Weights that are all plain are loaded as they are, whatever settings are left beside them."""
    write_layers(tmp_path / "plain", single, llama, GPTQ, lambda name: None)
    model = model_of(tmp_path / "plain")
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert torch.equal(weight, llama.model.layers[0].self_attn.o_proj.weight)
