"""The written models compute what those of transformers do, from checkpoints that transformers writes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import PluggableClass
from opgraft.config import LoadConfig, ModelConfig, OpgraftConfig, ParallelConfig
from opgraft.errors import (
    CheckpointError,
    ConfigError,
    ConflictError,
    DistributedError,
    LayerError,
    ModelError,
)
from opgraft.models import LlamaForCausalLM, load_model, model_class, model_classes
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers
from safetensors.torch import load_file, save_file
from support.random_decoders import DECODERS, HYBRIDS, SIZES, hybrid, saved, written
from support.ranks import Ranks

transformers = pytest.importorskip("transformers")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def loaded(folder: Path, **values: Any) -> Any:
    return load_model(OpgraftConfig(model=ModelConfig(name=str(folder), dtype="float32", **values)))


def ids(count: int = 17) -> torch.Tensor:
    return torch.randint(3, 99, (count,), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.compute_logits(model(tokens, torch.arange(len(tokens))))
    return logits


def renamed(folder: Path, target: Path, rename: Callable[[str], str]) -> None:
    """Write a checkpoint again, in one file, with other names of tensors."""
    tensors = load_file(folder / "model.safetensors")
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    others = {rename(name): tensor for name, tensor in tensors.items()}
    save_file(others, target / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By name of a case: the folder, and the model of transformers."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: (folder / name, written(family, folder / name, **v))
        for name, (family, v) in DECODERS.items()
    }


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", DECODERS)
class TestDecoders:
    """Each family, with the ways in which it differs from the others."""

    def test_logits(self, name: str, checkpoints: dict[str, tuple[Path, Any]]) -> None:
        """Logits are those of transformers."""
        folder, reference = checkpoints[name]
        with torch.no_grad():
            expected = reference(ids()[None]).logits[0]
        assert expected.abs().max() > 0.1, "the model's logits are too small to tell a difference"
        torch.testing.assert_close(logits_of(loaded(folder), ids()), expected, **TOLERANCE)

    def test_chunks_over_a_cache(self, name: str, checkpoints: dict[str, tuple[Path, Any]]) -> None:
        """Two sequences that come in chunks of unlike lengths give what each gives at once."""
        model = loaded(checkpoints[name][0])
        long, short = ids(17), ids(11)
        caches = {
            key: torch.full(layer.kv_cache_shape(12, 4), torch.nan)
            for key, layer in layers_of(model).items()
        }
        table = {2: [3, 7, 11, 0, 5], 0: [9, 1, 4, 10, 2]}
        rows: dict[int, list[torch.Tensor]] = {0: [], 2: []}
        done = {0: 0, 2: 0}
        for chunk_long, chunk_short in ((7, 4), (1, 1), (1, 5), (8, 1)):
            chunks = {
                2: long[done[2] : done[2] + chunk_long],
                0: short[done[0] : done[0] + chunk_short],
            }
            lengths = tuple(map(len, chunks.values()))
            so_far = [done[row] + len(part) for row, part in chunks.items()]
            blocks = torch.tensor([table[row] for row in chunks])
            batch = AttentionBatch.of_sequences(lengths, so_far, blocks, caches, block_size=4)
            positions = torch.cat(
                [torch.arange(done[row], done[row] + len(part)) for row, part in chunks.items()]
            )
            with torch.no_grad(), attending(batch):
                logits = model.compute_logits(model(torch.cat(list(chunks.values())), positions))
            for row, part in zip(chunks, logits.split(lengths), strict=True):
                rows[row].append(part)
                done[row] += len(part)
        torch.testing.assert_close(torch.cat(rows[2]), logits_of(model, long), **TOLERANCE)
        torch.testing.assert_close(torch.cat(rows[0]), logits_of(model, short), **TOLERANCE)

    def test_names_without_the_base_model(
        self, name: str, checkpoints: dict[str, tuple[Path, Any]], tmp_path: Path
    ) -> None:
        """A checkpoint that was saved of the base model has names without its path."""
        folder, _ = checkpoints[name]
        renamed(folder, tmp_path / "base", lambda each: each.removeprefix("model."))
        expected = logits_of(loaded(folder), ids())
        assert torch.equal(logits_of(loaded(tmp_path / "base"), ids()), expected)

    def test_two_ranks(
        self, name: str, checkpoints: dict[str, tuple[Path, Any]], two: Ranks
    ) -> None:
        """Two ranks give the logits of one, each with half of the weights in memory."""
        folder = checkpoints[name][0]
        alone, whole = on_rank(str(folder))
        for logits, size in two.run(on_rank, str(folder)):
            torch.testing.assert_close(logits, alone, **TOLERANCE)
            assert size <= 0.56 * whole


@pytest.mark.parametrize("family", ["Llama", "Gemma", "Granite", "Olmo2"])
def test_a_window_that_the_family_does_not_have(family: str, tmp_path: Path) -> None:
    """A ``sliding_window`` that is left over in the config changes nothing, as in transformers."""
    reference = written(family, tmp_path, sliding_window=3)
    with torch.no_grad():
        expected = reference(ids()[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(tmp_path), ids()), expected, **TOLERANCE)


def layers_of(model: Any) -> Any:
    return attention_layers(model)


def on_rank(folder: str) -> tuple[torch.Tensor, int]:
    """The logits, and the bytes of the weights that layers share among ranks."""
    model = loaded(Path(folder))
    whole = ("_a_proj", ".gate.")  # projections to latents, and routers, which every rank has
    shared = [
        p
        for name, p in model.named_parameters()
        if p.dim() > 1 and not any(part in name for part in whole)
    ]
    return logits_of(model, ids()), sum(parameter.nbytes for parameter in shared)


@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "XLMRoberta"])
def test_encoders(architecture: str, tmp_path: Path, two: Ranks) -> None:
    """Hidden states of two packed sentences are those of each alone in transformers, on two ranks too."""
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, "pad_token_id": 1})
    reference = saved(getattr(transformers, f"{architecture}Model")(config), tmp_path)
    with torch.no_grad():
        expected = torch.cat([reference(ids(n)[None]).last_hidden_state[0] for n in (7, 12)])
    torch.testing.assert_close(encoded(str(tmp_path)), expected, **TOLERANCE)
    for states in two.run(encoded, str(tmp_path)):
        torch.testing.assert_close(states, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "base"), [("Bert", "bert"), ("Roberta", "roberta"), ("XLMRoberta", "roberta")]
)
def test_encoders_with_older_names(architecture: str, base: str, tmp_path: Path) -> None:
    """The first checkpoints call the weights of norms gamma and beta, with the base model's path or without."""
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, "pad_token_id": 1})
    saved(getattr(transformers, f"{architecture}Model")(config), tmp_path / "new")
    expected = encoded(str(tmp_path / "new"))

    def older(name: str) -> str:
        norm = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return norm.replace("LayerNorm.bias", "LayerNorm.beta")

    renamed(tmp_path / "new", tmp_path / "older", older)
    renamed(tmp_path / "new", tmp_path / "whole", lambda name: f"{base}.{older(name)}")
    for folder in ("older", "whole"):
        assert torch.equal(encoded(str(tmp_path / folder)), expected)


