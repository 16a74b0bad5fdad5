"""Routing ops."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.derivation import NATIVE, calls_functional
from opgraft.ops.checks import expect_choice
from opgraft.ops.moe.routing import functional as forms
from torch import Tensor

__all__ = ["GroupedTopk"]


@CustomOp.register("grouped_topk")
class GroupedTopk(CustomOp):
    """Chooses each token's experts from the best groups (arXiv:2405.04434, arXiv:2412.19437).

    Unlike vLLM's definition, scores are computed in float32, the lower id wins a tie, and experts
    outside the best groups are never chosen. Zeros in ``num_expert_group`` and ``topk_group`` mean
    no groups.

    Args:
        topk: experts per token.
        renormalize: scale the weights of a token to a sum of one.
        num_expert_group: the number of groups of neighbours; 0 for no groups.
        topk_group: the number of groups to keep; 0 for no groups.
        scoring_func: ``"softmax"`` or ``"sigmoid"``.
        routed_scaling_factor: multiplies the weights.
        num_fused_shared_experts: experts for every token, stored behind the routed experts. Their
            ids go on from the number of routed experts, and are appended with weight 1.

    Shapes:
        Weights in float32 and ids in int32, ``[tokens, topk + num_fused_shared_experts]``, the
        routed experts first and in descending order.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        topk: int,
        renormalize: bool,
        num_expert_group: int = 0,
        topk_group: int = 0,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        num_fused_shared_experts: int = 0,
    ) -> None:
        super().__init__()
        expect_choice("grouped_topk", "scoring_func", scoring_func, forms.SCORING)
        forms.expect_groups("grouped_topk", topk, num_expert_group, topk_group)
        if num_fused_shared_experts < 0:
            raise ValueError(
                f"grouped_topk: num_fused_shared_experts is {num_fused_shared_experts}, expected 0 "
                "or more"
            )

        self.topk = topk
        self.renormalize = renormalize
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.scoring_func = scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        self.num_fused_shared_experts = num_fused_shared_experts

    @calls_functional
    def forward_native(
        self,
        hidden_states: Tensor,
        gating_output: Tensor,
        e_score_correction_bias: Tensor | None = None,
        *,
        functional: Any = NATIVE,
    ) -> tuple[Tensor, Tensor]:
        """Choose weights and ids by the logits ``gating_output``, ``[tokens, experts]``.

        The values of ``hidden_states`` are not read.

        Raises:
            ValueError: ``hidden_states`` has another number of tokens, or ``gating_output`` or the
                bias ``[experts]`` does not fit.
        """
        if hidden_states.shape[:1] != gating_output.shape[:1]:
            raise ValueError(
                f"grouped_topk: hidden_states has shape {tuple(hidden_states.shape)}, expected as "
                f"many tokens as gating_output of shape {tuple(gating_output.shape)}"
            )

        weights, ids = functional.grouped_topk(
            gating_output,
            self.topk,
            self.renormalize,
            self.num_expert_group,
            self.topk_group,
            self.scoring_func,
            self.routed_scaling_factor,
            e_score_correction_bias,
        )
        return self.append_shared_experts(weights, ids, gating_output.shape[1])

    def append_shared_experts(
        self, weights: Tensor, ids: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        """Return weights and ids with the shared experts appended.

        Kernels of plugins call this method too.
        """
        if not self.num_fused_shared_experts:
            return weights, ids

        end = num_experts + self.num_fused_shared_experts
        shared = torch.arange(num_experts, end, dtype=ids.dtype, device=ids.device)
        shared = shared.expand(ids.shape[0], -1)
        ones = weights.new_ones(shared.shape)
        return torch.cat([weights, ones], 1), torch.cat([ids, shared], 1)

    def extra_repr(self) -> str:
        return (
            f"topk={self.topk}, num_expert_group={self.num_expert_group}, "
            f"topk_group={self.topk_group}"
        )
