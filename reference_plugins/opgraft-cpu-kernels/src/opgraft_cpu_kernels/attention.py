"""Attention of decoders over pages in a layout of this plugin's own, which ``csrc/kernels.h`` describes.

A block size or head size that 16 does not divide keeps opgraft's layout and its definition. What else the kernel does
not take, gradients and float64 among them, is computed by the definition over a copy of the pages in opgraft's layout.
"""

from __future__ import annotations

from typing import Any

import torch
from opgraft import functional
from opgraft.kernels import LARGEST_CODES, SCALE_BYTES, quantize_rows, row_size
from opgraft.ops import AttentionBatch, LayerPages
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.library import missing

GROUP = 16
"""Tokens whose keys lie by elements."""


def takes(head_size: int, block_size: int) -> bool:
    """Tell whether blocks of such heads can have the layout."""
    return head_size % GROUP == 0 and block_size % GROUP == 0


def attend(
    batch: AttentionBatch,
    pages: LayerPages,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *settings: Any,
) -> Tensor:
    """Write new tokens to pages of this layout and attend over them, as ``[tokens, heads, head_size]``.

    Args:
        batch: the sequences.
        pages: of the layer.
        query: of the new tokens.
        key: likewise.
        value: likewise.
        settings: scale, window, soft cap and sinks.
    """
    tensors = {"query": query, "key": key, "value": value, "cache": pages.cache}
    places = pages.block_table, batch.query_start_loc, batch.seq_lens
    taken = query.dtype in DTYPES and query.is_cpu
    if taken and is_dynamo_compiling():
        taken = not refusal("attend_pages", tensors)
    if taken:
        try:
            return _attend_pages(*tensors.values(), pages.slots, *places, *settings)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    write(key, value, pages.cache, pages.slots)
    plain = in_opgrafts_layout(pages.cache, query)
    return functional.paged_attention.native(query, plain, *places, *settings)


def has_kernel(platform: object) -> bool:
    """Tell whether the library is there, without which the layout is of no use."""
    return not missing()


def cache_shape(
    num_blocks: int, heads: int, block_size: int, head_size: int, dtype: torch.dtype | None
) -> tuple[int, ...]:
    """Return the shape of a cache of this layout, whose groups of codes have their scales behind them."""
    return (num_blocks, 2, heads, block_size // GROUP, GROUP * row_size(head_size, dtype))


def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write tokens ``[tokens, num_kv_heads, head_size]`` to their slots in a cache of this layout."""
    keys, values = _by_token(cache, key)
    group, lane = slots // GROUP, slots % GROUP
    groups, pair, size = cache.shape[3], keys.shape[-1], key.shape[-1]
    if cache.dtype in LARGEST_CODES:
        key, value = (quantize_rows(x, cache.dtype) for x in (key, value))
        rows = torch.stack((key, value), dim=1)[..., size:]
        _scales(cache, size)[group // groups, :, :, group % groups, lane] = rows
        key, value = key[..., :size], value[..., :size]
    keys[group // groups, :, group % groups, lane] = key.reshape(
        *key.shape[:-1], size // pair, pair
    )
    values[group // groups, :, group % groups, lane // pair, lane % pair] = value


def in_opgrafts_layout(cache: Tensor, query: Tensor) -> Tensor:
    """Copy a cache of this layout to ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, or rows of codes."""
    keys, values = _by_token(cache, query)
    rows = torch.stack((keys.flatten(4).flatten(2, 3), values.flatten(2, 4)), dim=1)
    if cache.dtype in LARGEST_CODES:
        return torch.cat((rows, _scales(cache, query.shape[-1]).flatten(3, 4)), dim=-1)
    return rows


def _scales(cache: Tensor, head_size: int) -> Tensor:
    """View the scales of a cache of codes as ``[blocks, 2, heads, groups, 16, 4]``."""
    return cache[..., GROUP * head_size :].view(*cache.shape[:-1], GROUP, SCALE_BYTES)


def _by_token(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """View keys as ``[blocks, heads, groups, 16, pairs, pair]``, values as ``[…, 16 / pair, pair, head_size]``.

    The size of a head and the dtype in which its elements lie are those of ``x``.
    """
    size, pair = x.shape[-1], 2 if x.dtype == torch.bfloat16 else 1
    keys, values = cache[..., : GROUP * size].unbind(1)
    keys = keys.view(*keys.shape[:-1], size // pair, GROUP, pair).transpose(-3, -2)
    return keys, values.view(*values.shape[:-1], GROUP // pair, size, pair).transpose(-2, -1)


_attend_pages = op("attend_pages")