@pytest.mark.parametrize(
    ("padding", "words"),
    [
        (None, "pad_token_id is None, and positions begin after its number"),
        (-1, "pad_token_id is -1, and positions begin after its number"),
        (5000, "and the first token takes the position 5001"),
    ],
)
def test_positions_that_no_row_is_for(padding: int | None, words: str, tmp_path: Path) -> None:
    """An encoder whose positions begin after padding needs the number of padding, and rows after it."""
    config = transformers.RobertaConfig(**{**SIZES, "pad_token_id": 1})
    saved(transformers.RobertaModel(config), tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(values | {"pad_token_id": padding}), "utf-8")
    with pytest.raises(ModelError, match=words):
        loaded(tmp_path)


@pytest.mark.parametrize("path", ["", "model."])
def test_a_base_decoder_with_a_head(path: str, tmp_path: Path) -> None:
    """A base model is loaded from a checkpoint of the whole one, whose head has no place in it."""
    reference = written("Llama", tmp_path / "whole")
    tensors = {
        f"{path}{name}": each.contiguous() for name, each in reference.model.state_dict().items()
    }
    tensors["lm_head.weight"] = torch.zeros(SIZES["vocab_size"], SIZES["hidden_size"])
    save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "whole" / "config.json").read_text("utf-8"))
    values["architectures"] = ["LlamaModel"]
    (tmp_path / "whole" / "config.json").write_text(json.dumps(values), "utf-8")
    model = loaded(tmp_path / "whole")
    with torch.no_grad():
        states = model(ids(), torch.arange(17))
        expected = reference.model(ids()[None]).last_hidden_state[0]
    torch.testing.assert_close(states, expected, **TOLERANCE)


