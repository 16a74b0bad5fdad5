"""Grafting models of transformers: small ones with random weights, built offline from configurations."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from opgraft import graft, ungraft
from opgraft.ops import CustomOp, ScaledDotProductAttention
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED_HEADS = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
IMAGE = {"image_size": 16, "patch_size": 8, "num_labels": 5}

# family: (configuration, its arguments, ops that a model of two layers gets)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("LlamaConfig", SHARED_HEADS, {"linear": 15, "rms_norm": 5, "silu": 2}),
    "qwen2": ("Qwen2Config", SHARED_HEADS, {"linear": 15, "rms_norm": 5, "silu": 2}),
    "qwen3": ("Qwen3Config", SHARED_HEADS, {"linear": 15, "rms_norm": 9, "silu": 2}),
    "mistral": ("MistralConfig", {**SHARED_HEADS, "sliding_window": 4}, {"linear": 15, "rms_norm": 5, "silu": 2}),
    "gemma": ("GemmaConfig", SHARED_HEADS, {"linear": 15, "gemma_rms_norm": 5, "gelu": 2}),
    "gemma2": ("Gemma2Config", SHARED_HEADS, {"linear": 15, "gemma_rms_norm": 9, "gelu": 2}),
    "gemma3": ("Gemma3TextConfig", SHARED_HEADS, {"linear": 15, "gemma_rms_norm": 13, "gelu": 2}),
    "mixtral": ("MixtralConfig", {**SHARED_HEADS, "num_local_experts": 4}, {"linear": 9, "rms_norm": 5, "silu": 2}),
    "bert": ("BertConfig", SMALL, {"linear": 14, "layer_norm": 6, "gelu": 3}),
    "vit": ("ViTConfig", {**SMALL, **IMAGE}, {"linear": 13, "layer_norm": 5, "gelu": 2}),
}
GENERATING = [name for name in FAMILIES if name not in ("bert", "vit")]


def build(family: str, **changes: Any) -> Any:
    """A model with weights that make every norm and bias matter."""
    name, arguments, _ = FAMILIES[family]
    arguments = {key: value for key, value in arguments.items() if family != "vit" or "token" not in key}
    config = getattr(transformers, name)(**{**arguments, **changes})
    auto = {"bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}.get(
        family, "AutoModelForCausalLM"
    )
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def inputs(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(3, 99, (2, 7), generator=generator)}


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    return {**inputs("llama"), "attention_mask": mask}


def logits(model: Any, family: str = "llama", **more: Any) -> torch.Tensor:
    result: torch.Tensor = model(**{**inputs(family), **more}).logits
    return result


def structure(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_agree_and_come_back(family: str) -> None:
    """Logits agree to 1e-5, everything the ops know is replaced, and ungraft gives the same modules and bits."""
    model = build(family)
    before, modules = logits(model, family), structure(model)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    implementation = model.config._attn_implementation
    report = graft(model)
    expected = Counter(FAMILIES[family][2])
    if family != "gemma2":
        expected["scaled_dot_product_attention"] = 2
    assert Counter(row.op for row in report.replaced) == expected
    torch.testing.assert_close(logits(model, family), before, atol=1e-5, rtol=0)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(len(line) <= 80 for line in str(report).splitlines())
    ungraft(model)
    assert structure(model) == modules
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, family), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_recognisable_stays(family: str) -> None:
    """What is left alone are embeddings, rotary tables, dropout and the like, each with a reason."""
    report = graft(build(family))
    assert all(row.reason for row in report.left_alone)
    sources = {row.source for row in report.left_alone}
    assert not {name for name in sources if "Norm" in name or "Linear" in name or "GELU" in name or "SiLU" in name}
    assert {row.source for row in report.left_alone if "attention implementation" in row.reason} == (
        {"Gemma2Attention"} if family == "gemma2" else set()
    )
    if family == "mixtral":
        assert "MixtralExperts" in sources


def test_masks_reach_the_attention_op() -> None:
    """With padding, with sliding windows and in one-token steps the grafted attention agrees with transformers'."""
    for family in ("llama", "mistral", "gemma3", "bert"):
        model = build(family)
        before = model(**padded()).logits
        graft(model)
        torch.testing.assert_close(model(**padded()).logits, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", GENERATING)
def test_generation_is_the_same(family: str) -> None:
    """Greedy generation with a cache, over a padded batch, yields the same tokens."""
    model = build(family)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    before = model.generate(**padded(), **options)
    graft(model)
    assert torch.equal(model.generate(**padded(), **options), before)


def test_generation_with_a_static_cache() -> None:
    """A cache that is longer than the prompt, in which causal attention must not see the empty rest, works too."""
    model = build("llama")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    ids = inputs("llama")["input_ids"]
    options["attention_mask"] = torch.ones_like(ids)
    options["disable_compile"] = True
    before = model.generate(ids, **options)
    graft(model)
    assert torch.equal(model.generate(ids, **options), before)


@pytest.mark.parametrize("family", ["llama", "gemma", "bert"])
def test_gradients_agree(family: str) -> None:
    """Every parameter gets the gradient that it gets without grafting, in training mode."""
    gradients = []
    for grafted in (False, True):
        model = build(family).train()
        if grafted:
            graft(model)
        torch.manual_seed(3)
        logits(model, family).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_dropout_in_training_draws_the_same_numbers() -> None:
    """Attention dropout applies in training and only there."""
    model = build("llama", attention_dropout=0.5).train()
    torch.manual_seed(4)
    before = logits(model)
    graft(model)
    torch.manual_seed(4)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)
    assert not torch.equal(logits(model), logits(model))
    model.eval()
    assert torch.equal(logits(model), logits(model))


