"""Attention of encoders, and of decoders with their cache in pages."""

from opgraft.ops.attention.batch import (
    AttentionBatch,
    LayerPages,
    LayerStates,
    attending,
    current_batch,
)
from opgraft.ops.attention.decoder import Attention, PagedAttention, WriteKVCache
from opgraft.ops.attention.modules import MMEncoderAttention, ScaledDotProductAttention

__all__ = [
    "Attention",
    "AttentionBatch",
    "LayerPages",
    "LayerStates",
    "MMEncoderAttention",
    "PagedAttention",
    "ScaledDotProductAttention",
    "WriteKVCache",
    "attending",
    "current_batch",
]
