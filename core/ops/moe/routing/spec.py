"""Specs of routing, told token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from opgraft.ops.moe import routing as ops
from opgraft.ops.moe.routing import functional
from opgraft.ops.spec import Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn


def _token(
    scores: list[float], biased: list[float], topk: int, groups: int, kept: int, best_of: int
) -> tuple[list[float], list[int]]:
    size = len(scores) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    merit = [
        sum(sorted((biased[expert] for expert in group), reverse=True)[:best_of])
        for group in members
    ]
    chosen = sorted(range(groups), key=lambda group: -merit[group])[:kept]
    ranked = sorted(
        (expert for group in sorted(chosen) for expert in members[group]), key=lambda e: -biased[e]
    )[:topk]
    return [scores[expert] for expert in ranked], ranked


def _grouped_topk(
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = torch.exp(gating_output - gating_output.logsumexp(-1, keepdim=True))
    if scoring_func == "sigmoid":
        scores = 1 / (1 + torch.exp(-gating_output))
    biased = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    groups, kept = num_expert_group or 1, topk_group or 1
    best_of = 1 if e_score_correction_bias is None else 2
    rows = [
        _token(one, other, topk, groups, kept, best_of)
        for one, other in zip(scores.tolist(), biased.tolist(), strict=True)
    ]
    shape = (len(rows), topk)
    weights = torch.tensor([row for row, _ in rows], dtype=torch.float64).reshape(shape)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    ids = torch.tensor([row for _, row in rows], dtype=torch.int32).reshape(shape)
    return (weights * routed_scaling_factor).float(), ids


def _routing_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw eight groups of ``size`` experts; a token's logits are as many different numbers that every dtype holds."""
    logits = draw(math.prod(lead), 8 * size)
    logits.copy_((logits.double().argsort(-1) - 4 * size) / 2 ** math.ceil(math.log2(size + 1)))
    return {
        "gating_output": logits,
        "topk": min(4, 3 * size),
        "renormalize": False,
        "num_expert_group": 8,
        "topk_group": 3,
    }


def _bias(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    return draw(8 * size).float()


def _routing_op(
    gating_output: Tensor, e_score_correction_bias: Tensor | None = None, **settings: Any
) -> tuple[nn.Module, tuple[Any, ...]]:
    hidden_states = gating_output.new_zeros(gating_output.shape[0], 5)
    return ops.GroupedTopk(**settings), (hidden_states, gating_output, e_score_correction_bias)


def _routing_flops(gating_output: Tensor, **others: Any) -> int:
    return 10 * gating_output.numel()


VARIANTS: dict[str, Arguments] = {
    "": {},
    "no groups": {"num_expert_group": 0, "topk_group": 0},
    "renormalised and scaled": {"renormalize": True, "routed_scaling_factor": 2.5},
    "sigmoid": {"scoring_func": "sigmoid", "renormalize": True},
    "bias": {"scoring_func": "sigmoid", "renormalize": True, "e_score_correction_bias": _bias},
    "softmax with bias": {"e_score_correction_bias": _bias},
}


def _deepseek_v2(gating_output: Tensor, scoring_func: str = "softmax", **settings: Any) -> Any:
    from transformers.models.deepseek_v2 import configuration_deepseek_v2, modeling_deepseek_v2

    if (
        scoring_func != "softmax"
        or settings["renormalize"]
        or "e_score_correction_bias" in settings
    ):
        return None
    config = configuration_deepseek_v2.DeepseekV2Config()
    return _transformers(
        modeling_deepseek_v2.DeepseekV2TopkRouter, config, gating_output, **settings
    )


def _deepseek_v3(
    gating_output: Tensor,
    scoring_func: str = "softmax",
    e_score_correction_bias: Any = None,
    **settings: Any,
) -> Any:
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

    if scoring_func != "sigmoid" or e_score_correction_bias is None:
        return None
    config = configuration_deepseek_v3.DeepseekV3Config()
    router = modeling_deepseek_v3.DeepseekV3TopkRouter
    return _transformers(router, config, gating_output, e_score_correction_bias, **settings)


def _transformers(
    router: Any,
    config: Any,
    gating_output: Tensor,
    bias: Tensor | None = None,
    *,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Run a router of transformers, whose linear layer passes the logits on; its results in descending order."""
    experts = gating_output.shape[1]
    config.update(
        {
            "hidden_size": experts,
            "num_experts_per_tok": topk,
            "n_group": max(num_expert_group, 1),
            "topk_group": max(topk_group, 1),
            "norm_topk_prob": renormalize,
            "routed_scaling_factor": routed_scaling_factor,
            "topk_method": "group_limited_greedy",
            "num_experts": experts,
            "num_local_experts": experts,
            "n_routed_experts": experts,
        }
    )
    theirs = router(config).requires_grad_(False)
    theirs.weight.data = torch.eye(experts)
    if bias is not None:
        theirs.e_score_correction_bias = bias
    _, weights, ids = theirs(gating_output)
    key = theirs.weight.new_tensor(0.0) if bias is None else bias[ids]
    score = torch.sigmoid(gating_output).gather(1, ids) + key
    order = score.argsort(-1, descending=True)
    return weights.gather(1, order), ids.gather(1, order).to(torch.int32)


SPECS = (
    OpSpec(
        functional.grouped_topk,
        _routing_inputs,
        _grouped_topk,
        module=_routing_op,
        variants=VARIANTS,
        sizes=(2, 9, 32),
        large=(((83,), 32),),
        tolerances=dict.fromkeys((torch.float16, torch.bfloat16), (1e-5, 1.3e-6)),
        outside=(
            Outside("transformers DeepseekV2TopkRouter", _deepseek_v2),
            Outside("transformers DeepseekV3TopkRouter", _deepseek_v3),
        ),
        flops=_routing_flops,
        differentiable=False,
    ),
)
