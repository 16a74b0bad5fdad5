"""Gains of grafting models with experts or state spaces, over transformers' own code with the same weights.

Both sides run in this process, in turns: one prompt of some tokens, without a cache. Weights are random.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import opgraft
import torch
import transformers
from timing import Row, ratio, report

TOKENS = {1: 1e-5, 64: 1e-5, 512: 5e-5}
"""Of a prompt, with the largest difference of logits in float32 over the largest logit.

Rounding grows with the steps of a state: 512 take transformers' own Mamba-2 up to 4.7e-5 from float64. In half
types a near tie between experts may be decided the other way.
"""
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 5
SIZES = {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 1024}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 1024}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Olmoe": {**HEADS, "num_experts": 32, "num_experts_per_tok": 8},
    "Mamba": {"state_size": 16},
    "Mamba2": {"num_heads": 32, "head_dim": 64, "n_groups": 1, "state_size": 64},
}


@torch.inference_mode()
def rows() -> list[Row]:
    opgraft.load_plugins()
    return [row for family in FAMILIES for dtype in DTYPES for row in measured(family, dtype)]


def measured(family: str, dtype: torch.dtype) -> Iterator[Row]:
    """Measure the time of a grafted model over that of the plain one, and how far their logits are apart."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    # As a model's: what is made in inference mode cannot be packed.
    with torch.inference_mode(False):
        plain: Any = (
            getattr(transformers, f"{family}ForCausalLM")(config)
            .to(dtype)
            .eval()
            .requires_grad_(False)
        )
        grafted = copy.deepcopy(plain)
        opgraft.graft(grafted)
    name = f"{family} {str(dtype).removeprefix('torch.')}"
    for tokens, limit in TOKENS.items():
        prompt = torch.randint(SIZES["vocab_size"], (1, tokens))
        ours, theirs = (partial(model, prompt, use_cache=False) for model in (grafted, plain))
        label = f"{name}, {tokens} tokens, grafted"
        yield ratio(
            f"{label} / plain", None, ours, theirs, number=4 if tokens == 1 else 1, rounds=ROUNDS
        )
        if dtype == torch.float32:
            expected = theirs().logits
            apart = ((ours().logits - expected).abs().max() / expected.abs().max()).item()
            yield Row(
                f"{label}: largest difference", apart, limit, "over the largest logit of plain"
            )


if __name__ == "__main__":
    report("What grafting gains on models with experts and state spaces.", rows)
