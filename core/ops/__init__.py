"""The catalogue of ops."""

from opgraft.custom_op import CustomOp, PluggableLayer, maybe_get_oot_by_class
from opgraft.ops.activation import GELU, FastGELU, GeluAndMul, NewGELU, QuickGELU, SiLU, SiluAndMul
from opgraft.ops.attention import ScaledDotProductAttention
from opgraft.ops.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from opgraft.ops.linear import Linear

__all__ = [
    "CustomOp",
    "PluggableLayer",
    "maybe_get_oot_by_class",
    "FastGELU",
    "GELU",
    "GeluAndMul",
    "GemmaRMSNorm",
    "LayerNorm",
    "Linear",
    "NewGELU",
    "QuickGELU",
    "RMSNorm",
    "ScaledDotProductAttention",
    "SiLU",
    "SiluAndMul",
]
