"""Rotary position embeddings."""

from opgraft.ops.rotary.dual_chunk import DualChunkRotaryEmbedding
from opgraft.ops.rotary.modules import ApplyRotaryEmb, RotaryEmbedding, RotaryEmbeddingBase
from opgraft.ops.rotary.variants import (
    DeepseekScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

__all__ = [
    "ApplyRotaryEmb",
    "DeepseekScalingRotaryEmbedding",
    "DualChunkRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "MRotaryEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingBase",
    "YaRNScalingRotaryEmbedding",
]