def encoded(folder: str) -> torch.Tensor:
    model = loaded(Path(folder))
    with torch.no_grad(), attending(AttentionBatch.of_sequences([7, 12])):
        states: torch.Tensor = model(
            torch.cat((ids(7), ids(12))), torch.cat((torch.arange(7), torch.arange(12)))
        )
    return states


def test_a_part_of_a_larger_model(tmp_path: Path) -> None:
    """A model is made of a part of a config, under a prefix of its own, which names its caches."""
    text = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=transformers.CLIPVisionConfig(hidden_size=8, num_attention_heads=2),
    )
    config.save_pretrained(tmp_path)
    saved(transformers.LlamaForCausalLM(text), tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    cls = model_class(["LlamaForCausalLM"])
    given = OpgraftConfig(model=ModelConfig(name=str(tmp_path), part="text_config"))
    model = cls(opgraft_config=given, prefix="language_model")
    assert next(iter(layers_of(model))) == "language_model.model.layers.0.self_attn.attn"
    wrong = OpgraftConfig(model=ModelConfig(name=str(tmp_path), part="txt_config"))
    with pytest.raises(ModelError, match="no part 'txt_config': did you mean 'text_config'"):
        cls(opgraft_config=wrong)


def test_an_architecture_that_nobody_registered() -> None:
    """The message has near matches, and the other path."""
    with pytest.raises(ModelError, match="LamaForCausalLM: did you mean 'LlamaForCausalLM'"):
        model_class(["LamaForCausalLM"])
    assert "Qwen3ForCausalLM" in model_classes()


def test_a_registered_class_that_is_no_model() -> None:
    """The error names the class and the base that it needs."""

    @PluggableClass.register("AcmeForCausalLM")
    class Acme(PluggableClass):
        pass

    with pytest.raises(
        ModelError, match=r"registered for .*Acme at .*test_models.py:\d+, .*models.Model$"
    ):
        model_class(["AcmeForCausalLM"])


def test_a_second_class_for_an_architecture_is_told_how_to_replace() -> None:
    """The name of an architecture cannot change, so the error tells the registration that keeps it."""

    class Other(LlamaForCausalLM):
        pass

    way = r"@LlamaForCausalLM.register_oot \(from opgraft.models import LlamaForCausalLM\) instead"
    with pytest.raises(
        ConflictError, match=rf"^class name 'LlamaForCausalLM' is registered twice.* {way}"
    ):
        PluggableClass.register("LlamaForCausalLM")(Other)


THREE = {"num_attention_heads": 6, "num_key_value_heads": 3}
UNEVEN = {
    "llama": ("Llama", {**THREE, "attention_bias": True}),
    "phi3": ("Phi3", THREE),
    "gpt_oss": ("GptOss", {**DECODERS["gpt_oss"][1], **THREE}),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_key_heads_that_ranks_do_not_divide(name: str, tmp_path: Path, two: Ranks) -> None:
    """Two ranks with two and one of three key heads give the logits of one."""
    family, values = UNEVEN[name]
    written(family, tmp_path, **values)
    alone, _ = on_rank(str(tmp_path))
    for logits, _ in two.run(on_rank, str(tmp_path)):
        torch.testing.assert_close(logits, alone, **TOLERANCE)


def test_an_encoder_with_heads_that_ranks_do_not_divide(tmp_path: Path, two: Ranks) -> None:
    """Two ranks with two and one of three heads give the hidden states of one."""
    saved(
        transformers.BertModel(transformers.BertConfig(**{**SIZES, "num_attention_heads": 3})),
        tmp_path,
    )
    alone = encoded(str(tmp_path))
    for states in two.run(encoded, str(tmp_path)):
        torch.testing.assert_close(states, alone, **TOLERANCE)


def test_a_norm_of_all_heads_that_ranks_do_not_divide(tmp_path: Path, two: Ranks) -> None:
    """It would need the heads of all ranks; the error names the layer and both numbers."""
    written("Olmo2", tmp_path, **THREE)
    for said in two.run(refused, str(tmp_path)):
        assert "layers.0.self_attn: its norm looks at all 6 heads" in said
        assert "divides its 3 key heads" in said


def refused(folder: str) -> str:
    with pytest.raises(LayerError) as caught:
        loaded(Path(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"hidden_act": "relu6"}, "activation 'relu6' is none of"),
        (
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "chunked_attention",
        ),
    ],
)
def test_a_config_that_is_not_written_for(
    tmp_path: Path, value: dict[str, Any], words: str
) -> None:
    """A config that asks for something else is refused with what it asks for."""
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    saved(transformers.LlamaForCausalLM(config), tmp_path)
    for name, one in value.items():
        setattr(config, name, one)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        loaded(tmp_path)


