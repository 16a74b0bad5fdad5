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
    """Raise ``ValueError`` unless at least one expert is asked for, and no more groups than there are."""
    if topk < 1:
        raise ValueError(f"{op}: topk is {topk}, expected at least 1")
    if num_expert_group < 0:
        raise ValueError(
            f"{op}: num_expert_group is {num_expert_group}, expected 0 for no groups, or their number"
        )
    least = min(num_expert_group, 1)
    if not least <= topk_group <= max(num_expert_group, least):
        raise ValueError(
            f"{op}: topk_group is {topk_group}, expected {least} to num_expert_group={num_expert_group}"
        )


def _routed(
    gating_output: Tensor, topk: int, *others: object, **settings: object
) -> tuple[Tensor, Tensor]:
    """Make ``[tokens, topk]`` in float32 and in int32; a fake rule."""
    shape = (gating_output.shape[0], topk)
    return gating_output.new_empty(shape, dtype=torch.float32), gating_output.new_empty(
        shape, dtype=torch.int32
    )


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
    """Choose each token's experts, from its best groups of experts only (DeepSeek-V2, arXiv:2405.04434; with a bias
    DeepSeek-V3, arXiv:2412.19437).

    A group scores as its best expert or, with a bias, as its two best together. Of the ``topk_group`` best groups the
    ``topk`` best experts are taken. The bias counts where groups and experts are compared, and not in the weights.
    Scores are computed in float32 (float64 for float64 input).

    Experts come in descending order. Of equal ones the lower id comes first, and so for groups. NaN counts as the
    largest number, and an expert of a group that is left out is never taken, so that ids are always distinct and valid.

    Args:
        gating_output: logits, ``[tokens, experts]`` in any floating-point dtype.
        topk: experts per token.
        renormalize: scale the weights of a token to a sum of one; where all are zero they stay so.
        num_expert_group: into how many groups of neighbours experts are divided; 0 is one group.
        topk_group: groups that are kept; 0 for no groups.
        scoring_func: ``"softmax"`` over the experts, or ``"sigmoid"``.
        routed_scaling_factor: multiplies the weights, last.
        e_score_correction_bias: ``[experts]``, added to the scores.

    Returns:
        Weights in float32 and ids in int32, both ``[tokens, topk]``.

    Raises:
        ValueError: shapes or settings that do not fit, or more experts asked for than the kept groups have.
    """
    expect_choice("grouped_topk", "scoring_func", scoring_func, SCORING)
    expect_groups("grouped_topk", topk, num_expert_group, topk_group)
    groups, kept = max(num_expert_group, 1), max(topk_group, 1)
    _expect_experts(gating_output, e_score_correction_bias, topk, groups, kept)
    logits = gating_output.to(compute_dtype(gating_output.dtype))
    scores = logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()
    ids = _best(scores, topk, groups, kept, e_score_correction_bias)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    weights = (weights * routed_scaling_factor).to(torch.float32)
    return weights, ids.to(torch.int32, memory_format=torch.contiguous_format)


def _best(scores: Tensor, topk: int, groups: int, kept: int, bias: Tensor | None) -> Tensor:
    """Return the ids of the best experts of the best groups, ``[tokens, topk]``."""
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if kept == groups:
        return _descending(choice)[:, :topk]
    size = choice.shape[1] // groups
    grouped = choice.reshape(-1, groups, size)
    best = grouped.amax(-1) if bias is None else grouped.topk(min(2, size), -1).values.sum(-1)
    chosen = _descending(best)[:, :kept].sort(-1).values
    # Left-out groups are dropped, not masked: a mask of -inf ties with experts that a bias of -inf forbids.
    candidates = grouped.gather(1, chosen.unsqueeze(-1).expand(-1, -1, size)).flatten(1)
    positions = _descending(candidates)[:, :topk]
    return chosen.gather(1, positions // size) * size + positions % size


def _descending(values: Tensor) -> Tensor:
    return values.detach().sort(stable=True, dim=-1, descending=True).indices


def _expect_experts(
    gating_output: Tensor, bias: Tensor | None, topk: int, groups: int, kept: int
) -> None:
    shape = tuple(gating_output.shape)
    if gating_output.dim() != 2 or not gating_output.is_floating_point():
        raise ValueError(
            f"grouped_topk: gating_output has shape {shape} and {gating_output.dtype}, expected floating-point "
            "[tokens, experts]"
        )
    experts = shape[1]
    if experts % groups:
        raise ValueError(
            f"grouped_topk: num_expert_group is {groups}, expected a divisor of {experts} experts"
        )
    if topk > experts // groups * kept:
        raise ValueError(
            f"grouped_topk: topk is {topk}, expected at most the {experts // groups * kept} experts of {kept} groups"
        )
    if bias is not None:
        if bias.shape != (experts,):
            raise ValueError(
                f"grouped_topk: e_score_correction_bias has shape {tuple(bias.shape)}, expected ({experts},)"
            )
        expect_floating("grouped_topk", "e_score_correction_bias", bias)
        expect_same_device(
            "grouped_topk", "e_score_correction_bias", bias, "gating_output", gating_output
        )
