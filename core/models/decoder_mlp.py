"""The feed-forward layers of decoders: dense ones, and the choice between them and those of experts."""

from __future__ import annotations

from typing import Any

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
        shape: of the decoder.
        quant_config: the quantization of the projections.
        prefix: the layer's path.
        intermediate_size: elements between the projections; the decoder's if not given.
        reduce_results: add what the tensor-parallel ranks have.
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
    if family.experts is not None and shape.experts is not None and layer in shape.experts.layers:
        return DecoderExperts(shape.experts, family.experts, quant_config, prefix, shape.sharing)
    routed = shape.routed
    if routed is None or layer < routed.first_layer:
        return DecoderMLP(shape, quant_config, prefix)
    sizes: dict[str, Any] = {
        "intermediate_size": routed.shared * routed.intermediate_size,
        "reduce_results": False,
    }
    shared = (
        DecoderMLP(shape, quant_config, f"{prefix}.shared_experts", **sizes)
        if routed.shared
        else None
    )
    return DeepseekExperts(routed, shared, quant_config, prefix, shape.sharing)
