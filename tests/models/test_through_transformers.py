"""Architectures that are not written here run through transformers, with layers, attention and weights of ours."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
import transformers
from opgraft import OpgraftConfig
from opgraft.config import ModelConfig, ParallelConfig
from opgraft.errors import CheckpointError, ModelError
from opgraft.models import (
    TransformersForCausalLM,
    load_model,
    load_weights,
    model_class,
    through_transformers,
)
from opgraft.models.transformers_layers import Replacer
from opgraft.ops.attention import AttentionBatch, attending
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.moe.fused import TransformersFusedMoE
from safetensors.torch import load_file
from support.greedy import greedy_tokens
from support.random_decoders import STACKED_EXPERTS
from support.ranks import Ranks
from torch import Tensor

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
DECODERS: dict[str, dict[str, Any]] = {
    "apertus": ROPE,
    "biogpt": {},
    "cohere": {},
    "cohere2": WINDOWS,
    "ernie4_5": {},
    "exaone4": WINDOWS,
    "glm": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "gpt_oss": {**WINDOWS, **ROPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {},
    "olmo": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32},
    "phi": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": 6},
}
PLANNED = (
    "cohere",
    "exaone4",
    "glm",
    "gpt_neox",
    "olmo",
    "phi",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
ENCODERS: dict[str, dict[str, Any]] = {
    "electra": {},
    "modernbert": {"local_attention": 8},
    "xlm-roberta": {},
}
UNCACHED: dict[str, dict[str, Any]] = {
    "falcon": {"head_dim": None},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "mamba": {"state_size": 4},
}
TOKENS = 20


def reference(kind: str, options: dict[str, Any], folder: Path, auto: Any = None) -> Any:
    """Save a random model of transformers and return it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **{k: v for k, v in (SMALL | options).items() if v is not None}
    )
    model = (auto or transformers.AutoModelForCausalLM).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases that do something
    model.save_pretrained(folder)
    return model


def through(folder: Path, expert: int = 1) -> Any:
    """Construct the model of a checkpoint through transformers and load it."""
    return load_model(
        OpgraftConfig(
            model=ModelConfig(name=str(folder), implementation="transformers"),
            parallel=ParallelConfig(expert=expert),
        )
    )


