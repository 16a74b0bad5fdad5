"""Multi-head latent attention: the cache has one latent and one rotated key per token."""

from opgraft.ops.attention.latent.layers import MLAAttention
from opgraft.ops.attention.latent.modules import ConcatAndCacheMLA, MLAPagedAttention
from opgraft.ops.attention.latent.wrapper import MLAModules, MultiHeadLatentAttentionWrapper

__all__ = [
    "ConcatAndCacheMLA",
    "MLAAttention",
    "MLAModules",
    "MLAPagedAttention",
    "MultiHeadLatentAttentionWrapper",
]
