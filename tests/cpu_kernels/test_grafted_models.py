"""Grafted models whose experts and scans run the kernels: logits and tokens are those of the models by themselves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from opgraft import graft
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")
os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
transformers = pytest.importorskip("transformers", minversion="5.20")

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2},
}
KERNELS = {
    "Mamba": {"selective_scan", "selective_state_update"},
    "Mamba2": {"selective_state_update"},
    "Mixtral": {"unquantized_fused_moe"},
    "GptOss": {"unquantized_fused_moe"},
}
IDS = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(1))


def results(model: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits, model.generate(IDS, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("family", MODELS)
def test_models(plugin: Path, family: str) -> None:
    """Logits agree and greedy tokens are the same; the report names the kernels."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **MODELS[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("A_log"):
            nn.init.normal_(parameter, std=0.2)
    logits, tokens = results(model)
    report = graft(model)
    served = [*report.replaced, *(part for row in report.replaced for part in row.parts)]
    assert {row.op for row in served if row.implementation.endswith(".forward_cpu")} >= KERNELS[
        family
    ]
    got = results(model)
    torch.testing.assert_close(got[0], logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(got[1], tokens)
