"""Attention in graphs of fixed shapes, whose batches are padded: as many rows for each sequence."""

from __future__ import annotations

import torch
from opgraft.ops.attention.batch import AttentionBatch, LayerPages
from opgraft.ops.attention.codes import LARGEST_CODES, dequantize_rows, quantize_rows
from opgraft.ops.attention.decoder import Attention
from opgraft.ops.attention.paged import attend_stepwise, visible_keys
from opgraft.ops.precision import compute_dtype
from torch import Tensor


class PaddedAttention(Attention):
    """Attention that takes batches with as many rows for each sequence, of which the last ones may be padding.

    A batch is one of these if ``max_query_len`` times its sequences are its rows. The rows of sequence ``i`` begin at
    ``i · max_query_len``, and ``query_start_loc`` says how many of them are tokens. What the others write goes to the
    slots that they are given, which may be the same for all, and what they attend to is nobody's. Any other batch is
    computed as by ``Attention``.

    Nothing depends on values, so that a graph has the shapes of the tensors and no others. A replacement overrides
    ``attend_rows``.
    """

    takes_padding = True

    def attend_batch(
        self, batch: AttentionBatch, pages: LayerPages, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write new tokens to the pages and attend over them, as ``[rows, heads, head_size]``."""
        shape = batch.seq_lens.shape[0], batch.max_query_len
        if shape[0] * shape[1] != query.shape[0]:
            return super().attend_batch(batch, pages, query, key, value)
        write_rows(key, value, pages.cache, pages.slots)
        first = batch.seq_lens - batch.query_start_loc.diff()
        rows = query.view(*shape, *query.shape[1:])
        return self.attend_rows(
            rows, pages.cache, pages.block_table, first, batch.seq_lens
        ).flatten(0, 1)

    def attend_rows(
        self, query: Tensor, cache: Tensor, block_table: Tensor, first: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """Attend over the keys and values of a cache, all of the table at once, in the shape of ``query``.

        Args:
            query: ``[sequences, rows, num_heads, head_size]``.
            cache: as ``kv_cache_shape`` says.
            block_table: int32 ``[sequences, most blocks]``, of blocks that the cache has.
            first: positions of the first rows, ``[sequences]``.
            seq_lens: tokens so far, ``[sequences]``. Positions from there on are seen by none.
        """
        keys = torch.arange(block_table.shape[1] * cache.shape[3], device=query.device)
        positions = first[:, None] + torch.arange(query.shape[1], device=query.device)
        visible = (
            visible_keys(positions, keys, self.sliding_window) & (keys < seq_lens[:, None])[:, None]
        )
        pages = cache[block_table.long()]
        if cache.dtype in LARGEST_CODES:
            pages = dequantize_rows(pages, compute_dtype(query.dtype))
        # Of keys and values [sequences, heads, keys, size].
        pages = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        # As a share of zero times NaN is NaN.
        key, value = pages.masked_fill(~visible.any(1)[:, None, :, None], 0.0)
        rows = query.transpose(1, 2)
        attended = attend_stepwise(
            rows, key, value, visible, self.scale, self.logits_soft_cap, self.sinks
        )
        return attended.transpose(1, 2)


def write_rows(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values ``[rows, num_kv_heads, head_size]`` to their places, as rows of the cache seen as a table.

    A compiler that keeps to fixed shapes writes such rows in place, and need not copy the cache for it.
    """
    heads, block_size, size = cache.shape[2:]
    pairs = torch.cat((key, value), dim=1)
    if cache.dtype in LARGEST_CODES:
        pairs = quantize_rows(pairs, cache.dtype)
    first = slots // block_size * (2 * heads * block_size) + slots % block_size
    places = first[:, None] + torch.arange(2 * heads, device=slots.device) * block_size
    cache.view(-1, size).index_copy_(0, places.flatten(), pairs.flatten(0, 1))
