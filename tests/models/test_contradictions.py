"""Checkpoints whose tensors contradict their config, or each other, are refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from opgraft.cli import run
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig, QuantizationSettings
from opgraft.engine.runner import model_runner
from opgraft.errors import CheckpointError, QuantizationError
from opgraft.models import load_model
from opgraft.quantization.compressed_tensors import CompressedTensorsConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

DOWN = "model.layers.0.mlp.down_proj.weight"


def config(name: object, implementation: str = "auto", **quantization: object) -> OpgraftConfig:
    return OpgraftConfig(
        model=ModelConfig(name=str(name), dtype="float32", implementation=implementation),
        load=LoadConfig(device="cpu", progress=False),
        quantization=QuantizationSettings(**quantization),
    )


def changed(
    folder: Path, to: Path, edit: Callable[[dict[str, Tensor]], object], **values: object
) -> Path:
    """Copy a checkpoint with other tensors and settings."""
    shutil.copytree(folder, to)
    settings = json.loads((to / "config.json").read_text("utf-8")) | values
    (to / "config.json").write_text(json.dumps(settings), "utf-8")
    weights = load_file(to / "model.safetensors")
    edit(weights)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_another_head_than_the_embedding_is_not_tied(
    implementation: str, single: Path, tmp_path: Path
) -> None:
    """Tied weights may be stored twice, but only if they are equal."""
    other = changed(single, tmp_path / "other", lambda w: None, tie_word_embeddings=True)
    with pytest.raises(
        CheckpointError,
        match=r"embed_tokens.*differs from.*lm_head|lm_head.*differs from.*embed_tok",
    ):
        load_model(config(other, implementation))

    def tie(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    load_model(
        config(changed(single, tmp_path / "same", tie, tie_word_embeddings=True), implementation)
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_codes_are_no_weights(dtype: torch.dtype, single: Path, tmp_path: Path) -> None:
    """Integers without a quantization are not read as floating-point numbers."""
    folder = changed(
        single, tmp_path / "codes", lambda w: w.update({DOWN: (w[DOWN] * 99).to(dtype)})
    )
    for method in ({}, {"method": "int8"}):
        with pytest.raises(
            CheckpointError, match=rf"down_proj.weight' has {dtype}, the model has torch.float32"
        ):
            load_model(config(folder, **method))


def test_wide_numbers_are_not_rounded_to_fp8(single: Path, tmp_path: Path) -> None:
    """A checkpoint that says fp8 has weights in fp8."""

    def scale(weights: dict[str, Tensor]) -> None:
        weights.update(
            {f"{name}_scale": torch.ones(()) for name in list(weights) if "_proj" in name}
        )

    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    folder = changed(single, tmp_path / "wide", scale, quantization_config=said)
    with pytest.raises(
        CheckpointError, match=r"has torch\.float32, the model has torch.float8_e4m3fn"
    ):
        load_model(config(folder))


@pytest.mark.parametrize(("layer", "method"), [("lm_head", "int8"), ("model.embed_tokens", "int4")])
def test_layers_that_stay_plain_take_no_method(layer: str, method: str, single: Path) -> None:
    """A method for an embedding or a head alone is an error; a pattern that means other layers too is none."""
    with pytest.raises(QuantizationError, match=f"{layer} cannot take {method}"):
        load_model(config(single, method="int8", by_prefix={layer: method}))
    load_model(config(single, by_prefix={"*": method}))


FP8 = {"type": "float", "num_bits": 8, "strategy": "tensor"}
INPUTS = {"type": "float", "num_bits": 8, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("more", "in_group"),
    [
        ({"transform_config": {"config_groups": {}}}, {}),
        ({"rotation": "hadamard"}, {}),
        ({}, {"output_activations": INPUTS}),
    ],
)
def test_settings_of_compressed_tensors_that_are_not_read(more: dict, in_group: dict) -> None:
    """What would change the numbers and is not read is refused; empty it is none."""
    group = {"targets": ["Linear"], "weights": FP8, "input_activations": INPUTS}
    plain = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
    }
    CompressedTensorsConfig.from_config(
        {**plain, "config_groups": {"0": group}, **dict.fromkeys(more)}
    )
    with pytest.raises(QuantizationError, match=next(iter({**more, **in_group}))):
        CompressedTensorsConfig.from_config(
            {**plain, **more, "config_groups": {"0": {**group, **in_group}}}
        )


def test_a_scheme_for_the_cache_changes_no_weights() -> None:
    """What compressed-tensors would keep in its cache is no reason to refuse the weights."""
    group = {"targets": ["Linear"], "weights": FP8, "input_activations": INPUTS}
    plain = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"0": group},
    }
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }
    CompressedTensorsConfig.from_config({**plain, "kv_cache_scheme": scheme})


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale",),
    ],
)
def test_scales_for_a_cache_are_left_out_and_told_of(
    names: tuple[str, ...],
    implementation: str,
    single: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By whichever tool's names: the weights are those of the checkpoint without, and the log says so."""

    def scale(weights: dict[str, Tensor]) -> None:
        weights.update(
            {f"model.layers.{i}.{name}": torch.tensor(0.02) for i in range(2) for name in names}
        )

    logger = logging.getLogger("opgraft")
    with caplog.at_level("INFO", logger.name):
        plain = load_model(config(single, implementation)).state_dict()
        assert "scales for the cache" not in caplog.text
        scaled = load_model(
            config(changed(single, tmp_path / "scaled", scale), implementation)
        ).state_dict()
    assert (
        f"scaled has {2 * len(names)} scales for the cache, such as model.layers.0.{names[0]}"
        in caplog.text
    )
    assert plain.keys() == scaled.keys()
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def test_other_scales_have_no_place(single: Path, tmp_path: Path) -> None:
    """A scale that is not known to be for a cache is not left out in silence."""
    name = "model.layers.0.self_attn.o_proj.output_scale"
    with pytest.raises(CheckpointError, match=r"o_proj.output_scale' has no place"):
        load_model(
            config(
                changed(single, tmp_path / "other", lambda w: w.update({name: torch.tensor(0.02)}))
            )
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "auto"),
        (("--model.dtype", "bfloat16"), "bfloat16"),
        (("--dtype", "float16"), "float16"),
    ],
)
def test_the_dtype_of_an_answer(
    options: tuple, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option goes before the setting, which holds where the option is not given."""
    seen = []

    def load(given: OpgraftConfig) -> None:
        seen.append(given.resolved().model.dtype)
        raise CheckpointError("seen")

    monkeypatch.setattr(model_runner, "load_model", load)
    CliRunner().invoke(run.command, ["smollm2", "hi", *options])
    assert seen == [expected]
