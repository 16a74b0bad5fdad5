"""The choice of experts: ``vllm.model_executor.layers.fused_moe``."""

from __future__ import annotations

import torch
from opgraft.functional import grouped_topk


def fused_grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    e_score_correction_bias: torch.Tensor,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids ``[tokens, topk]`` of experts, chosen within the best groups."""
    return grouped_topk(
        gating_output,
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        scoring_func,
        routed_scaling_factor,
        e_score_correction_bias,
    )
