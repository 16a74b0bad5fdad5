"""Feed-forward layers of experts in decoders: their shape, read from a config, and the layer."""

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
    """The ways in which experts of a family differ from Mixtral's that its config does not tell.

    Attributes:
        renormalize: weights of a token are scaled to a sum of one; ``None``: as ``norm_topk_prob`` says.
        activation: of the experts.
        has_bias: the router and both products have one.
        transposed_checkpoint: checkpoints have the weights of all experts in one as ``[experts, in, out]``.
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
            family: of the decoder.

        Raises:
            ModelError: the config lacks a size, or asks for what is not written.
        """
        if (activation := given("hidden_act")) != "silu":
            raise ModelError(
                f"experts have the activation {activation!r}, expected 'silu': no other is written"
            )
        if (given("swiglu_alpha", 1.702), given("swiglu_limit", 7.0)) != (1.702, 7.0):
            raise ModelError(
                "swiglu_alpha and swiglu_limit are not 1.702 and 7.0: no others are written"
            )
        step, dense = given.size("decoder_sparse_step", 1), given("mlp_only_layers", None) or ()
        numbers = range(given.size("num_hidden_layers"))
        return cls(
            num_experts=given.first_size("num_local_experts", "num_experts"),
            top_k=given.size("num_experts_per_tok"),
            hidden_size=given.size("hidden_size"),
            intermediate_size=given.first_size("moe_intermediate_size", "intermediate_size"),
            renormalize=given("norm_topk_prob", False)
            if family.renormalize is None
            else family.renormalize,
            layers=frozenset(
                number for number in numbers if number not in dense and (number + 1) % step == 0
            ),
        )


def expert_sharing(opgraft_config: OpgraftConfig) -> ExpertSharing:
    """Return the way in which ranks share experts, as the section ``parallel`` says."""
    parallel = opgraft_config.resolved().parallel
    return ExpertSharing(
        parallel.expert, parallel.redundant_experts, parallel.expert_balance_steps is not None
    )


class DecoderExperts(nn.Module):
    """Experts in the place of one feed-forward layer, and the gate that routes each token to some of them.

    Args:
        shape: of the experts.
        family: of the decoder.
        quant_config: the quantization of the experts.
        prefix: the layer's path.
        sharing: the way in which ranks share the experts.
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
