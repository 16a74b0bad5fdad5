"""The catalogue of ops."""

from opgraft.custom_op import CustomOp, PluggableLayer, maybe_get_oot_by_class
from opgraft.definitions.quantization import GroupShape
from opgraft.ops.activation import (
    GELU,
    XIELU,
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    GeluAndMulSparse,
    GELUTanh,
    MulAndSilu,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiLU,
    SiluAndMul,
    SiluAndMulWithClamp,
    SwigluOAIAndMul,
    SwigluStepAndMul,
)
from opgraft.ops.attention import MMEncoderAttention, ScaledDotProductAttention
from opgraft.ops.conv import Conv2dLayer, Conv3dLayer
from opgraft.ops.encoder import MLP, LinearAct, LinearAddNorm
from opgraft.ops.gated_mlp import GatedMLP
from opgraft.ops.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm, RMSNormGated
from opgraft.ops.linear import Linear
from opgraft.ops.quantization import QuantFP8
from opgraft.ops.rotary import ApplyRotaryEmb, RotaryEmbedding, RotaryEmbeddingBase
from opgraft.ops.rotary_chunks import DualChunkRotaryEmbedding
from opgraft.ops.rotary_variants import (
    DeepseekScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from opgraft.ops.routing import GroupedTopk

__all__ = [
    "CustomOp",
    "PluggableLayer",
    "maybe_get_oot_by_class",
    "ApplyRotaryEmb",
    "Conv2dLayer",
    "Conv3dLayer",
    "DeepseekScalingRotaryEmbedding",
    "DualChunkRotaryEmbedding",
    "FastGELU",
    "FatreluAndMul",
    "GELU",
    "GELUTanh",
    "GatedMLP",
    "GeluAndMul",
    "GeluAndMulSparse",
    "GemmaRMSNorm",
    "GroupShape",
    "GroupedTopk",
    "LayerNorm",
    "Linear",
    "LinearAct",
    "LinearAddNorm",
    "Llama3RotaryEmbedding",
    "MLP",
    "MMEncoderAttention",
    "MRotaryEmbedding",
    "MulAndSilu",
    "NewGELU",
    "QuantFP8",
    "QuickGELU",
    "RMSNorm",
    "RMSNormGated",
    "ReLUSquaredActivation",
    "RotaryEmbedding",
    "RotaryEmbeddingBase",
    "ScaledDotProductAttention",
    "SiLU",
    "SiluAndMul",
    "SiluAndMulWithClamp",
    "SwigluOAIAndMul",
    "SwigluStepAndMul",
    "XIELU",
    "YaRNScalingRotaryEmbedding",
]
