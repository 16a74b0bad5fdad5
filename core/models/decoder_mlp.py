"""The feed-forward layers of decoders: the dense one, and the choice between dense and experts."""

from __future__ import annotations

from opgraft.models.decoder_config import DecoderFamily, DecoderShape
from opgraft.models.decoder_experts import DecoderExperts
from opgraft.models.deepseek_experts import DeepseekExperts
from opgraft.ops.activation import GeluAndMul, SiluAndMul
from opgraft.ops.linear import MergedColumnParallelLinear, RowParallelLinear
from opgraft.ops.linear.quantization_config import QuantizationConfig
from torch import Tensor, nn


class DecoderMLP(nn.Module):
    """The gated feed-forward layer, ``down(act(gate(x)) · up(x))`` (Shazeer, arXiv:2002.05202).

    Args:
        shape: the sizes of the decoder.
        quant_config: the quantization of the projections.
        prefix: the layer's path.
        intermediate_size: elements between the projections; the decoder's if not given.
        reduce_results: sum the outputs of the tensor-parallel ranks.
    """

    def __init__(
        self,
        shape: DecoderShape,
        quant_config: QuantizationConfig | None,
        prefix: str,
        *,
        intermediate_size: int | None = None,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        width = intermediate_size or shape.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            shape.hidden_size,
            [width] * 2,
            bias=shape.mlp_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
            return_bias=False,
        )
        self.down_proj = RowParallelLinear(
            width,
            shape.hidden_size,
            bias=shape.mlp_bias,
            reduce_results=reduce_results,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
        )
        # None stands for SiLU. GELU has two forms.
        approximate = {"silu": None, "gelu": "none", "gelu_tanh": "tanh"}[shape.activation]
        self.act_fn = SiluAndMul() if approximate is None else GeluAndMul(approximate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden_states)))
        return output


def feed_forward(
    shape: DecoderShape,
    family: DecoderFamily,
    layer: int,
    quant_config: QuantizationConfig | None,
    prefix: str,
) -> nn.Module:
    """Construct the feed-forward layer of one layer: dense, or of experts."""
    experts = shape.experts
    if family.experts is not None and experts is not None and layer in experts.layers:
        return DecoderExperts(experts, family.experts, quant_config, prefix, shape.sharing)
    routed = shape.routed
    if routed is None or layer < routed.first_layer:
        return DecoderMLP(shape, quant_config, prefix)
    shared = None
    if routed.shared:
        # The layer of experts sums the outputs of the ranks, those of the shared experts included.
        shared = DecoderMLP(
            shape,
            quant_config,
            f"{prefix}.shared_experts",
            intermediate_size=routed.shared * routed.intermediate_size,
            reduce_results=False,
        )
    return DeepseekExperts(routed, shared, quant_config, prefix, shape.sharing)
