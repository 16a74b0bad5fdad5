"""Specs of routing. The reference chooses for one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from opgraft.ops.moe import routing as ops
from opgraft.ops.moe.routing import functional
from opgraft.ops.spec import Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn


def _choose_for_token(
    scores: list[float], biased: list[float], topk: int, groups: int, kept: int, best_of: int
) -> tuple[list[float], list[int]]:
    """Return the scores and the ids of one token's experts.

    Args:
        scores: of each expert.
        biased: the scores plus the bias, for comparisons.
        topk: experts to choose.
        groups: the number of groups.
        kept: the number of groups to keep.
        best_of: the number of experts in the score of a group.
    """
    size = len(scores) // groups
    score_of_group = []
    for group in range(groups):
        members = biased[group * size : (group + 1) * size]
        score_of_group.append(sum(sorted(members, reverse=True)[:best_of]))

    chosen = sorted(range(groups), key=lambda group: -score_of_group[group])[:kept]
    # In order of ids, as the sort below keeps that order among equal experts.
    candidates = [expert for expert in range(len(scores)) if expert // size in chosen]
    ranked = sorted(candidates, key=lambda expert: -biased[expert])[:topk]
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

    biased = scores
    best_of = 1
    if e_score_correction_bias is not None:
        biased = scores + e_score_correction_bias
        best_of = 2

    groups = num_expert_group or 1
    kept = topk_group or 1
    chosen = [
        _choose_for_token(row, biased_row, topk, groups, kept, best_of)
        for row, biased_row in zip(scores.tolist(), biased.tolist(), strict=True)
    ]

    # Without tokens, the lists do not tell the width.
    shape = (len(chosen), topk)
    weights = torch.tensor([row for row, _ in chosen], dtype=torch.float64).reshape(shape)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    ids = torch.tensor([row for _, row in chosen], dtype=torch.int32).reshape(shape)
    return (weights * routed_scaling_factor).float(), ids


def _routing_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw eight groups of ``size`` experts, and different logits for each token.

    Every dtype holds the logits exactly, so that no rounding makes two experts equal.
    """
    logits = draw(math.prod(lead), 8 * size)
    ranks = logits.double().argsort(-1)
    power_of_two = 2 ** math.ceil(math.log2(size + 1))
    logits.copy_((ranks - 4 * size) / power_of_two)
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

    has_bias = "e_score_correction_bias" in settings
    if scoring_func != "softmax" or settings["renormalize"] or has_bias:
        return None

    config = configuration_deepseek_v2.DeepseekV2Config()
    router = modeling_deepseek_v2.DeepseekV2TopkRouter
    return _router_of_transformers(router, config, gating_output, **settings)


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
    return _router_of_transformers(
        router, config, gating_output, e_score_correction_bias, **settings
    )


def _router_of_transformers(
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
    """Return the weights and ids of a router of transformers, in descending order."""
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

    # The router computes logits by a linear layer; the identity passes ours on.
    theirs.weight.data = torch.eye(experts)
    if bias is not None:
        theirs.e_score_correction_bias = bias
    _, weights, ids = theirs(gating_output)

    # Sigmoid and softmax order experts alike.
    score = torch.sigmoid(gating_output).gather(1, ids)
    if bias is not None:
        score = score + bias[ids]
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
