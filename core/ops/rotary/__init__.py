"""Rotary position embeddings."""

from opgraft.ops.rotary.dual_chunk import DualChunkRotaryEmbedding
from opgraft.ops.rotary.modules import ApplyRotaryEmb, RotaryEmbedding, RotaryEmbeddingBase
from opgraft.ops.rotary.rope import get_rope
from opgraft.ops.rotary.scaled import (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
)
from opgraft.ops.rotary.variants import (
    DeepseekScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
    apply_interleaved_rope,
)
from opgraft.ops.rotary.vision import Llama4VisionRotaryEmbedding

__all__ = [
    "ApplyRotaryEmb",
    "DeepseekScalingRotaryEmbedding",
    "DualChunkRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "Llama4VisionRotaryEmbedding",
    "MRotaryEmbedding",
    "NTKScalingRotaryEmbedding",
    "Phi3LongRoPEScaledRotaryEmbedding",
    "RotaryEmbedding",
    "RotaryEmbeddingBase",
    "YaRNScalingRotaryEmbedding",
    "apply_interleaved_rope",
    "get_rope",
]
