"""Quantization of activations."""

from opgraft.ops.quantization.functional import GroupShape
from opgraft.ops.quantization.modules import QuantFP4, QuantFP8

__all__ = ["GroupShape", "QuantFP4", "QuantFP8"]
