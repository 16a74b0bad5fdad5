"""The catalogue of ops."""

from opgraft.custom_op import CustomOp, PluggableLayer, maybe_get_oot_by_class
from opgraft.ops.activation import GELU, FastGELU, GeluAndMul, NewGELU, QuickGELU, SiLU, SiluAndMul
from opgraft.ops.attention import MMEncoderAttention, ScaledDotProductAttention
from opgraft.ops.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from opgraft.ops.linear import Linear
from opgraft.ops.rotary import ApplyRotaryEmb, RotaryEmbedding, RotaryEmbeddingBase

__all__ = [
    "CustomOp",
    "PluggableLayer",
    "maybe_get_oot_by_class",
    "ApplyRotaryEmb",
    "FastGELU",
    "GELU",
    "GeluAndMul",
    "GemmaRMSNorm",
    "LayerNorm",
    "Linear",
    "MMEncoderAttention",
    "NewGELU",
    "QuickGELU",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryEmbeddingBase",
    "ScaledDotProductAttention",
    "SiLU",
    "SiluAndMul",
]
