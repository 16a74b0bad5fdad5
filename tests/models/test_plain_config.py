"""Configurations of the usual decoders are read without transformers, and say the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opgraft.config import ModelConfig, OpgraftConfig
from opgraft.errors import CheckpointError, ModelError
from opgraft.models import load_model, open_weights, read_config
from opgraft.models.decoder_config import DecoderFamily, DecoderShape
from opgraft.models.plain_config import PlainConfig, plain_config
from safetensors.torch import save_file
from support.plamo2 import plamo2
from support.random_decoders import written

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
USUAL = [
    {},
    {"rope_theta": 500_000.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5_000.0}},
    {"rope_theta": 1_000_000, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    {"torch_dtype": "bfloat16", "eos_token_id": [5, 6], "sliding_window": 16},
    {"dtype": "float16", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1},
]
READ = (
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "vocab_size",
    "max_position_embeddings",
)


def _checkpoint(folder: Path, **values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    save_file({}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("values", USUAL, ids=lambda values: "-".join(values) or "sizes")
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_plain_config_is_what_transformers_makes(
    kind: str, values: dict[str, object], tmp_path: Path
) -> None:
    """Its shapes of a decoder, and all else that is read of it, are those of transformers' class."""
    weights = open_weights(
        _checkpoint(tmp_path, model_type=kind, architectures=["Some"], **{**SIZES, **values})
    )
    plain, whole = read_config(weights, plain=True), read_config(weights)
    assert isinstance(plain, PlainConfig)
    assert isinstance(whole, transformers.PreTrainedConfig)
    for family in (DecoderFamily(), DecoderFamily(windowed=kind == "mistral")):
        assert DecoderShape.of(plain, family) == DecoderShape.of(whole, family)
    assert {name: getattr(plain, name) for name in READ} == {
        name: getattr(whole, name) for name in READ
    }
    assert plain.get_text_config().architectures == whole.architectures


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "gemma"},
        {"hidden_size": "64"},
        {"hidden_size": 65},
        {"num_key_value_heads": 2.0},
        {"tie_word_embeddings": "yes"},
        {"hidden_act": 3},
        {"rms_norm_eps": None},
        {"dtype": "Tensor"},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention"] * 2},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_theta": "10000"},
        {"auto_map": {"AutoConfig": "code.Config"}},
    ],
    ids=str,
)
def test_unusual_settings_are_left_to_transformers(values: dict[str, object]) -> None:
    """What it converts, refuses or knows better is not read plainly."""
    assert plain_config({"model_type": "llama", **SIZES}) is not None
    assert plain_config({"model_type": "llama", **SIZES, **values}) is None


def test_a_usual_decoder_runs_without_transformers(tmp_path: Path) -> None:
    """From the start of the process to its tokens nothing imports transformers, a compiler or a symbolic library."""
    written("Llama", tmp_path)
    code = (
        "import sys; from opgraft import LLM, SamplingParams\n"
        f"llm = LLM({str(tmp_path)!r}, dtype='float32', **{{'cache.num_blocks': 200}})\n"
        "print(len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))\n"
        "print([name for name in ('transformers', 'torch._dynamo', 'sympy', 'torch.onnx') if name in sys.modules])\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert child.stdout.split("\n")[:2] == ["3", "[]"], child.stderr


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"mamba_num_heads": "six"}, "mamba_num_heads is 'six', expected one like 64"),
        ({"mamba_d_state": True}, "mamba_d_state is True, expected one like 64"),
        ({"full_attention_idx": 3}, "full_attention_idx is 3 and dtype None, expected a list"),
        (
            {"torch_dtype": "float33"},
            "and dtype 'float33', expected a list of layers and the name of a dtype",
        ),
        ({"n_expert": 8}, "n_expert is 8 and mamba_step 2, expected no experts"),
        ({"mamba_step": 1}, "mamba_step 1, expected no experts and a step of at least 2"),
        (
            {"max_position_embeddings": 10 * 2**20},
            "a context of 10485760 tokens .* set model.max_model_len",
        ),
        ({"hidden_size_per_head": 0}, "head_dim is 0, expected an integer from 1"),
        ({"mamba_num_heads": 0}, "mamba_num_heads is 0, expected an integer from 1"),
    ],
)
def test_plamo2_that_is_not_one(tmp_path: Path, value: dict[str, Any], words: str) -> None:
    """A config of PLaMo 2, which opgraft reads itself, is refused where it is none, by the name of what is wrong."""
    plamo2(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **value}))
    with pytest.raises((CheckpointError, ModelError), match=words):
        load_model(OpgraftConfig(model=ModelConfig(name=str(tmp_path))))