def tokens(seed: int) -> Tensor:
    return torch.randint(3, 128, (TOKENS,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """A checkpoint that transformers wrote gives its logits, whole and in chunks of two sequences over a cache."""
    expected, model = reference(kind, DECODERS[kind], tmp_path), through(tmp_path)
    sequences = [tokens(0), tokens(1)]
    logits = [expected(ids[None]).logits[0] for ids in sequences]
    positions = torch.arange(TOKENS)
    torch.testing.assert_close(
        model.compute_logits(model(sequences[0], positions)), logits[0], rtol=0, atol=1e-5
    )
    layers = attention_layers(model)
    caches = {
        name: torch.full(layer.kv_cache_shape(9, 8), torch.nan) for name, layer in layers.items()
    }
    table = torch.tensor([[5, 2, 8, 1], [0, 3, 7, 4]])
    assert len(caches) == 2
    start = 0
    for size in (7, 1, 5, 1, 6):
        part = slice(start, start + size)
        batch = AttentionBatch.of_sequences(
            [size] * 2, [start + size] * 2, table, caches, block_size=8
        )
        with attending(batch):
            hidden = model(torch.cat([ids[part] for ids in sequences]), positions[part].repeat(2))
        chunk = torch.cat([whole[part] for whole in logits])
        torch.testing.assert_close(model.compute_logits(hidden), chunk, rtol=0, atol=1e-5)
        start += size


@pytest.mark.parametrize("kind", ENCODERS)
@torch.no_grad()
def test_encoders_attend_within_each_sequence(kind: str, tmp_path: Path) -> None:
    """The hidden states of a base model are transformers', of one sequence and of two in a batch."""
    expected, model = (
        reference(kind, ENCODERS[kind], tmp_path, transformers.AutoModel),
        through(tmp_path),
    )
    first, second = tokens(0), tokens(1)[:9]
    alone = [expected(ids[None])[0][0] for ids in (first, second)]
    positions = torch.arange(TOKENS)
    torch.testing.assert_close(model(first, positions), alone[0], rtol=0, atol=1e-5)
    if not model.examination.uncached:
        with attending(AttentionBatch.of_sequences([TOKENS, 9])):
            both = model(torch.cat((first, second)), torch.cat((positions, positions[:9])))
        torch.testing.assert_close(both, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", UNCACHED)
@torch.no_grad()
def test_attention_of_another_kind_runs_without_a_cache(kind: str, tmp_path: Path) -> None:
    """A model whose layers do not call the registry gives its logits, refuses a batch, and the report says why."""
    expected, model = reference(kind, UNCACHED[kind], tmp_path), through(tmp_path)
    ids, positions = tokens(0), torch.arange(TOKENS)
    logits = model.compute_logits(model(ids, positions))
    torch.testing.assert_close(logits, expected(ids[None]).logits[0], rtol=0, atol=1e-5)
    assert "0 of 2 layers call their attention" in "".join(row.reason for row in model.report.kept)
    refused = pytest.raises(ModelError, match=r"cache of ours: 0 of 2 layers.*opgraft\.graft")
    with attending(AttentionBatch.of_sequences([TOKENS])), refused:
        model(ids, positions)


def test_a_model_that_asks_values_is_grafted_instead(tmp_path: Path) -> None:
    """A model that cannot be called without values is refused with the next step, and graft serves the model."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    values = {"num_hidden_layers": 1, "num_attention_heads": 4, "relative_attention": True}
    config = transformers.DebertaV2Config(**sizes, **values, pos_att_type=["p2c", "c2p"])
    model = transformers.DebertaV2Model(config).eval()
    model.save_pretrained(tmp_path)
    told = r"cannot be examined without memory: .*\. Next: .* call opgraft\.graft\(model\)"
    with pytest.raises(ModelError, match=told):
        load_model(OpgraftConfig(model=ModelConfig(name=str(tmp_path))))
    assert opgraft.graft(model).replaced


def logits_of_rank(folder: str, expert: int = 1) -> tuple[Tensor, int]:
    """Return the logits of a checkpoint and the bytes of this rank's weights."""
    model = through(Path(folder), expert)
    size = sum(parameter.nbytes for parameter in model.parameters())
    return model.compute_logits(model(tokens(0), torch.arange(TOKENS))), size


@pytest.mark.parametrize("kind", PLANNED)
def test_two_ranks_give_the_logits_of_one(two: Ranks, kind: str, tmp_path: Path) -> None:
    """Layers are cut by the plan of transformers: each of two ranks has half the weights."""
    reference(kind, DECODERS[kind], tmp_path)
    logits, size = logits_of_rank(str(tmp_path))
    for of_rank, part in two.run(logits_of_rank, str(tmp_path)):
        torch.testing.assert_close(of_rank, logits, rtol=0, atol=1e-5)
        assert part < 0.56 * size


@torch.no_grad()
def test_embeddings_may_be_given_in_place_of_ids(tmp_path: Path) -> None:
    """Hidden states of embeddings are those of their ids."""
    reference("olmo", {}, tmp_path)
    model = through(tmp_path)
    ids, positions = tokens(0), torch.arange(TOKENS)
    torch.testing.assert_close(
        model(None, positions, model.model.embed_tokens(ids)), model(ids, positions)
    )


def test_generation_is_that_of_transformers(tmp_path: Path) -> None:
    """Greedy tokens over a cache are those of transformers' own generation."""
    expected, model = reference("starcoder2", DECODERS["starcoder2"], tmp_path), through(tmp_path)
    prompt = tokens(0)
    whole = expected.generate(prompt[None], max_new_tokens=12, do_sample=False, eos_token_id=None)[
        0
    ]
    assert greedy_tokens(model, prompt.tolist(), 12) == whole[TOKENS:].tolist()
    assert model.max_position == 64


@pytest.mark.parametrize("kind", ["apertus", "gpt_neox", "smollm3"])
@torch.no_grad()
def test_ungraft_leaves_the_attention_that_the_model_is_made_with(
    kind: str, tmp_path: Path
) -> None:
    """What was grafted goes and comes again; over a cache the model answers as before, and so does its copy."""
    reference(kind, DECODERS[kind], tmp_path)
    model = through(tmp_path)
    prompt = tokens(0).tolist()
    expected, grafted = greedy_tokens(model, prompt, 6), model.report.grafted.replaced
    paths = [row.path for row in grafted]
    assert paths
    former = [model.get_submodule(path) for path in paths]
    layers = attention_layers(model)
    opgraft.ungraft(model)
    assert all(model.get_submodule(path) is not op for path, op in zip(paths, former, strict=True))
    for each in (model, copy.deepcopy(model)):
        assert list(attention_layers(each)) == list(layers)
        assert greedy_tokens(each, prompt, 6) == expected
    opgraft.ungraft(model)
    again = opgraft.graft(model).replaced
    assert [row.path for row in again] == paths
    assert greedy_tokens(model, prompt, 6) == expected


@torch.no_grad()
def test_ranks_that_do_not_gather_have_no_logits(tmp_path: Path) -> None:
    """Where the logits processor has none, as behind a gather on other ranks, neither has the model."""
    reference("cohere", {}, tmp_path)
    model = through(tmp_path)
    hidden = model(tokens(0), torch.arange(TOKENS))
    assert model.compute_logits(hidden).shape == (TOKENS, 128)
    model.logits_processor.__dict__["forward"] = lambda head, hidden_states: None
    assert model.compute_logits(hidden) is None


class Noting(QuantizationConfig):
    """Quantizes nothing, and notes what it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, str] = {}

    def get_name(self) -> str:
        return "noting"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Noting:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        self.asked[prefix] = type(layer).__name__


def test_quantization_is_asked_about_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers ask by the names that the checkpoint has: cut or not, embeddings and the output layer with them."""
    expected, noting = reference("gpt_neox", {}, tmp_path), Noting()
    monkeypatch.setattr(through_transformers, "quantization_config", lambda config, model: noting)
    through(tmp_path)
    linears = [
        name
        for name, part in expected.named_modules()
        if isinstance(part, torch.nn.Linear | torch.nn.Embedding)
    ]
    assert sorted(noting.asked) == sorted(linears)
    assert noting.asked["lm_head"] == "ParallelLMHead"
    assert noting.asked["gpt_neox.layers.0.attention.dense"] == "RowParallelLinear"


def construct_on_rank(folder: str) -> str:
    try:
        through(Path(folder))
    except ModelError as error:
        return str(error)
    return "no error"


def test_heads_that_do_not_divide_are_named(two: Ranks, tmp_path: Path) -> None:
    """The plan cuts heads, which is refused before anything is allocated where they do not divide by the ranks."""
    reference("olmo", {"num_key_value_heads": 1}, tmp_path)
    for message in two.run(construct_on_rank, str(tmp_path)):
        assert "layers.0.self_attn: 1 key heads do not divide by 2 ranks" in message


def planned_on_rank(folder: str) -> tuple[Tensor, int, str]:
    """Return what a rank has, with a plan for a model whose own transformers does not cut."""
    attention = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    transformers.GptOssConfig.base_model_tp_plan = {
        **attention,
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    }
    try:
        report = str(through(Path(folder)).report)
        return *logits_of_rank(folder), " ".join(report.split())
    finally:
        transformers.GptOssConfig.base_model_tp_plan = None


def test_what_cannot_be_cut_stays_whole_and_is_reported(two: Ranks, tmp_path: Path) -> None:
    """Attention with sinks and models without a plan are whole on every rank; experts are cut."""
    reference("gpt_oss", DECODERS["gpt_oss"], tmp_path)
    logits, _ = logits_of_rank(str(tmp_path))
    for of_rank, _, text in two.run(planned_on_rank, str(tmp_path)):
        torch.testing.assert_close(of_rank, logits, rtol=0, atol=1e-5)
        assert "8 Linear whole on every rank: attention has sinks" in text
        assert "2 GptOssExperts TransformersFusedMoE" in text
        assert "packed_colwise" not in text
    for of_rank, _ in two.run(logits_of_rank, str(tmp_path)):
        torch.testing.assert_close(of_rank, logits, rtol=0, atol=1e-5)
    assert "its config has no plan" in two.run(report_of_rank, str(tmp_path))[0]


def report_of_rank(folder: str) -> str:
    return " ".join(str(through(Path(folder)).report).split())


def test_nothing_is_allocated_before_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of transformers has no weights of its own: its linear layers are on meta when ours are made."""
    reference("olmo", {}, tmp_path)
    seen = []
    from_meta = Replacer._linear
    monkeypatch.setattr(
        Replacer,
        "_linear",
        lambda self, path, linear: (
            seen.append(linear.weight.device.type) or from_meta(self, path, linear)
        ),
    )
    model = through(tmp_path)
    assert seen == ["meta"] * 14
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_the_report_and_explain_tell_what_runs(tmp_path: Path) -> None:
    """The report counts what became what, lists what stayed, and is plain data; ``explain`` names the ops."""
    reference("stablelm", DECODERS["stablelm"], tmp_path)
    model = through(tmp_path)
    text = str(model.report)
    assert "2 modules call our attention layers" in text
    assert "14     Linear          ReplicatedLinear" in text
    assert "StableLmRotaryEmbedding" in text
    attention = json.loads(json.dumps(model.report.to_dict()))["attention"]
    assert attention == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    explained = str(opgraft.explain(model))
    assert "replicated_linear" in explained
    assert "attention" in explained


@torch.no_grad()
def test_names_without_the_base_model_and_older_ones_are_found(tmp_path: Path) -> None:
    """A checkpoint of the base model alone, as GPT-2's, fills the model; so do names that transformers changes."""
    expected = reference("gpt2", DECODERS["gpt2"], tmp_path)
    model = through(tmp_path)
    assert "transformer.h.0.ln_1.weight" in model.weights_mapper.spellings("h.0.ln_1.weight")
    assert model.weights_mapper.map("LayerNorm.gamma") == "LayerNorm.weight"
    base = {
        name.removeprefix("transformer."): tensor
        for name, tensor in expected.transformer.state_dict().items()
    }
    for parameter in model.parameters():
        parameter.zero_()
    base["h.0.attn.bias"] = torch.ones(
        1, 1, 64, 64
    ).tril()  # a mask, of which older files have the table
    base["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    load_weights(model, base, mapper=model.weights_mapper)
    ids = tokens(0)
    logits = model.compute_logits(model(ids, torch.arange(TOKENS)))
    torch.testing.assert_close(logits, expected(ids[None]).logits[0], rtol=0, atol=1e-5)


def test_a_bias_that_is_no_mask_has_its_place(tmp_path: Path) -> None:
    """Only the square table of a mask is left out; a vector of numbers would be missing from the answer."""
    expected = reference("gpt2", DECODERS["gpt2"], tmp_path)
    model = through(tmp_path)
    given = {**expected.state_dict(), "transformer.h.0.attn.bias": torch.ones(8)}
    with pytest.raises(CheckpointError, match=r"'transformer\.h\.0\.attn\.bias' has no place"):
        load_weights(model, given, mapper=model.weights_mapper)


def test_the_class_is_chosen_by_implementation() -> None:
    """Auto takes what is written here, else transformers; each can be asked for; near matches are named."""
    assert model_class(["LlamaForCausalLM"]).__name__ == "LlamaForCausalLM"
    assert model_class(["LlamaForCausalLM"], "transformers") is TransformersForCausalLM
    assert model_class(["StableLmForCausalLM"]) is TransformersForCausalLM
    assert model_class(["ElectraModel"]).__name__ == "TransformersModel"
    assert model_class(["ElectraForPreTraining"]).__name__ == "TransformersModel"
    assert model_class(["BertForTokenClassification"]).__name__ == "BertModel"
    with pytest.raises(
        ModelError, match=r"StableLmForCausalLM: .*--model\.implementation transformers"
    ):
        model_class(["StableLmForCausalLM"], "opgraft")
    with pytest.raises(
        ModelError, match=r"StableLmForCausalLN: .*did you mean.*StableLmForCausalLM.* of it either"
    ):
        model_class(["StableLmForCausalLN"])


@pytest.mark.parametrize("kind", STACKED_EXPERTS)
@torch.no_grad()
def test_experts_are_layers_of_experts(kind: str, tmp_path: Path) -> None:
    """Experts become ``transformers_fused_moe``, load each expert's weights, and compute as transformers does."""
    expected = reference(kind, STACKED_EXPERTS[kind], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(re.search(r"\.experts\.3\.\w+\.weight$", name) for name in stored)
    model = through(tmp_path)
    layers = [row.path for row in model.report.layers if row.layer == "TransformersFusedMoE"]
    assert len(layers) == 2
    op = model.get_submodule(layers[0])
    assert isinstance(op, TransformersFusedMoE)
    assert (op.num_experts, op.top_k) == (4, 2)
    ids, positions = tokens(0), torch.arange(TOKENS)
    logits = model.compute_logits(model(ids, positions))
    double = copy.deepcopy(expected).double()
    # The other implementations of transformers take no float64.
    double.set_experts_implementation("eager")
    exact = double(ids[None]).logits[0]
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)
    whole = expected.generate(ids[None], max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert greedy_tokens(model, ids.tolist(), 8) == whole[TOKENS:].tolist()


@pytest.mark.parametrize(("kind", "ranks"), [("minimax_m2", 1), ("qwen2_moe", 1), ("qwen2_moe", 2)])
def test_two_ranks_share_the_experts(two: Ranks, kind: str, ranks: int, tmp_path: Path) -> None:
    """Two ranks give the logits of one. Each has half of every expert, or half of the experts."""
    reference(kind, STACKED_EXPERTS[kind], tmp_path)
    logits, size = logits_of_rank(str(tmp_path))
    for of_rank, part in two.run(logits_of_rank, str(tmp_path), ranks):
        torch.testing.assert_close(of_rank, logits, rtol=0, atol=1e-5)
        assert part < 0.8 * size


def test_experts_that_compute_something_else_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts with another formula stay as they are, the report says so, and no weights are loaded for a layer."""
    reference("qwen2_moe", STACKED_EXPERTS["qwen2_moe"], tmp_path)
    modeling = transformers.models.qwen2_moe.modeling_qwen2_moe
    forward = modeling.Qwen2MoeExperts.forward
    monkeypatch.setattr(
        modeling.Qwen2MoeExperts, "forward", lambda self, *given: 2 * forward(self, *given)
    )
    with pytest.raises(
        CheckpointError, match=r"transformers computes .*experts.*, which is not served"
    ):
        through(tmp_path)
