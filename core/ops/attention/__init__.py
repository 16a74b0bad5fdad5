"""Attention of encoders."""

from opgraft.ops.attention.modules import MMEncoderAttention, ScaledDotProductAttention

__all__ = ["MMEncoderAttention", "ScaledDotProductAttention"]
