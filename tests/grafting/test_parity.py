"""How near grafted models stay to plain ones where kernels run: in inference, wide enough for weights to be packed."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from opgraft import graft, ungraft
from opgraft.ops import GatedMLP
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers")

COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "pad_token_id": 0}
DECODER = {**COMMON, "num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "AutoModelForCausalLM", DECODER),
    "qwen2": ("Qwen2Config", "AutoModelForCausalLM", DECODER),
    "qwen3": ("Qwen3Config", "AutoModelForCausalLM", {**DECODER, "head_dim": 32}),
    "mistral": ("MistralConfig", "AutoModelForCausalLM", DECODER),
    "gemma": ("GemmaConfig", "AutoModelForCausalLM", {**DECODER, "head_dim": 32}),
    "gemma2": ("Gemma2Config", "AutoModelForCausalLM", {**DECODER, "head_dim": 32}),
    "gemma3": ("Gemma3TextConfig", "AutoModelForCausalLM", {**DECODER, "head_dim": 32}),
    "mixtral": ("MixtralConfig", "AutoModelForCausalLM", {**DECODER, "num_local_experts": 4}),
    "bert": ("BertConfig", "AutoModelForMaskedLM", COMMON),
    "vit": (
        "ViTConfig",
        "AutoModelForImageClassification",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 9,
        },
    ),
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def build(family: str, width: int) -> Any:
    """A model with weights that make every norm and bias matter."""
    config, auto, arguments = FAMILIES[family]
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, **arguments}
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(getattr(transformers, config)(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def logits(model: Any, family: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    inputs = {"input_ids": torch.randint(3, 99, (2, 17), generator=generator)}
    if family == "vit":
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(dtype)}
    with torch.no_grad():
        result: torch.Tensor = model(**inputs).logits
    return result


@each_family
def test_float32(family: str) -> None:
    """Logits agree to 1e-5 with kernels that pack weights, join projections and fuse what follows them."""
    model = build(family, 512)
    expected, values = logits(model, family), {n: t.clone() for n, t in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    graft(model)
    torch.testing.assert_close(logits(model, family), expected, atol=1e-5, rtol=1e-5)
    ungraft(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters.values())
    assert torch.equal(logits(model, family), expected)


@each_family
def test_bfloat16(family: str) -> None:
    """The grafted model is no farther from the same weights in float32 than the plain one, but for a tenth.

    Kernels that round once and kernels that round between differ by more than one rounding in the end, so that the two
    models are compared by their distance from the truth, as root mean square.
    """
    model = build(family, 128).to(torch.bfloat16)
    truth = logits(copy.deepcopy(model).float(), family)
    plain = logits(model, family)
    graft(model)
    grafted = logits(model, family)
    assert grafted.dtype == torch.bfloat16
    distances = [(each.float() - truth).square().mean().sqrt() for each in (grafted, plain)]
    assert distances[0] <= 1.1 * distances[1]
    assert distances[0] > 0
    torch.testing.assert_close(grafted, plain, atol=5e-2, rtol=5e-2)


@each_family
def test_the_report_is_whole(family: str) -> None:
    """Each module that has parameters of its own or no children is in one row, or in a composite's; none is in two."""
    model = build(family, 64)
    paths = {
        path for path, module in model.named_modules() if not module._modules or module._parameters
    }
    report = graft(model)
    rows = [row.path for row in (*report.replaced, *report.left_alone)]
    assert len(rows) == len(set(rows))
    within = {f"{row.path}.{part.path}" for row in report.replaced for part in row.parts}
    inside = {
        path
        for path in paths
        for row in report.replaced
        if row.parts and path.startswith(f"{row.path}.")
    }
    assert paths <= set(rows) | inside
    assert not set(rows) & within


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_saved_and_trained(family: str, tmp_path) -> None:
    """A checkpoint of joined weights loads as a plain model; training steps are those of the plain model."""
    model, plain = build(family, 64), build(family, 64)
    graft(model)
    assert isinstance(model.model.layers[0].mlp, GatedMLP)
    for each in (model, plain):
        each.train()
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            ids = torch.arange(3, 20)[None]
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        each.eval()
    torch.testing.assert_close(logits(model, family), logits(plain, family), atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(loaded, family), logits(model, family), atol=1e-5, rtol=1e-5)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(model.model.layers.state_dict(), tmp_path / "layers.safetensors")
    saved = safetensors.load_file(tmp_path / "layers.safetensors")
    assert all(
        torch.equal(saved[name], tensor) for name, tensor in model.model.layers.state_dict().items()
    )
