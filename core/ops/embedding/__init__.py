"""Layers at the ends of a language model: ids to vectors, and hidden states to logits."""

from opgraft.ops.embedding.logits import *
from opgraft.ops.embedding.vocab import *
