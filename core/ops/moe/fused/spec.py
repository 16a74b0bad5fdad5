"""Specs of experts, told choice by choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from opgraft.ops.activation.spec import gelu, silu
from opgraft.ops.moe import fused as ops
from opgraft.ops.moe.fused import functional
from opgraft.ops.moe.fused.methods import FusedMoEConfig
from opgraft.ops.spec import Arguments, Draw, OpSpec, of_transformers
from torch import Tensor

EXPERTS, INTERMEDIATE, TOPK = 5, 3, 2


def _swigluoai(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.reshape(-1, 2).unbind(-1)
    return (up.clamp(-7.0, 7.0) + 1) * silu(1.702 * gate.clamp(max=7.0)) / 1.702


def _gated_activation(activation: str, gate_up: Tensor) -> Tensor:
    if activation == "swigluoai":
        return _swigluoai(gate_up)
    gate, up = gate_up.reshape(2, -1).unbind()
    return (silu(gate) if activation == "silu" else gelu(gate)) * up


def fused_experts_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    result = torch.zeros_like(x)
    for token, (weights, ids) in enumerate(zip(topk_weights, topk_ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            if expert >= 0:
                gate_up = w13[expert].mv(x[token]) + (0 if w13_bias is None else w13_bias[expert])
                output = w2[expert].mv(_gated_activation(activation, gate_up)) + (
                    0 if w2_bias is None else w2_bias[expert]
                )
                result[token] += weight * output
    return result


def _expert_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    tokens = math.prod(lead)
    return {
        "x": draw(tokens, size),
        "w13": draw(EXPERTS, 2 * INTERMEDIATE, size).div_(size**0.5),
        "w2": draw(EXPERTS, size, INTERMEDIATE).div_(INTERMEDIATE**0.5),
        "topk_weights": draw(tokens, TOPK),
        "topk_ids": ids(draw, lead, size),
    }


def ids(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw distinct experts for each token."""
    shuffled = torch.rand(math.prod(lead), EXPERTS, generator=draw.generator).argsort(-1)
    return shuffled[:, :TOPK].to(torch.int32)


def _two_experts(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw from the second expert and the last but one, so that others have no tokens; int64."""
    return 1 + 2 * draw.integers(0, 2, (math.prod(lead), TOPK))


def elsewhere(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    return draw.integers(-1, EXPERTS, (math.prod(lead), TOPK)).to(torch.int32)


def _bias(rows: int) -> Any:
    return lambda draw, lead, size: draw(EXPERTS, rows or size)


def layer_of(weights: Arguments) -> SimpleNamespace:
    """Return a layer that has weights, which are called as arguments, under the names that weight methods give them."""
    names = {"w13": "w13_weight", "w2": "w2_weight"}
    return SimpleNamespace(**{names.get(name, name): weight for name, weight in weights.items()})


def _experts_op(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu", **weights: Any
) -> Any:
    config = FusedMoEConfig(
        num_experts=len(weights["w2"]),
        experts_per_token=topk_ids.shape[1],
        hidden_dim=x.shape[1],
        intermediate_size_per_partition=weights["w2"].shape[2],
        activation=activation,
        has_bias=weights.get("w13_bias") is not None,
    )
    return ops.UnquantizedFusedMoEMethod(config), (layer_of(weights), x, topk_weights, topk_ids)


def _mixtral(
    experts: Any,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **settings: Any,
) -> Any:
    if settings or int(topk_ids.min()) < 0:
        return None
    theirs = experts(_config(x, w13, w2))
    weights = {"gate_up_proj": w13, "down_proj": w2}
    return torch.func.functional_call(theirs, weights, (x, topk_ids.long(), topk_weights))


def _gpt_oss(
    experts: Any,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Any:
    if activation != "swigluoai" or w13_bias is None or w2_bias is None:
        return None
    theirs = experts(_config(x, w13, w2))
    weights = {
        "gate_up_proj": w13.transpose(1, 2),
        "gate_up_proj_bias": w13_bias,
        "down_proj": w2.transpose(1, 2),
        "down_proj_bias": w2_bias,
    }
    return torch.func.functional_call(theirs, weights, (x, topk_ids.long(), topk_weights))


def _config(x: Tensor, w13: Tensor, w2: Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        num_local_experts=w13.shape[0],
        hidden_size=x.shape[1],
        intermediate_size=w2.shape[2],
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="eager",
    )


def _expert_flops(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> int:
    return 2 * topk_ids.numel() * (w13[0].numel() + w2[0].numel())


SPECS = (
    OpSpec(
        functional.fused_experts,
        _expert_inputs,
        fused_experts_reference,
        module=_experts_op,
        variants={
            "": {},
            "biases": {"w13_bias": _bias(2 * INTERMEDIATE), "w2_bias": _bias(0)},
            "gelu": {"activation": "gelu"},
            "swigluoai": {"activation": "swigluoai"},
            "swigluoai with biases": {
                "activation": "swigluoai",
                "w13_bias": _bias(2 * INTERMEDIATE),
                "w2_bias": _bias(0),
            },
            "experts without tokens": {"topk_ids": _two_experts},
            "experts elsewhere": {"topk_ids": elsewhere},
        },
        sizes=(1, 9, 96),
        large=(((83,), 256),),
        tolerances={torch.float16: (1e-2, 1e-2), torch.bfloat16: (5e-2, 2e-2)},
        outside=(
            of_transformers("models.mixtral.modeling_mixtral.MixtralExperts", _mixtral),
            of_transformers("models.gpt_oss.modeling_gpt_oss.GptOssExperts", _gpt_oss),
        ),
        flops=_expert_flops,
    ),
)
