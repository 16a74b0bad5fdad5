"""Layers of experts whose weights are quantized."""

from opgraft.ops.quantized_moe import functional as functional
from opgraft.ops.quantized_moe.methods import QuantizedFusedMoEMethod

__all__ = ["QuantizedFusedMoEMethod"]
