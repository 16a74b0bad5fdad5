"""``CachedAttention``: the base of layers with a cache in pages."""

from __future__ import annotations

from abc import abstractmethod

import torch
from opgraft.binding.custom_op import PluggableLayer
from opgraft.errors import LayerError
from opgraft.ops.attention.batch import AttentionBatch, LayerPages
from opgraft.ops.attention.codes import LARGEST_CODES


class CachedAttention(PluggableLayer):
    """A layer with a cache in pages, found by prefix in the current ``AttentionBatch``.

    Dimension 0 of the cache is the block. Only the layer looks inside a block, and may choose any
    layout there.

    Attributes:
        prefix: the layer's path in its model, and the key of its pages.
        sliding_window: tokens in the view of a token, itself included; ``None`` for all so far.
    """

    prefix: str
    sliding_window: int | None = None
    is_node = False
    """While a compiler traces, the layer becomes one node of the graph, called within
    ``AttentionNodes.entered``."""
    takes_padding = False
    """The layer takes padded batches, as ``PaddedAttention`` does, in a graph of fixed shapes."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of a cache of ``num_blocks`` blocks of ``block_size`` tokens."""

    @property
    @abstractmethod
    def num_queries_per_kv(self) -> int:
        """The query heads for each element of the cache; ``opgraft plan`` counts products by it."""

    def holds_codes(self) -> bool:
        """Return True if ``kv_cache_shape`` takes a ``dtype``, for a cache of codes."""
        return False

    def batch_invariant(self, block_size: int) -> bool:
        """Return True if each token gets the same bits in every batch, with blocks of that size.

        The bits must depend neither on other sequences nor on the number of tokens of its own
        sequence in the call. A replacement with such kernels overrides this.
        """
        return False

    def pages(self, batch: AttentionBatch, tokens: int) -> LayerPages:
        """Return this layer's pages, after a check of their shape.

        Raises:
            LayerError: the batch has another number of tokens, no pages for the layer, or pages of
                another shape.
        """
        pages = batch.pages.get(self.prefix)
        if pages is None:
            known = ", ".join(map(repr, list(batch.pages)[:3])) or "no layer"
            raise LayerError(
                f"attention {self.prefix!r}: the batch has no pages for the layer, but for "
                f"{known}: give some for each prefix of attention_layers(model)"
            )
        if len(pages.slots) != tokens:
            raise LayerError(
                f"attention {self.prefix!r}: query has {tokens} tokens, and the batch "
                f"{len(pages.slots)}: call the model with the tokens of all its sequences"
            )

        shape = tuple(pages.cache.shape)
        num_blocks = shape[0] if shape else 0
        expected = cache_shape(self, num_blocks, batch.block_size, pages.cache.dtype)
        if shape != expected:
            raise LayerError(
                f"attention {self.prefix!r}: its cache has shape {shape}, expected {expected}: "
                "make it by kv_cache_shape"
            )
        return pages


def cache_shape(
    layer: CachedAttention, num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the shape of a layer's cache of ``dtype``."""
    # A layer without a layout for codes takes no dtype.
    dtypes = (dtype,) if dtype in LARGEST_CODES else ()
    return tuple(layer.kv_cache_shape(num_blocks, block_size, *dtypes))
