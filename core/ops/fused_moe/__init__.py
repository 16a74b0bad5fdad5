"""Layers of experts, of which each token visits few."""

from opgraft.ops.fused_moe.methods import UnquantizedFusedMoEMethod
from opgraft.ops.fused_moe.modular import FusedMoEModularMethod
from opgraft.ops.fused_moe.modules import FusedMoE, TransformersFusedMoE, TransformersMoERunner

__all__ = [
    "FusedMoE",
    "FusedMoEModularMethod",
    "TransformersFusedMoE",
    "TransformersMoERunner",
    "UnquantizedFusedMoEMethod",
]
