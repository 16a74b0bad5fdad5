"""A Triton kernel for attention with a result in 8-bit floats. ``functional`` has the maths.

A program attends with some tokens, by all query heads of one key head, as in attention over pages.
Its rows stay in registers from the scores to the quantisation. They are rounded to the dtype of
``query``, as the separate kernels round them. Masks, heads of two sizes and batches that broadcast
take the separate kernels.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from opgraft.ops.attention.functional import scaled_dot_product_attention
from opgraft.ops.attention.quantized import functional as definitions
from opgraft.ops.attention.quantized.functional import FP8
from opgraft.ops.attention.triton import (
    LOWEST,
    UNBOUNDED,
    WIDEST_HEAD,
    added_keys,
    loaded_rows,
    rows_of_queries,
    scores_of,
    tile_of_keys,
    tile_of_queries,
)
from opgraft.ops.quantization.functional import GroupShape, largest_code
from opgraft.ops.quantization.triton import quant_fp8_static, quantizable, store_quantized
from opgraft.ops.triton_launch import launch, replaces
from torch import Tensor

__all__ = ["scaled_dot_product_attention_quant_fp8_static"]


@triton.jit
def _share_of_program(tokens, key_heads, queries):
    """Return the entry of the batch, the key head, the first token, and the number of tokens."""
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, queries)
    first = program % blocks * queries
    key_head = program // blocks % key_heads

    # In int64, as the place of an element may exceed 2^31.
    entry = (program // blocks // key_heads).to(tl.int64)
    return entry, key_head, first, tl.minimum(queries, tokens - first)


@triton.jit
def _attended(
    queries,
    key,
    value,
    key_row,
    value_row,
    position,
    end,
    head_size,
    scale,
    window: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Return the values up to ``end`` that rows of queries attend to, each up to its position."""
    highest = tl.full((queries.shape[0], 1), LOWEST, tl.float32)
    total = tl.zeros((queries.shape[0], 1), tl.float32)
    attended = tl.zeros((queries.shape[0], tile_columns), tl.float32)
    for start in range(0, end, tile_keys):
        place = start + tl.arange(0, tile_keys)
        row = place[:, None].to(tl.int64)
        seen = row < end
        keys = loaded_rows(key + row * key_row, seen, head_size, queries.dtype, tile_columns)
        values = loaded_rows(value + row * value_row, seen, head_size, queries.dtype, tile_columns)
        scores = scores_of(queries, keys, place, end, position, window, scale, 0.0)
        attended, highest, total = added_keys(attended, highest, total, scores, values)
    return attended / total


@triton.jit(do_not_specialize=["tokens", "keys"])
def attention_quant_kernel(
    query,
    key,
    value,
    q,
    output_scale,
    heads,
    group,
    tokens,
    keys,
    head_size,
    scale,
    highest_code,
    query_entry,
    query_head,
    query_row,
    key_entry,
    key_head,
    key_row,
    value_entry,
    value_head,
    value_row,
    window: tl.constexpr,
    is_causal: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    entry, shared_head, first, count = _share_of_program(tokens, heads // group, tile_rows // group)
    offset, token, head, exists = rows_of_queries(first, count, shared_head, group, tile_rows)

    dtype = query.dtype.element_ty
    query += entry * query_entry + head * query_head + token * query_row
    queries = loaded_rows(query, exists, head_size, dtype, tile_columns)

    end = keys
    position = offset * 0 + keys
    if is_causal:
        end = tl.minimum(keys, first + count)
        position = first + offset

    key += entry * key_entry + shared_head * key_head
    value += entry * value_entry + shared_head * value_head

    attended = _attended(
        queries,
        key,
        value,
        key_row,
        value_row,
        position,
        end,
        head_size,
        scale,
        window,
        tile_keys,
        tile_columns,
    )

    column = tl.arange(0, tile_columns)[None, :]
    inside = exists & (column < head_size)
    q += ((entry * heads + head) * tokens + token) * head_size
    by = tl.load(output_scale).to(tl.float32)
    # The separate kernels round here, too.
    store_quantized(q + column, attended.to(dtype), by, highest_code, inside)


def _kernel_takes(
    query: Tensor, key: Tensor, value: Tensor, output_scale: Tensor, dtype: torch.dtype
) -> bool:
    """Return True if the kernel takes the tensors. Otherwise the separate kernels run."""
    if not quantizable(query, dtype) or not key.numel() or value.shape != key.shape:
        return False
    if not query.dim() == key.dim() >= 3:
        return False
    if query.shape[-1] * query.element_size() > WIDEST_HEAD:
        return False
    if key.shape[:-3] != query.shape[:-3] or key.shape[-1] != query.shape[-1]:
        return False
    if tuple(output_scale.shape) not in ((), (1,)):
        return False
    if not key.dtype == value.dtype == query.dtype:
        return False
    return key.device == value.device == output_scale.device == query.device


def _as_heads(x: Tensor) -> Tensor:
    """Return ``x`` as ``[batch, heads, tokens, size]`` with adjacent columns: a view or a copy."""
    heads = x.reshape(-1, *x.shape[-3:])
    return heads if heads.stride(-1) == 1 or heads.shape[-1] == 1 else heads.contiguous()


@replaces(definitions.scaled_dot_product_attention_quant_fp8_static)
def scaled_dot_product_attention_quant_fp8_static(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_scale: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dtype: torch.dtype = FP8,
) -> Tensor:
    if attn_mask is None and _kernel_takes(query, key, value, output_scale, dtype):
        heads, key_heads = query.shape[-3], key.shape[-3]
        shares_heads = enable_gqa and heads % key_heads == 0
        if heads == key_heads or shares_heads:
            if scale is None:
                scale = query.shape[-1] ** -0.5
            return _attend(query, key, value, output_scale, is_causal, scale, dtype)

    attended = scaled_dot_product_attention.native(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return quant_fp8_static(attended, output_scale, GroupShape.PER_TENSOR, dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_scale: Tensor,
    is_causal: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    q = query.new_empty(query.shape, dtype=dtype)
    by_heads, keys, values = _as_heads(query), _as_heads(key), _as_heads(value)
    entries, heads, tokens, head_size = by_heads.shape
    key_heads = keys.shape[1]
    group = heads // key_heads

    tile = tile_of_queries(by_heads[0].transpose(0, 1), group, 1)
    blocks = triton.cdiv(tokens, tile.rows // group)

    launch(
        attention_quant_kernel,
        entries * key_heads * blocks,
        tile,
        by_heads,
        keys,
        values,
        q,
        output_scale,
        heads,
        group,
        tokens,
        keys.shape[2],
        head_size,
        scale,
        largest_code(dtype),
        *by_heads.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        window=UNBOUNDED,
        is_causal=is_causal,
        tile_keys=tile_of_keys(tile, query),
    )
    return q
