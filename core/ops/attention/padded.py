"""Attention in graphs of fixed shapes: each sequence has equally many rows, padding included."""

from __future__ import annotations

import torch
from opgraft.ops.attention.batch import AttentionBatch, LayerPages
from opgraft.ops.attention.codes import LARGEST_CODES, dequantize_rows, quantize_rows
from opgraft.ops.attention.decoder import Attention
from opgraft.ops.attention.paged import attend_stepwise, visible_in_blocks
from opgraft.ops.precision import compute_dtype
from torch import Tensor


class PaddedAttention(Attention):
    """Attention over batches with equally many rows for each sequence; the last may be padding.

    A batch is padded if its rows are ``max_query_len`` times its sequences. The rows of sequence
    ``i`` begin at ``i · max_query_len``, and ``query_start_loc`` counts its tokens. The other rows
    are padding: the slots of several may be the same, and their results are never read. Any other
    batch is computed as by ``Attention``.

    Nothing depends on values, so a graph depends on the shapes of the tensors alone. A replacement
    overrides ``attend_rows``.
    """

    takes_padding = True

    def attend_batch(
        self, batch: AttentionBatch, pages: LayerPages, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write new tokens to the pages and attend over them, as ``[rows, heads, head_size]``."""
        sequences = batch.seq_lens.shape[0]
        if sequences * batch.max_query_len != query.shape[0]:
            return super().attend_batch(batch, pages, query, key, value)

        write_rows(key, value, pages.cache, pages.slots)
        first = batch.seq_lens - batch.query_start_loc.diff()
        rows = query.view(sequences, batch.max_query_len, *query.shape[1:])
        attended = self.attend_rows(rows, pages.cache, pages.block_table, first, batch.seq_lens)
        return attended.flatten(0, 1)

    def attend_rows(
        self, query: Tensor, cache: Tensor, block_table: Tensor, first: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """Attend over all keys and values of a table at once, in the shape of ``query``.

        Args:
            query: ``[sequences, rows, num_heads, head_size]``.
            cache: in the shape of ``kv_cache_shape``.
            block_table: int32 ``[sequences, most blocks]``, of blocks in the cache.
            first: positions of the first rows, ``[sequences]``.
            seq_lens: tokens so far, ``[sequences]``. No row sees a later position.
        """
        visible = visible_in_blocks(
            query, first, seq_lens, block_table, cache.shape[3], self.sliding_window
        )
        pages = cache[block_table.long()]
        if cache.dtype in LARGEST_CODES:
            pages = dequantize_rows(pages, compute_dtype(query.dtype))

        # Keys and values: [2, sequences, heads, keys, size].
        pages = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)

        # Unused rows may be NaN, and zero times NaN is NaN.
        used = visible.any(1)
        key, value = pages.masked_fill(~used[:, None, :, None], 0.0)
        rows = query.transpose(1, 2)
        attended = attend_stepwise(
            rows, key, value, visible, self.scale, self.logits_soft_cap, self.sinks
        )
        return attended.transpose(1, 2)


def write_rows(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write keys and values ``[rows, num_kv_heads, head_size]`` to their places in a cache.

    The write treats the cache as a table of rows. So a compiler for fixed shapes writes in place,
    without a copy of the cache.
    """
    heads, block_size, size = cache.shape[2:]
    pairs = torch.cat((key, value), dim=1)
    if cache.dtype in LARGEST_CODES:
        pairs = quantize_rows(pairs, cache.dtype)

    rows_of_block = 2 * heads * block_size
    first = slots // block_size * rows_of_block + slots % block_size
    places = first[:, None] + torch.arange(2 * heads, device=slots.device) * block_size
    cache.view(-1, size).index_copy_(0, places.flatten(), pairs.flatten(0, 1))