def test_autocast_agrees() -> None:
    """Under autocast the grafted model computes in the same types."""
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        before = logits(model)
        graft(model)
        torch.testing.assert_close(logits(model), before)


def test_bfloat16_agrees() -> None:
    """A model in bfloat16 stays within that type's rounding."""
    for family in ("llama", "gemma"):
        model = build(family).to(torch.bfloat16)
        before = logits(model, family)
        graft(model)
        torch.testing.assert_close(logits(model, family), before)


def test_ties_survive() -> None:
    """A head that shares the embedding's weight shares it still, and after another tie_weights too."""
    model = build("gemma")
    graft(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_saving_and_loading(tmp_path) -> None:
    """A grafted model saves a checkpoint that loads as a plain one, without a word of opgraft in it."""
    model = build("llama")
    before = logits(model)
    graft(model)
    model.save_pretrained(tmp_path)
    assert "opgraft" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(logits(loaded), before)


def test_a_deep_copy_stands_on_its_own() -> None:
    """A copy runs its own attention ops and is ungrafted without touching the model."""
    model = build("llama")
    before = logits(model)
    graft(model)
    copied = copy.deepcopy(model)
    ungraft(copied)
    assert (copied.config._attn_implementation, model.config._attn_implementation) == ("sdpa", "opgraft")
    assert torch.equal(logits(copied), before)
    torch.testing.assert_close(logits(model), before)


def test_a_saved_model_runs_in_a_new_process(tmp_path) -> None:
    """Loading a pickled grafted model registers its attention function where it is loaded."""
    model = build("llama")
    graft(model)
    torch.save((model, inputs("llama"), logits(model)), tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model, inputs, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.testing.assert_close(model(**inputs).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True)


def test_a_compiled_model_agrees() -> None:
    """A grafted model compiles without a graph break, for several lengths."""
    model = build("llama")
    graft(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (7, 5, 4):
        ids = inputs("llama")["input_ids"][:, :length]
        torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)


def test_another_model_with_the_same_configuration_keeps_its_attention() -> None:
    """Models that share a configuration object do not share ops: each falls back to transformers' own function."""
    model = build("llama")
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    before = logits(other)
    graft(model)
    assert model.config is other.config
    assert torch.equal(logits(other), before)
    graft(other)
    ungraft(model)
    assert torch.equal(logits(model), before)
    torch.testing.assert_close(logits(other), before)
    report = graft(other)
    assert Counter(row.op for row in report.replaced) == {"scaled_dot_product_attention": 2}


def test_eager_attention_and_instance_forwards_stay() -> None:
    """Attention is switched only where sdpa was chosen and the class's own forward runs."""
    report = graft(build("llama", attn_implementation="eager"))
    assert {row.reason for row in report.left_alone if row.source == "LlamaAttention"} == {
        "its attention implementation is 'eager', not 'sdpa'"
    }
    model = build("llama")
    layer = model.model.layers[0].self_attn
    layer.forward = type(layer).forward.__get__(layer)
    report = graft(model)
    assert [row.path for row in report.replaced if "attention" in row.op] == ["model.layers.1.self_attn"]
    ungraft(model)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_look_at_the_name_of_the_implementation_stay(monkeypatch) -> None:
    """Where a model's code compares the implementation with sdpa, switching would change what it does."""
    model = build("llama")
    modelling = sys.modules[type(model).__module__]

    class LooksAtTheName:
        def forward(self) -> bool:
            return self.config._attn_implementation in ("eager", "sdpa")

    monkeypatch.setattr(LooksAtTheName, "__module__", modelling.__name__)
    monkeypatch.setattr(modelling, "LooksAtTheName", LooksAtTheName, raising=False)
    reasons = {row.reason for row in graft(model).left_alone if row.source == "LlamaAttention"}
    assert reasons == {"its model does other things when the implementation is not called 'sdpa'"}


def test_sdpa_that_other_code_has_replaced_stays(monkeypatch) -> None:
    """If sdpa no longer means transformers' own function, the attention that was asked for is kept."""
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", lambda *args, **kwargs: None)
    report = graft(build("llama"))
    assert {row.reason for row in report.left_alone if row.source == "LlamaAttention"} == {
        "other code has registered its own 'sdpa' attention"
    }


def test_features_of_transformers_function_are_left_to_it() -> None:
    """What the op was not made for, such as a position bias, is computed by transformers' own function."""

    class Refusing(ScaledDotProductAttention):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise AssertionError("the op was called")

    graft(build("llama"))  # registers the function
    module = nn.Module()
    module._modules["opgraft_attention"] = Refusing()
    interface = transformers.AttentionInterface()
    query, key, value = (torch.randn(2, 4, 3, 8) for _ in range(3))
    bias = torch.randn(1, 4, 3, 3)
    arguments = (module, query, key, value, None)
    expected, _ = interface["sdpa"](*arguments, position_bias=bias)
    assert torch.equal(interface["opgraft"](*arguments, position_bias=bias)[0], expected)
    with pytest.raises(ValueError, match="softcap"):
        interface["opgraft"](*arguments, softcap=30.0)
    with pytest.raises(AssertionError, match="the op was called"):
        interface["opgraft"](*arguments, position_bias=None, output_attentions=False, sliding_window=4)


@pytest.mark.parametrize("masked", [False, True, "per head"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 5), (3, 5)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("value_size", [8, 6])
def test_the_attention_function_agrees_with_transformers(masked, queries, keys, groups, value_size) -> None:
    """Over masks, lengths, shared heads and head sizes, causal or not, both functions return the same."""
    graft(build("llama"))
    interface = transformers.AttentionInterface()
    module = nn.Module()
    module.num_key_value_groups = groups
    query, key = torch.randn(2, 4, queries, 8), torch.randn(2, 4 // groups, keys, 8)
    value = torch.randn(2, 4 // groups, keys, value_size)
    mask = torch.rand(2, 4 if masked == "per head" else 1, queries, keys).round().bool() if masked else None
    if mask is not None:
        mask[..., 0] = True
    for is_causal in (None, True, False):
        expected, _ = interface["sdpa"](module, query, key, value, mask, scaling=0.3, is_causal=is_causal)
        module._modules["opgraft_attention"] = ScaledDotProductAttention()
        mine, weights = interface["opgraft"](module, query, key, value, mask, scaling=0.3, is_causal=is_causal)
        assert weights is None
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)


def test_nested_configurations_are_switched_one_by_one() -> None:
    """In a model of several parts only those with sdpa change, and each gets back what it had."""
    vision = {**{key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}, **IMAGE}
    config = transformers.Gemma3Config(
        text_config={**SHARED_HEADS},
        vision_config={**vision, "intermediate_size": 128, "vision_use_head": False},
        mm_tokens_per_image=4,
        attn_implementation={"": "sdpa", "text_config": "sdpa", "vision_config": "eager"},
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert before[1:] == ["sdpa", "eager"]
    report = graft(model)
    attended = [row.path for row in report.replaced if "attention" in row.op]
    assert attended
    assert all("language_model" in path for path in attended)
    assert [part._attn_implementation for part in parts[1:]] == ["opgraft", "eager"]
    ungraft(model)
    assert [part._attn_implementation for part in parts] == before


def test_a_model_inside_a_plain_module() -> None:
    """The model may be part of something larger, which need not know of transformers."""
    model = nn.ModuleDict({"encoder": build("bert"), "head": nn.Linear(99, 3)})
    report = graft(model)
    assert Counter(row.op for row in report.replaced)["scaled_dot_product_attention"] == 2
    assert any(row.path == "head" for row in report.replaced)


def test_a_replacement_shows_up_in_the_report() -> None:
    """Registered kernels take the places of the ops, attention included, and the report names them."""

    @CustomOp.register_oot("RMSNorm")
    class FastRMSNorm(CustomOp.op_registry["rms_norm"]):  # type: ignore[misc]
        def forward_oot(self, x, residual=None):
            return super().forward_native(x, residual)

    @CustomOp.register_oot(name="ScaledDotProductAttention")
    class FastAttention(ScaledDotProductAttention):
        def forward_oot(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = super().forward_native(*args, **kwargs)
            return out

    model = build("llama")
    before = logits(model)
    report = graft(model)
    counts = {row.op: row for row in report.counts()}
    assert counts["rms_norm"].implementation.endswith("FastRMSNorm.forward_oot")
    assert counts["rms_norm"].provider.name != "opgraft"
    assert counts["scaled_dot_product_attention"].implementation.endswith("FastAttention.forward_oot")
    assert counts["linear"].provider.name == "opgraft"
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)


def test_grafting_does_not_import_transformers() -> None:
    """A model without transformers is grafted without importing it."""
    program = (
        "import sys, torch, opgraft\n"
        "opgraft.graft(torch.nn.Sequential(torch.nn.Linear(2, 2)))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
