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
    "llama": ("LlamaConfig", SHARED_HEADS, {"linear": 9, "rms_norm": 5, "gated_mlp": 2}),
    "qwen2": ("Qwen2Config", SHARED_HEADS, {"linear": 9, "rms_norm": 5, "gated_mlp": 2}),
    "qwen3": ("Qwen3Config", SHARED_HEADS, {"linear": 9, "rms_norm": 9, "gated_mlp": 2}),
    "mistral": (
        "MistralConfig",
        {**SHARED_HEADS, "sliding_window": 4},
        {"linear": 9, "rms_norm": 5, "gated_mlp": 2},
    ),
    "gemma": ("GemmaConfig", SHARED_HEADS, {"linear": 9, "gemma_rms_norm": 5, "gated_mlp": 2}),
    "gemma2": ("Gemma2Config", SHARED_HEADS, {"linear": 9, "gemma_rms_norm": 9, "gated_mlp": 2}),
    "gemma3": (
        "Gemma3TextConfig",
        SHARED_HEADS,
        {"linear": 9, "gemma_rms_norm": 13, "gated_mlp": 2},
    ),
    "mixtral": (
        "MixtralConfig",
        {**SHARED_HEADS, "num_local_experts": 4},
        {"linear": 9, "rms_norm": 5, "experts": 2},
    ),
    "bert": (
        "BertConfig",
        SMALL,
        {"linear": 8, "linear_act": 2, "linear_add_norm": 4, "layer_norm": 2, "gelu": 1},
    ),
    "vit": ("ViTConfig", {**SMALL, **IMAGE}, {"linear": 9, "mlp": 2, "layer_norm": 5}),
}
GENERATING = [name for name in FAMILIES if name not in ("bert", "vit")]


def build(family: str, **changes: Any) -> Any:
    """A model with weights that make every norm and bias matter."""
    name, arguments, _ = FAMILIES[family]
    arguments = {
        key: value for key, value in arguments.items() if family != "vit" or "token" not in key
    }
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
    assert not {
        name
        for name in sources
        if "Norm" in name or "Linear" in name or "GELU" in name or "SiLU" in name
    }
    assert {
        row.source for row in report.left_alone if "attention implementation" in row.reason
    } == ({"Gemma2Attention"} if family == "gemma2" else set())


@pytest.mark.parametrize("family", GENERATING)
def test_generation_is_the_same(family: str) -> None:
    """Greedy generation with a cache, over a padded batch, yields the same tokens."""
    model = build(family)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    before = model.generate(**padded(), **options)
    graft(model)
    assert torch.equal(model.generate(**padded(), **options), before)


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
    assert (copied.config._attn_implementation, model.config._attn_implementation) == (
        "sdpa",
        "sdpa",
    )
    assert not any("opgraft" in name for name, _ in copied.named_modules())
    assert torch.equal(logits(copied), before)
    torch.testing.assert_close(logits(model), before)


def test_a_compiled_model_agrees() -> None:
    """A grafted model compiles without a graph break, for several lengths."""
    model = build("llama", num_hidden_layers=1)
    graft(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # torch 2.8 cannot trace how transformers makes a cache, hence none.
    for length in (7, 5, 4):
        ids = inputs("llama")["input_ids"][:, :length]
        torch.testing.assert_close(
            compiled(input_ids=ids, use_cache=False).logits, model(input_ids=ids).logits
        )


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
    assert counts["scaled_dot_product_attention"].implementation.endswith(
        "FastAttention.forward_oot"
    )
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
