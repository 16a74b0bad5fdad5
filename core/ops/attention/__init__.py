"""Attention of encoders, and of decoders with their cache."""

from opgraft.ops.attention.batch import AttentionBatch, attending, current_batch
from opgraft.ops.attention.decoder import Attention
from opgraft.ops.attention.modules import MMEncoderAttention, ScaledDotProductAttention

__all__ = [
    "Attention",
    "AttentionBatch",
    "MMEncoderAttention",
    "ScaledDotProductAttention",
    "attending",
    "current_batch",
]
