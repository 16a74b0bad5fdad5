"""The catalogue of ops."""

from opgraft.custom_op import CustomOp, PluggableLayer, maybe_get_oot_by_class
from opgraft.ops.layernorm import RMSNorm

__all__ = ["CustomOp", "PluggableLayer", "RMSNorm", "maybe_get_oot_by_class"]
