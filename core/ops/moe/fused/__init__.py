"""Layers of experts. Each token visits few experts."""

from opgraft.ops.moe.fused.methods import UnquantizedFusedMoEMethod
from opgraft.ops.moe.fused.modular import FusedMoEModularMethod
from opgraft.ops.moe.fused.modules import FusedMoE, TransformersFusedMoE, TransformersMoERunner

__all__ = [
    "FusedMoE",
    "FusedMoEModularMethod",
    "TransformersFusedMoE",
    "TransformersMoERunner",
    "UnquantizedFusedMoEMethod",
]
