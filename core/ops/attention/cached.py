"""``CachedAttention``, what layers have in common that keep what they need of a token in pages of a cache."""

from __future__ import annotations

from abc import abstractmethod

import torch
from opgraft.binding.custom_op import PluggableLayer
from opgraft.errors import LayerError
from opgraft.ops.attention.batch import AttentionBatch, LayerPages
from opgraft.ops.attention.codes import LARGEST_CODES


class CachedAttention(PluggableLayer):
    """A layer with a cache in pages, which it finds in the current ``AttentionBatch`` under its prefix.

    A layer may lay its cache out as it likes, dimension 0 being the block: nothing else looks inside a block.

    Attributes:
        prefix: the layer's path in its model, under which its pages are found.
        sliding_window: tokens that a token sees, with itself; all so far if ``None``.
    """

    prefix: str
    sliding_window: int | None = None
    is_node = False
    """While a compiler traces, the layer becomes one node of the graph, called within
    ``AttentionNodes.entered``."""
    takes_padding = False
    """Takes batches that are padded as those of ``PaddedAttention``, and computes them in a graph of fixed shapes."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of a cache of ``num_blocks`` blocks of ``block_size`` tokens."""

    @property
    @abstractmethod
    def num_queries_per_kv(self) -> int:
        """The query heads that each element of the cache is multiplied for; ``opgraft plan`` counts by it."""

    def holds_codes(self) -> bool:
        """Tell whether ``kv_cache_shape`` takes a ``dtype``, for a cache of codes."""
        return False

    def batch_invariant(self, block_size: int) -> bool:
        """Tell whether pages of that block size give each token the same bits, whatever stands beside it in a batch.

        That is beside other sequences, and beside more or fewer tokens of its own. It holds of a replacement that says
        so.
        """
        return False

    def pages(self, batch: AttentionBatch, tokens: int) -> LayerPages:
        """Return this layer's pages, once they are known to be of its kind.

        Raises:
            LayerError: the batch has another number of tokens, no pages for the layer or some of another shape.
        """
        pages = batch.pages.get(self.prefix)
        if pages is None:
            known = ", ".join(map(repr, list(batch.pages)[:3])) or "no layer"
            raise LayerError(
                f"attention {self.prefix!r}: the batch has no pages for the layer, but for {known}: give some for each "
                "prefix of attention_layers(model)"
            )
        if len(pages.slots) != tokens:
            raise LayerError(
                f"attention {self.prefix!r}: query has {tokens} tokens, and the batch {len(pages.slots)}: call the "
                "model with the tokens of all its sequences"
            )
        shape = tuple(pages.cache.shape)
        expected = cache_shape(self, shape[0] if shape else 0, batch.block_size, pages.cache.dtype)
        if shape != expected:
            raise LayerError(
                f"attention {self.prefix!r}: its cache has shape {shape}, expected {expected}: make it by "
                "kv_cache_shape"
            )
        return pages


def cache_shape(
    layer: CachedAttention, num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the shape of a layer's cache of ``dtype``, which the layer is told of only if it is one of codes."""
    told = (dtype,) if dtype in LARGEST_CODES else ()
    return tuple(layer.kv_cache_shape(num_blocks, block_size, *told))
