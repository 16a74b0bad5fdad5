"""Specs of experts. The reference computes one choice of one token at a time."""

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

EXPERTS = 5
INTERMEDIATE = 3
TOPK = 2


def _swigluoai(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.reshape(-1, 2).unbind(-1)
    gate = gate.clamp(max=7.0)
    up = up.clamp(-7.0, 7.0)
    # gate · sigmoid(1.702 · gate)
    activated = silu(1.702 * gate) / 1.702
    return (up + 1) * activated


def _gated_activation(activation: str, gate_up: Tensor) -> Tensor:
    if activation == "swigluoai":
        return _swigluoai(gate_up)
    gate, up = gate_up.reshape(2, -1).unbind()
    activated = silu(gate) if activation == "silu" else gelu(gate)
    return activated * up


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
    """Return the sums in float64, as documented by ``fused_experts``."""
    result = torch.zeros_like(x)
    for token, ids in enumerate(topk_ids.tolist()):
        for choice, expert in enumerate(ids):
            if expert < 0:
                continue
            gate_up = w13[expert].mv(x[token])
            if w13_bias is not None:
                gate_up = gate_up + w13_bias[expert]
            hidden = _gated_activation(activation, gate_up)
            output = w2[expert].mv(hidden)
            if w2_bias is not None:
                output = output + w2_bias[expert]
            result[token] += topk_weights[token, choice] * output
    return result


def _expert_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    tokens = math.prod(lead)
    return {
        "x": draw(tokens, size),
        # Divided so that outputs are about as large as inputs.
        "w13": draw(EXPERTS, 2 * INTERMEDIATE, size).div_(size**0.5),
        "w2": draw(EXPERTS, size, INTERMEDIATE).div_(INTERMEDIATE**0.5),
        "topk_weights": draw(tokens, TOPK),
        "topk_ids": ids(draw, lead, size),
    }


def ids(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw distinct experts for each token."""
    tokens = math.prod(lead)
    shuffled = torch.rand(tokens, EXPERTS, generator=draw.generator).argsort(-1)
    return shuffled[:, :TOPK].to(torch.int32)


def _two_experts(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw the experts 1 and 3 only, so that others have no tokens; int64."""
    return 1 + 2 * draw.integers(0, 2, (math.prod(lead), TOPK))


def elsewhere(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw experts, with -1 among them."""
    return draw.integers(-1, EXPERTS, (math.prod(lead), TOPK)).to(torch.int32)


def _gate_up_bias(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    return draw(EXPERTS, 2 * INTERMEDIATE)


def _down_bias(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    return draw(EXPERTS, size)


BIASES: Arguments = {"w13_bias": _gate_up_bias, "w2_bias": _down_bias}


def layer_of(weights: Arguments) -> SimpleNamespace:
    """Return a layer with the weights of a call: ``w13`` becomes ``layer.w13_weight``."""
    layer = SimpleNamespace()
    for name, weight in weights.items():
        is_matrix = name in ("w13", "w2")
        setattr(layer, f"{name}_weight" if is_matrix else name, weight)
    return layer


def _experts_op(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu", **weights: Any
) -> Any:
    experts, _, intermediate = weights["w2"].shape
    config = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=topk_ids.shape[1],
        hidden_dim=x.shape[1],
        intermediate_size_per_partition=intermediate,
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
    # Mixtral has silu without biases, and no expert elsewhere.
    if settings or int(topk_ids.min()) < 0:
        return None
    theirs = experts(_transformers_config(x, w13, w2))
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

    theirs = experts(_transformers_config(x, w13, w2))
    # gpt-oss stores weights as [experts, in, out].
    weights = {
        "gate_up_proj": w13.transpose(1, 2),
        "gate_up_proj_bias": w13_bias,
        "down_proj": w2.transpose(1, 2),
        "down_proj_bias": w2_bias,
    }
    return torch.func.functional_call(theirs, weights, (x, topk_ids.long(), topk_weights))


def _transformers_config(x: Tensor, w13: Tensor, w2: Tensor) -> SimpleNamespace:
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
    weights_of_expert = w13[0].numel() + w2[0].numel()
    return 2 * topk_ids.numel() * weights_of_expert


SPECS = (
    OpSpec(
        functional.fused_experts,
        _expert_inputs,
        fused_experts_reference,
        module=_experts_op,
        variants={
            "": {},
            "biases": BIASES,
            "gelu": {"activation": "gelu"},
            "swigluoai": {"activation": "swigluoai"},
            "swigluoai with biases": {"activation": "swigluoai", **BIASES},
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
