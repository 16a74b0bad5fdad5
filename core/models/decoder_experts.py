"""Feed-forward layers of experts in decoders: the sizes, read from a config, and the layer."""

from __future__ import annotations

from dataclasses import dataclass

from opgraft.config import OpgraftConfig
from opgraft.errors import ModelError
from opgraft.models.given import GivenSettings
from opgraft.ops.linear import ReplicatedLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from opgraft.ops.moe.fused import FusedMoE
from opgraft.ops.moe.fused.placement import ALONE, ExpertSharing
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertsFamily:
    """The differences between experts of a family and Mixtral's, as far as configs do not tell.

    Attributes:
        renormalize: the weights of a token's experts are scaled to a sum of one; ``None``: as
            ``norm_topk_prob`` says.
        activation: the activation of the experts.
        has_bias: the router and both products have a bias.
        transposed_checkpoint: checkpoints have one weight of all experts, ``[experts, in, out]``.
    """

    renormalize: bool | None = True
    activation: str = "silu"
    has_bias: bool = False
    transposed_checkpoint: bool = False


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes of experts, by our names, and the numbers of the layers that have them."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    renormalize: bool
    layers: frozenset[int]

    @classmethod
    def of(cls, given: GivenSettings, family: ExpertsFamily) -> ExpertsShape:
        """Read a config.

        Args:
            given: the settings.
            family: the experts of the family.

        Raises:
            ModelError: the config lacks a size, or needs experts that opgraft lacks.
        """
        activation = given("hidden_act")
        if activation != "silu":
            raise ModelError(
                f"experts have the activation {activation!r}, expected 'silu': no other is written"
            )
        # The kernels of experts have these numbers built in.
        if given("swiglu_alpha", 1.702) != 1.702 or given("swiglu_limit", 7.0) != 7.0:
            raise ModelError(
                "swiglu_alpha and swiglu_limit are not 1.702 and 7.0: no others are written"
            )
        renormalize = family.renormalize
        if renormalize is None:
            renormalize = given("norm_topk_prob", False)
        # Of the families here, only Qwen3 has these two settings.
        step = given.size("decoder_sparse_step", 1)
        dense = given("mlp_only_layers", None) or ()
        layers = []
        for number in range(given.size("num_hidden_layers")):
            if number not in dense and (number + 1) % step == 0:
                layers.append(number)
        return cls(
            # Mixtral and gpt-oss have the first name, Qwen3 and OLMoE the second.
            num_experts=given.first_size("num_local_experts", "num_experts"),
            top_k=given.size("num_experts_per_tok"),
            hidden_size=given.size("hidden_size"),
            intermediate_size=given.first_size("moe_intermediate_size", "intermediate_size"),
            renormalize=renormalize,
            layers=frozenset(layers),
        )


def expert_sharing(opgraft_config: OpgraftConfig) -> ExpertSharing:
    """Return the way of sharing experts between ranks, as the section ``parallel`` says."""
    parallel = opgraft_config.resolved().parallel
    balances = parallel.expert_balance_steps is not None
    return ExpertSharing(parallel.expert, parallel.redundant_experts, balances)


class DecoderExperts(nn.Module):
    """Experts in the place of a feed-forward layer, with the gate that routes tokens to experts.

    Args:
        shape: the sizes of the experts.
        family: the experts of the family.
        quant_config: the quantization of the experts.
        prefix: the layer's path.
        sharing: the way of sharing the experts between ranks.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        family: ExpertsFamily,
        quant_config: QuantizationConfig | None,
        prefix: str,
        sharing: ExpertSharing = ALONE,
    ) -> None:
        super().__init__()
        # Not quantized, as in checkpoints: a small error would send a token to another expert.
        self.gate = ReplicatedLinear(
            shape.hidden_size,
            shape.num_experts,
            bias=family.has_bias,
            prefix=f"{prefix}.gate",
            return_bias=False,
        )
        self.experts = FusedMoE(
            shape.num_experts,
            shape.top_k,
            shape.hidden_size,
            shape.intermediate_size,
            reduce_results=True,
            renormalize=shape.renormalize,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            activation=family.activation,
            has_bias=family.has_bias,
            transposed_checkpoint=family.transposed_checkpoint,
            ep_size=sharing.ranks,
            enable_eplb=sharing.records,
            num_redundant_experts=sharing.redundant,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        output: Tensor = self.experts(hidden_states, self.gate(hidden_states))
        return output
