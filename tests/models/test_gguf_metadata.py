"""Settings of GGUF files: those that change the model are read, or the file is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from opgraft.config import ModelConfig, OpgraftConfig
from opgraft.errors import CheckpointError
from opgraft.models import load_model
from opgraft.models.gguf_names import config_values

from .conftest import gguf, llama_config, transformers, write_gguf

SIZES = {
    "context_length": 8192,
    "vocab_size": 96,
    "feed_forward_length": 512,
    "rope.freq_base": 500000.0,
}
SMALL = {
    "block_count": 2,
    "embedding_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def values_of(arch: str, **settings: object) -> dict:
    """The settings of a file with these keys, whose dots are written as two underscores."""
    keys = {**SIZES, **SMALL, **{key.replace("__", "."): value for key, value in settings.items()}}
    metadata = {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in keys.items()},
    }
    return config_values(metadata, {}, "model.gguf")


@pytest.mark.parametrize(
    ("arch", "blocks", "hidden", "heads", "head", "scalar"),
    [
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
        ("gemma3", 48, 3840, 16, 256, 256),
    ],
)
def test_the_scale_of_queries_of_gemma(arch, blocks, hidden, heads, head, scalar) -> None:
    """Sizes and scalars are those of the published models."""
    sizes = {
        "embedding_length": hidden,
        "attention__head_count": heads,
        "attention__key_length": head,
    }
    assert values_of(arch, block_count=blocks, **sizes)["query_pre_attn_scalar"] == scalar


REFUSED = {
    "attention.causal": False,
    "expert_count": 8,
    "attention.clamp_kqv": 0.5,
    "attention.max_alibi_bias": 8.0,
    "attention.value_length": 32,
    "attention.scale": 0.5,
    "attention.sliding_window": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 2.0,
    "rope.dimension_count": 32,
    "rope.scaling.type": "longrope",
    "rope.scaling.attn_factor": 2.0,
    "rope.dimension_sections": [1, 2],
    "a_key_of_tomorrow": 1,
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_read_is_refused(key: str) -> None:
    """The error names the key and its value."""
    with pytest.raises(CheckpointError, match="not read here") as caught:
        values_of("llama", **{key: REFUSED[key]})
    assert key in str(caught.value)
    assert str(REFUSED[key]) in str(caught.value)


def test_all_that_is_not_read_is_one_error() -> None:
    """A file with two such settings is told once of both."""
    with pytest.raises(CheckpointError, match=r"2 problems: .*clamp_kqv.*expert_count"):
        values_of("llama", expert_count=8, attention__clamp_kqv=0.5)


NO_MODELS = {
    "an adapter": ({"general.type": "adapter", "adapter.type": "lora"}, "LoRA .*llama-export-lora"),
    "an adapter by its type": (
        {"general.type": "adapter"},
        "general.type is 'adapter', and opgraft loads models. Merge",
    ),
    "an older adapter": ({"adapter.lora.alpha": 16.0}, "adapter.lora.alpha is 16.0, and .* Merge"),
    "a projector": (
        {"general.type": "mmproj"},
        "projector .*'mmproj', .* Load the file of the lang",
    ),
    "an older projector": (
        {"general.architecture": "clip"},
        "architecture is 'clip'. Load the file",
    ),
    "keys of a projector": (
        {"clip.projector_type": "mlp"},
        "clip.projector_type is 'mlp', .* Load",
    ),
    "statistics": ({"general.type": "imatrix"}, "statistics for quantizing, no model"),
    "control vectors": ({"general.architecture": "controlvector"}, "control vectors, no model"),
    "something of tomorrow": (
        {"general.type": "soup"},
        "holds something else, no model: general.type is 'soup'",
    ),
    "no text": ({"general.type": 7}, "general.type is 7, .* Load the file of the model"),
}


@pytest.mark.parametrize("kind", NO_MODELS)
def test_files_that_hold_no_model(kind: str, tmp_path: Path) -> None:
    """They are refused by name, with the next step, whatever else the file says."""
    keys, words = NO_MODELS[kind]
    file = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(file, str(keys.get("general.architecture", "llama")))
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key, value)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(OpgraftConfig(model=ModelConfig(name=str(file))))
    assert str(file) in str(caught.value)


def test_files_that_say_that_they_hold_a_model() -> None:
    """The type that converters write of models changes nothing."""
    metadata = {"general.architecture": "llama", "general.type": "model"}
    metadata |= {f"llama.{key}": value for key, value in {**SIZES, **SMALL}.items()}
    assert config_values(metadata, {}, "model.gguf") == values_of("llama")


def test_settings_that_change_nothing() -> None:
    """They pass."""
    same = {
        "attention.causal": True,
        "expert_count": 0,
        "rope.dimension_count": 64,
        "rope.scaling.type": "none",
    }
    assert values_of("llama", **same) == values_of("llama")


def test_settings_that_only_some_families_read() -> None:
    """A window and caps of Gemma 2, scales of Granite, the rotated part of Phi-3."""
    gemma = values_of(
        "gemma2",
        attention__sliding_window=16,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=0.0,
    )
    assert (
        gemma["sliding_window"],
        gemma["attn_logit_softcapping"],
        gemma["final_logit_softcapping"],
    ) == (
        16,
        20,
        None,
    )
    granite = values_of(
        "granite", attention__scale=0.5, embedding_scale=3.0, residual_scale=0.25, logit_scale=2.0
    )
    assert (
        granite["attention_multiplier"],
        granite["residual_multiplier"],
        granite["logits_scaling"],
    ) == (
        0.5,
        0.25,
        2,
    )
    phi = values_of("phi3", rope__dimension_count=48, attention__sliding_window=0)
    assert (phi.pop("model_type"), phi["sliding_window"]) == ("phi3", None)
    assert transformers.Phi3Config(**phi).rope_parameters["partial_rotary_factor"] == 0.75


def with_settings(folder: Path, model, settings: Mapping[str, object], monkeypatch) -> Path:
    """Write the model as a GGUF file with more keys and tensors."""

    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, *given, **named) -> None:
            for key, value in settings.items():
                if isinstance(value, torch.Tensor):
                    self.add_tensor(key, value.numpy())
                elif isinstance(value, str):
                    self.add_string(key, value)
                else:
                    self.add_float32(key, value)
            super().write_header_to_file(*given, **named)

    monkeypatch.setattr(gguf, "GGUFWriter", Writer)
    write_gguf(folder / "model.gguf", model, "F32")
    return folder / "model.gguf"


def divisors(factor: float) -> torch.Tensor:
    """What llama.cpp's converter writes: what transformers' rope llama3 divides frequencies by."""
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 10000.0}
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    scaled = init(llama_config(rope_parameters=rope), "cpu")[0]
    return 1 / 10000.0 ** (torch.arange(0, 64, 2) / 64) / scaled


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
ROPES = {
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"factor": 4.0},
    ),
    "linear without a type": (
        {"llama.rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear of old": ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {**YARN, "llama.rope.scaling.original_context_length": 512.0},
        {"factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "llama3 8": (
        {"rope_freqs.weight": divisors(8.0)},
        {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    ),
    "llama3 32": (
        {"rope_freqs.weight": divisors(32.0)},
        {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_ropes(kind: str, tmp_path, llama, monkeypatch) -> None:
    """A file with a scaled rope gives the logits of transformers' model with that rope."""
    settings, rope = ROPES[kind]
    file = with_settings(tmp_path, llama, settings, monkeypatch)
    ours = load_model(OpgraftConfig(model=ModelConfig(name=str(file))))
    scaled = {"rope_type": kind.split()[0], "rope_theta": 10000.0, **rope}
    reference = transformers.LlamaForCausalLM(llama_config(rope_parameters=scaled)).eval()
    reference.load_state_dict(llama.state_dict())
    ids, positions = torch.arange(64), 8 * torch.arange(64)
    logits = reference(ids[None], position_ids=positions[None]).logits[0]
    assert (logits - llama(ids[None], position_ids=positions[None]).logits[0]).abs().max() > 3e-3
    torch.testing.assert_close(
        ours.compute_logits(ours(ids, positions)), logits, rtol=1e-3, atol=1e-4
    )


def test_other_frequencies_are_refused(tmp_path, llama, monkeypatch) -> None:
    """Divisors that no rope of the config gives are an error that says so."""
    file = with_settings(
        tmp_path, llama, {"rope_freqs.weight": torch.linspace(1, 8, 32)}, monkeypatch
    )
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is not that of rope_type llama3"):
        load_model(OpgraftConfig(model=ModelConfig(name=str(file))))
