"""Costs of shadow mode on a whole model: a decoder of 45M weights whose ops a plugin's kernels compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import opgraft
import torch
import transformers
from opgraft import OpgraftConfig, set_config
from opgraft.config import ShadowConfig
from timing import Row, ratio, report
from torch import nn

SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 8192,
}
"""Sizes of SmolLM2-135M, with a third of its layers and a sixth of its words."""

TOKENS = {"a step of 1 token": (1, 10), "a prompt of 256 tokens": (256, 1)}
"""By name: the tokens of a call, and the calls of a round."""

ROUNDS = 7
OFF, ON = OpgraftConfig(), OpgraftConfig(shadow=ShadowConfig(share=1))
SHARED = OpgraftConfig(shadow=ShadowConfig(share=0.01))


def model(weights: dict[str, torch.Tensor] | None, config: OpgraftConfig) -> nn.Module:
    """Make a model and graft it under a config; those with the same weights share them."""
    with torch.device("cpu" if weights is None else "meta"):
        made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    if weights is not None:
        made.load_state_dict(weights, assign=True)
        made.model.rotary_emb = type(made.model.rotary_emb)(made.config)  # which is no weight
    grafted: nn.Module = made.eval().requires_grad_(False)
    with set_config(config):
        opgraft.graft(grafted)
    return grafted


def measure() -> list[Row]:
    torch.manual_seed(0)
    never = model(None, OFF)
    weights = {name: value.detach() for name, value in never.state_dict().items()}
    off, shared, always = (model(weights, config) for config in (ON, SHARED, ON))
    with set_config(OFF):
        opgraft.rebind(off)
    rows = []
    for name, (tokens, number) in TOKENS.items():
        ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens))
        without = partial(never, ids, use_cache=False)
        for what, limit, other in (
            ("off again", 1.02, off),
            ("share=0.01", None, shared),
            ("share=1", None, always),
        ):
            with torch.inference_mode():
                call = partial(other, ids, use_cache=False)
                rows.append(
                    ratio(
                        f"{name}, {what} / never on",
                        limit,
                        call,
                        without,
                        number=number,
                        rounds=ROUNDS,
                    )
                )
    found = opgraft.shadow_report().rows
    if not any(row.compared for row in found) or any(row.drifted for row in found):
        raise RuntimeError(
            f"nothing was compared, or something differs:\n{opgraft.shadow_report()}"
        )
    return rows


if __name__ == "__main__":
    report("What shadow mode costs on a whole model.", measure)
