"""The experts of DeepSeek: the sizes, read from the config, and the layer with its router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from opgraft.errors import ModelError
from opgraft.models.given import GivenSettings
from opgraft.ops.linear import ReplicatedLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.moe.fused.placement import ALONE, ExpertSharing
from torch import Tensor, nn

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
"""The ways to choose experts by their names in configs. ``noaux_tc`` uses sigmoids and a bias."""


@dataclass(frozen=True)
class RoutedShape:
    """The sizes and the choice of experts, by our names.

    Attributes:
        first_layer: the first layer with experts.
        num_experts: routed experts of a layer.
        top_k: routed experts that a token visits.
        hidden_size: elements of an expert's input.
        intermediate_size: elements between the projections of an expert.
        shared: experts that every token visits.
        num_groups: groups of experts; 0 without groups.
        kept_groups: groups with experts that a token may visit.
        scaling: multiplies the sum of the routed experts.
        renormalize: the weights of a token's experts are scaled to a sum of one.
        by_sigmoid: scores are sigmoids, and the choice adds a bias to each score.
    """

    first_layer: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    shared: int
    num_groups: int
    kept_groups: int
    scaling: float
    renormalize: bool
    by_sigmoid: bool

    @classmethod
    def of(cls, given: GivenSettings) -> RoutedShape | None:
        """Read a config. The result is ``None`` if all layers are dense.

        Args:
            given: the settings.

        Raises:
            ModelError: the config lacks a size, or needs experts that opgraft lacks.
        """
        first = given("first_k_dense_replace", 0)
        if first >= given("num_hidden_layers"):
            return None
        # Transformers' class for V3 has no such attribute.
        method = given("topk_method", "noaux_tc")
        step = given("moe_layer_freq", 1)
        if method not in METHODS or step != 1:
            raise ModelError(
                f"topk_method is {method!r:.40} and moe_layer_freq {step!r:.40}, expected one of "
                f"{', '.join(METHODS)}, and 1: no others are written"
            )
        # The plain greedy choice looks at all experts at once.
        grouped = method != "greedy"
        by_sigmoid = method == "noaux_tc"
        # V2 has the setting, and its code never followed the setting.
        renormalize = by_sigmoid and bool(given("norm_topk_prob", True))
        return cls(
            first_layer=first,
            num_experts=given.size("n_routed_experts"),
            top_k=given.size("num_experts_per_tok"),
            hidden_size=given.size("hidden_size"),
            intermediate_size=given.size("moe_intermediate_size"),
            shared=given.count("n_shared_experts"),
            num_groups=given.size("n_group") if grouped else 0,
            kept_groups=given.size("topk_group") if grouped else 0,
            scaling=given("routed_scaling_factor", 1.0),
            renormalize=renormalize,
            by_sigmoid=by_sigmoid,
        )


class DeepseekExperts(nn.Module):
    """Routed experts and shared experts in the place of a feed-forward layer (arXiv:2401.06066).

    Args:
        shape: the sizes of the experts.
        shared: the layer that every token visits, or ``None``. Each rank returns its part of the
            output, and the ranks' parts are summed together with those of the routed experts.
        quant_config: the quantization of the experts.
        prefix: the layer's path.
        sharing: the way of sharing the experts between ranks.
    """

    def __init__(
        self,
        shape: RoutedShape,
        shared: nn.Module | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
        sharing: ExpertSharing = ALONE,
    ) -> None:
        super().__init__()
        # The router computes in float32, as in training.
        self.gate = ReplicatedLinear(
            shape.hidden_size,
            shape.num_experts,
            bias=False,
            params_dtype=torch.float32,
            prefix=f"{prefix}.gate",
            return_bias=False,
        )
        bias = nn.Parameter(
            torch.empty(shape.num_experts, dtype=torch.float32), requires_grad=False
        )
        # Checkpoints have the bias below the gate, though only the choice of experts reads it.
        self.gate.register_parameter("e_score_correction_bias", bias if shape.by_sigmoid else None)
        self.shared_experts = shared
        self.experts = FusedMoE(
            shape.num_experts,
            shape.top_k,
            shape.hidden_size,
            shape.intermediate_size,
            reduce_results=True,
            renormalize=shape.renormalize,
            use_grouped_topk=shape.num_groups > 0,
            num_expert_group=shape.num_groups,
            topk_group=shape.kept_groups,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            scoring_func="sigmoid" if shape.by_sigmoid else "softmax",
            routed_scaling_factor=shape.scaling,
            e_score_correction_bias=bias if shape.by_sigmoid else None,
            shared_experts=shared,
            ep_size=sharing.ranks,
            enable_eplb=sharing.records,
            num_redundant_experts=sharing.redundant,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        output: Tensor = self.experts(hidden_states, self.gate(hidden_states.float()))
        return output
