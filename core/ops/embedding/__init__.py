"""Layers at the ends of a language model: ids to vectors, and hidden states to logits."""

from opgraft.ops.embedding.logits import LogitsProcessor
from opgraft.ops.embedding.vocab import ParallelLMHead, VocabParallelEmbedding

__all__ = ["LogitsProcessor", "ParallelLMHead", "VocabParallelEmbedding"]
