"""Attention over a cache in the device's own layout.

One block of the cache is ``[num_kv_heads, 2 * head_size, block_size]``. A column is one token: the
key stands above the value.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from opgraft.ops import Attention, AttentionBatch, LayerPages
from torch import Tensor


class ToyAttention(Attention):
    """Attention that computes one sequence after another.

    The device knows no soft cap and no sinks. A layer with either of them keeps opgraft's layout
    and runs opgraft's kernel.
    """

    @property
    def _is_plain(self) -> bool:
        return self.logits_soft_cap is None and self.sinks is None

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> tuple[int, ...]:
        """Return ``(num_blocks, num_kv_heads, 2 * head_size, block_size)``."""
        if not self._is_plain:
            return super().kv_cache_shape(num_blocks, block_size, dtype)
        return (num_blocks, self.num_kv_heads, 2 * self.head_size, block_size)

    def holds_codes(self) -> bool:
        """Return False for the device's layout, which has no place for the scales of codes."""
        return not self._is_plain

    def attend_batch(
        self, batch: AttentionBatch, pages: LayerPages, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write the new tokens to the cache, and return attention in the shape of ``query``."""
        if not self._is_plain:
            return super().attend_batch(batch, pages, query, key, value)

        _write(batch.block_size, pages, key, value)
        # Devices reserve memory for the longest sequence of a batch, once for all sequences.
        buffer = query.new_empty(2, self.num_kv_heads, self.head_size, batch.max_seq_len)
        lengths = batch.seq_lens.tolist()
        bounds = pairwise(batch.query_start_loc.tolist())
        attended = torch.empty_like(query)

        for row, (start, end) in enumerate(bounds):
            length = lengths[row]
            keys_and_values = _read(batch.block_size, pages, row, length)
            keys, values = buffer[..., :length].copy_(keys_and_values)
            # A launch has room for the longest query that the batch announces.
            queries = query[start:end][: batch.max_query_len]
            attended[start:end] = self._attend_sequence(queries, keys, values)
        return attended

    def _attend_sequence(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with the last tokens of one sequence.

        Args:
            query: ``[new_tokens, heads, head_size]``.
            keys: ``[num_kv_heads, head_size, length]``.
            values: the same shape as ``keys``.
        """
        new_tokens, _, head_size = query.shape
        length = keys.shape[-1]
        seen = self._seen(new_tokens, length)

        # Heads that share a key head stand together, so that the product broadcasts the keys.
        by_head = query.transpose(0, 1)
        grouped = by_head.reshape(self.num_kv_heads, -1, new_tokens, head_size)
        scores = grouped @ keys[:, None] * self.scale
        masked = scores.masked_fill(~seen, float("-inf"))
        weights = masked.softmax(-1)

        # A page outside the window may hold NaN, and NaN times a weight of zero is NaN.
        unseen = ~seen.any(0)
        values = values.masked_fill(unseen, 0.0)
        attended: Tensor = weights @ values.mT[:, None]
        return attended.flatten(0, 1).transpose(0, 1)

    def _seen(self, new_tokens: int, length: int) -> Tensor:
        """Return ``[new_tokens, length]``: True if the new token attends to the other token."""
        positions = torch.arange(length)
        new_positions = positions[length - new_tokens :, None]
        distance = new_positions - positions
        seen = distance >= 0
        if self.sliding_window:
            seen &= distance < self.sliding_window
        return seen


def _write(block_size: int, pages: LayerPages, key: Tensor, value: Tensor) -> None:
    block = pages.slots // block_size
    offset = pages.slots % block_size
    columns = torch.cat((key, value), dim=-1)
    pages.cache[block, :, :, offset] = columns


def _read(block_size: int, pages: LayerPages, row: int, length: int) -> Tensor:
    """Return keys and values of one sequence, ``[2, num_kv_heads, head_size, length]``."""
    num_blocks = -(-length // block_size)
    blocks = pages.block_table[row, :num_blocks]
    # [blocks, heads, 2 * head_size, block_size] becomes [heads, 2 * head_size, tokens].
    by_head = pages.cache[blocks].permute(1, 2, 0, 3)
    tokens = by_head.flatten(2)
    # The last block is full of tokens, but only the first of them belong to the sequence.
    written = tokens[..., :length]
    keys, values = written.chunk(2, dim=1)
    return torch.stack((keys, values))