def test_settings_that_contradict_what_is_there(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    """Ranks that were not started, and files of another format, are errors that name the setting."""
    name = ModelConfig(name=str(checkpoints["llama"][0]))
    for kind in ("tensor", "pipeline", "data", "expert"):
        with pytest.raises(
            DistributedError,
            match=rf"parallel\.{kind} is 2, and the {kind} group of this process has 1",
        ):
            load_model(OpgraftConfig(model=name, parallel=ParallelConfig(**{kind: 2})))
    for device in ("qpu", "cpu:x"):
        with pytest.raises(
            ConfigError, match=f"load.device is '{device}', which torch cannot use here"
        ):
            load_model(OpgraftConfig(model=name, load=LoadConfig(device=device)))
    with pytest.raises(CheckpointError, match=r"load\.format is 'gguf', and .* as safetensors"):
        load_model(OpgraftConfig(model=name, load=LoadConfig(format="gguf")))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"vocab_size": 10**15},
            "model.embed_tokens.weight has the shape .*vocab_size 1000000000000000",
        ),
        ({"max_position_embeddings": 10**13}, "set model.max_model_len"),
        ({"max_position_embeddings": 10**9}, "set model.max_model_len"),
        ({"logits_scaling": 0}, "logits_scaling is 0"),
        ({"is_causal": False}, "is_causal is set to false, and decoders attend causally only"),
        ({"embedding_multiplier": 2.0}, r"embedding_multiplier is 2\.0, which models of this fam"),
        ({"attention_multiplier": 0.3}, r"attention_multiplier is 0\.3, which models of this fam"),
        ({"attention_multiplier": 1}, "attention_multiplier is 1, which models of this family do"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0, which models of"),
        ({"query_pre_attn_scalar": 24}, r"query_pre_attn_scalar is 24, which models of"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer_types is miss"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, which models of this"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads is 4, which num_key_value_heads, 3, does not divide",
        ),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        (
            {"intermediate_size": 10**15},
            "intermediate_size is 1000000000000000, expected an integer from 1",
        ),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, value: dict[str, Any], words: str) -> None:
    """Sizes that contradict each other, the checkpoint or sense are one error before memory is taken."""
    written("Llama", tmp_path)
    edit(tmp_path, value)
    with pytest.raises(ModelError, match=words):
        loaded(tmp_path)


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    """A family that reads no scales takes a config in which each factor is 1."""
    written("Llama", tmp_path)
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    edit(tmp_path, dict.fromkeys(names, 1) | {"partial_rotary_factor": 1.0})
    assert loaded(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Gemma2", "attn_logit_softcapping"),
        ("Gemma2", "final_logit_softcapping"),
        ("Granite", "attention_multiplier"),
        ("Granite", "logits_scaling"),
    ],
)
def test_scales_of_nothing(tmp_path: Path, family: str, name: str) -> None:
    """A scale or a cap of 0 leaves no numbers, and is an error that names the setting."""
    written(family, tmp_path)
    edit(tmp_path, {name: 0.0})
    with pytest.raises(ModelError, match=f"{name} is 0.*, expected a number above 0"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("mixtral", "num_local_experts", -1),
        ("mixtral", "sliding_window", -1),
        ("mixtral", "rms_norm_eps", -1e-6),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "moe_intermediate_size", -1),
        ("qwen3_moe", "num_local_experts", "x"),
        ("olmoe", "num_experts", 0),
        ("gpt_oss", "sliding_window", 0),
        ("deepseek v2, with experts", "n_routed_experts", 10**15),
        ("deepseek v2, with experts", "n_shared_experts", -1),
        ("deepseek v3, with experts", "num_nextn_predict_layers", "x"),
        ("mamba", "conv_kernel", 0),
        ("mamba", "time_step_rank", -1),
        ("mamba", "hidden_act", "relu"),
        ("mamba", "layer_norm_epsilon", -1.0),
        ("mamba2", "n_groups", 0),
        ("mamba2", "layer_norm_epsilon", float("nan")),
        ("mamba2", "time_step_limit", []),
        ("bamba", "mamba_d_state", 0),
        ("bamba", "time_step_limit", None),
        ("lfm2", "conv_L_cache", -1),
        ("lfm2", "block_multiple_of", 0),
        ("lfm2", "num_attention_heads", 0),
        ("plamo2", "attention_window_size", -1),
        ("plamo2", "rms_norm_eps", -1),
    ],
)
def test_experts_and_mixers_that_cannot_be(
    tmp_path: Path, name: str, setting: str, value: Any
) -> None:
    """Settings of experts and of layers with states are refused by the config's name and their own."""
    if name in HYBRIDS:
        hybrid(name, tmp_path)
    else:
        family, values = DECODERS[name]
        written(family, tmp_path, **values)
    edit(tmp_path, {setting: value})
    with pytest.raises(ModelError, match=rf"\w+Config: {setting} is {re.escape(repr(value))}, "):
        loaded(tmp_path)


