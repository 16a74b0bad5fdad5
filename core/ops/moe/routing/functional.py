"""Routing of tokens to experts."""

from __future__ import annotations

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_choice, expect_floating, expect_same_device
from opgraft.ops.precision import compute_dtype
from torch import Tensor

__all__ = ["grouped_topk"]

SCORING = ("softmax", "sigmoid")


def expect_groups(op: str, topk: int, num_expert_group: int, topk_group: int) -> None:
    """Raise ``ValueError`` unless ``topk`` is positive and ``topk_group`` fits the groups."""
    if topk < 1:
        raise ValueError(f"{op}: topk is {topk}, expected at least 1")
    if num_expert_group < 0:
        raise ValueError(
            f"{op}: num_expert_group is {num_expert_group}, expected 0 for no groups, or their "
            "number"
        )

    least = min(num_expert_group, 1)
    if not least <= topk_group <= max(num_expert_group, least):
        raise ValueError(
            f"{op}: topk_group is {topk_group}, expected {least} to "
            f"num_expert_group={num_expert_group}"
        )


def _routed(
    gating_output: Tensor, topk: int, *others: object, **settings: object
) -> tuple[Tensor, Tensor]:
    """Return empty weights and ids ``[tokens, topk]``; the fake rule of ``grouped_topk``."""
    shape = (gating_output.shape[0], topk)
    weights = gating_output.new_empty(shape, dtype=torch.float32)
    ids = gating_output.new_empty(shape, dtype=torch.int32)
    return weights, ids


@register_functional("grouped_topk", _routed)
def grouped_topk(
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts from the best groups of experts.

    This is the routing of DeepSeek-V2 (arXiv:2405.04434); with a bias, of DeepSeek-V3
    (arXiv:2412.19437). The score of a group is the score of its best expert, or with a bias the sum
    of its two best. The ``topk_group`` best groups stay, and of those the ``topk`` best experts.
    The bias counts in comparisons of groups and experts, but not in the weights. Scores are
    computed in float32 (float64 for float64 input).

    Experts come in descending order. Among equal experts or groups the lower id comes first. NaN
    counts as the largest number. Experts of a dropped group are never taken. So ids are always
    distinct and valid.

    Args:
        gating_output: logits, ``[tokens, experts]`` in any floating-point dtype.
        topk: experts per token.
        renormalize: scale the weights of a token to a sum of one. A row of zeros stays zero.
        num_expert_group: the number of groups of neighbours; 0 is one group.
        topk_group: the number of groups to keep; 0 for no groups.
        scoring_func: ``"softmax"`` over the experts, or ``"sigmoid"``.
        routed_scaling_factor: multiplies the weights, last.
        e_score_correction_bias: ``[experts]``, added to the scores.

    Returns:
        Weights in float32 and ids in int32, both ``[tokens, topk]``.

    Raises:
        ValueError: a shape or a setting does not fit, or the kept groups hold fewer than ``topk``
            experts.
    """
    expect_choice("grouped_topk", "scoring_func", scoring_func, SCORING)
    expect_groups("grouped_topk", topk, num_expert_group, topk_group)
    groups = max(num_expert_group, 1)
    kept = max(topk_group, 1)
    _expect_experts(gating_output, e_score_correction_bias, topk, groups, kept)

    logits = gating_output.to(compute_dtype(gating_output.dtype))
    scores = logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()
    ids = _best_experts(scores, topk, groups, kept, e_score_correction_bias)

    weights = scores.gather(1, ids)
    if renormalize:
        # All scores may underflow to zero.
        least = torch.finfo(weights.dtype).tiny
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=least)
    weights = (weights * routed_scaling_factor).to(torch.float32)
    return weights, ids.to(torch.int32, memory_format=torch.contiguous_format)


def _best_experts(scores: Tensor, topk: int, groups: int, kept: int, bias: Tensor | None) -> Tensor:
    """Return the ids of the best experts of the best groups, ``[tokens, topk]``."""
    compared = scores if bias is None else scores + bias.to(scores.dtype)
    if kept == groups:
        return _descending(compared)[:, :topk]

    size = compared.shape[1] // groups
    grouped = compared.reshape(-1, groups, size)
    best_two = min(2, size)
    score_of_group = grouped.amax(-1) if bias is None else grouped.topk(best_two, -1).values.sum(-1)

    # In ascending order, so that among equal experts the lower id stays first.
    chosen = _descending(score_of_group)[:, :kept].sort(-1).values

    # Other groups are dropped, not masked by -inf: a bias may forbid an expert by -inf, too.
    members = chosen.unsqueeze(-1).expand(-1, -1, size)
    candidates = grouped.gather(1, members).flatten(1)
    positions = _descending(candidates)[:, :topk]
    return chosen.gather(1, positions // size) * size + positions % size


def _descending(values: Tensor) -> Tensor:
    """Return the indices of a stable sort, the largest value first."""
    return values.detach().sort(stable=True, dim=-1, descending=True).indices


def _expect_experts(
    gating_output: Tensor, bias: Tensor | None, topk: int, groups: int, kept: int
) -> None:
    op = "grouped_topk"
    shape = tuple(gating_output.shape)
    if gating_output.dim() != 2 or not gating_output.is_floating_point():
        raise ValueError(
            f"{op}: gating_output has shape {shape} and {gating_output.dtype}, expected "
            "floating-point [tokens, experts]"
        )

    experts = shape[1]
    if experts % groups:
        raise ValueError(
            f"{op}: num_expert_group is {groups}, expected a divisor of {experts} experts"
        )

    candidates = experts // groups * kept
    if topk > candidates:
        raise ValueError(
            f"{op}: topk is {topk}, expected at most the {candidates} experts of {kept} groups"
        )

    if bias is None:
        return

    if bias.shape != (experts,):
        raise ValueError(
            f"{op}: e_score_correction_bias has shape {tuple(bias.shape)}, expected ({experts},)"
        )
    expect_floating(op, "e_score_correction_bias", bias)
    expect_same_device(op, "e_score_correction_bias", bias, "gating_output", gating_output)
