"""Norms."""

from opgraft.ops.layernorm.modules import (
    GemmaRMSNorm,
    LayerNorm,
    RMSNorm,
    RMSNormGated,
    UnscaledRMSNorm,
)

__all__ = ["GemmaRMSNorm", "LayerNorm", "RMSNorm", "RMSNormGated", "UnscaledRMSNorm"]