def test_a_sliding_layer_without_a_window(tmp_path: Path) -> None:
    """It is refused, as it would attend to everything."""
    family, values = DECODERS["gpt_oss"]
    written(family, tmp_path, **values)
    edit(tmp_path, {"sliding_window": None})
    with pytest.raises(ModelError, match="GptOssConfig has no sliding_window"):
        loaded(tmp_path)


def test_a_shorter_context_than_the_config_claims(tmp_path: Path) -> None:
    """What the error proposes helps."""
    written("Llama", tmp_path)
    edit(tmp_path, {"max_position_embeddings": 10**13})
    assert loaded(tmp_path, max_model_len=64).max_position == 64


@pytest.mark.parametrize(
    "value",
    [
        {"is_decoder": True},
        {"add_cross_attention": True},
        {"position_embedding_type": "relative_key"},
    ],
)
def test_encoders_that_are_computed_otherwise(tmp_path: Path, value: dict[str, Any]) -> None:
    """An encoder that attends one way, to another model or by distances is refused."""
    sizes = {**SIZES, "pad_token_id": 1}
    saved(transformers.BertModel(transformers.BertConfig(**sizes)), tmp_path)
    edit(tmp_path, value)
    with pytest.raises(ModelError, match=f"{next(iter(value))} is"):
        loaded(tmp_path)


def edit(folder: Path, values: dict[str, Any]) -> None:
    """Change values of a checkpoint's config."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
