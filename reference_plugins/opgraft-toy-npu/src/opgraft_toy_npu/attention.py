"""Attention over a cache in the device's own layout: in a block, heads are outermost, keys over values, then tokens."""

from __future__ import annotations

import torch
from opgraft.ops import Attention, AttentionBatch, LayerPages


class ToyAttention(Attention):
    """Attends sequence by sequence; layers with a soft cap or sinks, unknown to the device, attend as opgraft does.

    A launch has room for as many tokens as the batch says that its longest sequence has.
    """

    @property
    def _is_plain(self) -> bool:
        return self.logits_soft_cap is None and self.sinks is None

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> tuple[int, ...]:
        if not self._is_plain:
            return super().kv_cache_shape(num_blocks, block_size, dtype)
        return (num_blocks, self.num_kv_heads, 2 * self.head_size, block_size)

    def holds_codes(self) -> bool:
        return not self._is_plain

    def attend_batch(
        self,
        batch: AttentionBatch,
        pages: LayerPages,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        if not self._is_plain:
            return super().attend_batch(batch, pages, query, key, value)
        block, offset = pages.slots // batch.block_size, pages.slots % batch.block_size
        pages.cache[block, :, :, offset] = torch.cat((key, value), dim=-1)
        attended = torch.empty_like(query)
        room = query.new_empty(2, self.num_kv_heads, self.head_size, batch.max_seq_len)
        bounds = batch.query_start_loc.tolist()
        for row, (length, start, end) in enumerate(
            zip(batch.seq_lens.tolist(), bounds, bounds[1:], strict=False)
        ):
            blocks = pages.block_table[row, : -(-length // batch.block_size)]
            tokens = pages.cache[blocks].permute(1, 2, 0, 3).flatten(2)[..., :length]
            keys, values = room[..., :length].copy_(torch.stack(tokens.chunk(2, dim=1)))
            attended[start:end] = self._attend_sequence(
                query[start:end][: batch.max_query_len], keys, values
            )
        return attended

    def _attend_sequence(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        behind = torch.arange(keys.shape[-1] - len(query), keys.shape[-1])[:, None] - torch.arange(
            keys.shape[-1]
        )
        seen = (behind >= 0) & (behind < (self.sliding_window or len(behind[0]) + 1))
        grouped = query.transpose(0, 1).reshape(self.num_kv_heads, -1, *query.shape[::2])
        scores = (grouped @ keys[:, None] * self.scale).masked_fill(~seen, float("-inf"))
        values = values.masked_fill(~seen.any(0), 0.0)
        attended: torch.Tensor = scores.softmax(-1) @ values.mT[:, None]
        return attended.flatten(0, 1).transpose(0, 1)
