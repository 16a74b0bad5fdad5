"""Multi-head latent attention, whose cache has one latent and one rotated key per token."""

from opgraft.ops.latent_attention.layers import MLAAttention
from opgraft.ops.latent_attention.modules import ConcatAndCacheMLA, MLAPagedAttention
from opgraft.ops.latent_attention.wrapper import MLAModules, MultiHeadLatentAttentionWrapper

__all__ = [
    "ConcatAndCacheMLA",
    "MLAAttention",
    "MLAModules",
    "MLAPagedAttention",
    "MultiHeadLatentAttentionWrapper",
]
