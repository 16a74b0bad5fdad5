"""Attention of decoders over pages, in a cache layout of this plugin.

``csrc/kernels.h`` describes the layout. It needs head sizes and block sizes that are multiples of
16. Attention with other sizes keeps opgraft's layout and runs opgraft's definition.

The kernel refuses some calls in its own layout, for example if a gradient is required or in
float64. Then the cache is copied to opgraft's layout, and opgraft's definition runs on the copy.
"""

from __future__ import annotations

from collections.abc import Callable
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
"""Tokens of a group. In a group the keys of all tokens lie element by element."""


def takes(head_size: int, block_size: int) -> bool:
    """Return True if blocks of such heads can have the layout of this plugin."""
    return head_size % GROUP == 0 and block_size % GROUP == 0


def attend(
    batch: AttentionBatch,
    pages: LayerPages,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *settings: Any,
) -> Tensor:
    """Write new tokens to their pages, and attend over the pages.

    Args:
        batch: the sequences.
        pages: the pages of the layer, in the layout of this plugin.
        query: ``[tokens, heads, head_size]``.
        key: ``[tokens, num_kv_heads, head_size]``.
        value: like ``key``.
        settings: scale, window, soft cap and sinks.

    Returns:
        A tensor in shape and dtype of ``query``.
    """
    tensors = {"query": query, "key": key, "value": value, "cache": pages.cache}
    places = (pages.block_table, batch.query_start_loc, batch.seq_lens)
    taken = query.dtype in DTYPES and query.is_cpu
    # Compiled code cannot catch the error of an op. So it asks for all arguments beforehand.
    if taken and is_dynamo_compiling():
        taken = not refusal("attend_pages", tensors)
    if taken:
        try:
            return _attend_pages(*tensors.values(), pages.slots, *places, *settings)
        except REFUSED:
            pass
    write(key, value, pages.cache, pages.slots)
    plain = in_opgrafts_layout(pages.cache, query)
    return functional.paged_attention.native(query, plain, *places, *settings)


def has_kernel(platform: object) -> bool:
    """Return True if the library is there. Without it, the layout is of no use."""
    return not missing()


def cache_shape(
    num_blocks: int, heads: int, block_size: int, head_size: int, dtype: torch.dtype | None
) -> tuple[int, ...]:
    """Return the shape of a cache: ``(num_blocks, 2, heads, groups, bytes or elements)``.

    In a cache of codes, the scales of a group follow its codes.
    """
    groups = block_size // GROUP
    return (num_blocks, 2, heads, groups, GROUP * row_size(head_size, dtype))


def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write tokens ``[tokens, num_kv_heads, head_size]`` to their slots in this layout."""
    keys, values = _by_token(cache, key)
    groups = cache.shape[3]
    head_size = key.shape[-1]
    pair = keys.shape[-1]
    block = slots // GROUP // groups
    group = slots // GROUP % groups
    lane = slots % GROUP
    if cache.dtype in LARGEST_CODES:
        # A row of codes ends with the bytes of its scale.
        key = quantize_rows(key, cache.dtype)
        value = quantize_rows(value, cache.dtype)
        scales = torch.stack((key, value), dim=1)[..., head_size:]
        _scales(cache, head_size)[block, :, :, group, lane] = scales
        key = key[..., :head_size]
        value = value[..., :head_size]
    in_pairs = key.reshape(*key.shape[:-1], head_size // pair, pair)
    keys[block, :, group, lane] = in_pairs
    values[block, :, group, lane // pair, lane % pair] = value


def in_opgrafts_layout(cache: Tensor, query: Tensor) -> Tensor:
    """Return a copy of a cache in opgraft's layout.

    The shape is ``[num_blocks, 2, num_kv_heads, block_size, row]``. A row has ``head_size``
    elements. In a cache of codes, the bytes of a scale follow.
    """
    keys, values = _by_token(cache, query)
    key_rows = keys.flatten(4).flatten(2, 3)
    value_rows = values.flatten(2, 4)
    rows = torch.stack((key_rows, value_rows), dim=1)
    if cache.dtype not in LARGEST_CODES:
        return rows
    scales = _scales(cache, query.shape[-1]).flatten(3, 4)
    return torch.cat((rows, scales), dim=-1)


def _scales(cache: Tensor, head_size: int) -> Tensor:
    """Return a view of the scales in a cache of codes: ``[blocks, 2, heads, groups, 16, 4]``."""
    behind_codes = cache[..., GROUP * head_size :]
    return behind_codes.view(*cache.shape[:-1], GROUP, SCALE_BYTES)


def _by_token(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of keys and values, where tokens have indexes of their own.

    bfloat16 elements lie in pairs: two elements of a key, or one element of two values. In other
    dtypes a pair has one element.

    Args:
        cache: a cache of this layout.
        x: a tensor with the head size and the dtype of the elements.

    Returns:
        Keys as ``[blocks, heads, groups, 16, head_size / pair, pair]``, and values as
        ``[blocks, heads, groups, 16 / pair, pair, head_size]``.
    """
    head_size = x.shape[-1]
    pair = 2 if x.dtype == torch.bfloat16 else 1
    keys, values = cache[..., : GROUP * head_size].unbind(1)
    places = keys.shape[:-1]
    keys = keys.view(*places, head_size // pair, GROUP, pair)
    values = values.view(*places, GROUP // pair, head_size, pair)
    return keys.transpose(-3, -2), values.transpose(-2, -1)


_attend_pages: Callable[..., Tensor] = op("attend_pages")
