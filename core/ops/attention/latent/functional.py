"""Attention over latents in pages (DeepSeek-AI, arXiv:2405.04434, section 2.1).

A cache ``[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`` has a row for each token:
first the latent, the source of the keys and values of all heads, then the rotated key, shared by
all heads. Blocks, tables and sequences are those of ``opgraft.ops.attention.paged``.
"""

from __future__ import annotations

from functools import partial

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.attention.paged import (
    by_sequences,
    expect_sequences,
    used_blocks,
    visible_in_blocks,
)
from opgraft.ops.checks import (
    expect_floating,
    expect_in_range,
    expect_integers,
    expect_positive,
    expect_same_device,
    expect_same_dtype,
    expect_size,
)
from opgraft.ops.fakes import nothing
from torch import Tensor
from torch.nn import functional as F

__all__ = ["concat_and_cache_mla", "mla_paged_attention"]


@register_functional("concat_and_cache_mla", nothing, mutates=("cache",))
def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write the latents and rotated keys of new tokens to a cache (arXiv:2405.04434).

    Args:
        kv_c: ``[tokens, kv_lora_rank]``, normalised.
        k_pe: ``[tokens, qk_rope_head_dim]``, rotated.
        cache: ``[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]``, in the dtype of
            ``kv_c``.
        slots: the place of each token, ``block · block_size + offset``: integers ``[tokens]``, no
            two the same.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or a slot is not in the cache.
    """
    expect_writable(kv_c, k_pe, cache, slots)
    block_size = cache.shape[1]
    rows = torch.cat((kv_c, k_pe), dim=-1)
    cache[slots // block_size, slots % block_size] = rows


def _like_query_with_latents(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    """Make a tensor of the shape of ``query``, with the elements of a latent: a fake rule."""
    return query.new_empty((*query.shape[:-1], kv_lora_rank))


@register_functional("mla_paged_attention", _like_query_with_latents)
def mla_paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    """Attend over latents in a cache; the queries have absorbed the key projection.

    Computes ``softmax(Q · Rᵀ · scale + mask) · C`` (arXiv:2405.04434). ``R`` are the rows of a
    sequence, and ``C`` their first ``kv_lora_rank`` elements: all query heads share one key, and
    the value is a part of the key. A token sees itself and the earlier tokens of its sequence.
    Rows beyond the view of every token are not read, and may be NaN.

    Args:
        query: ``[tokens, num_heads, kv_lora_rank + qk_rope_head_dim]``, the tokens of all sequences
            one after another.
        cache: ``[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]``, in the dtype of
            ``query``.
        block_table: the blocks of each sequence, integers ``[sequences, most blocks]``. Entries
            beyond the view of every token may be anything.
        query_start_loc: the bounds of each sequence in ``query``: integers ``[sequences + 1]``,
            ascending from 0 to ``tokens``.
        seq_lens: tokens of each sequence in the cache: integers ``[sequences]``. The tokens of
            ``query`` are the last of them.
        kv_lora_rank: elements of a latent.
        scale: multiplies the scores.

    Returns:
        The attended latents, ``[tokens, num_heads, kv_lora_rank]``. The value projection turns them
        into values.

    Raises:
        ValueError: a shape, a dtype or a device does not fit; ``query_start_loc`` does not ascend
            from 0 to the number of tokens; or a sequence has fewer tokens than in ``query``, or
            more than its blocks hold.
    """
    expect_latents(query, cache, block_table, query_start_loc, seq_lens, kv_lora_rank)
    attend = partial(_attend_over_latents, cache=cache, scale=scale)
    attended = by_sequences(attend, query, block_table, query_start_loc, seq_lens, cache.shape[1])
    return attended[..., :kv_lora_rank].contiguous()


def _attend_over_latents(
    query: Tensor,
    first: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    cache: Tensor,
    scale: float,
) -> Tensor:
    """Attend over ``[sequences, tokens, heads, size]``; the tokens begin at position ``first``.

    The heads of a token count as further tokens of a single head, so no row is repeated for them.
    """
    block_size = cache.shape[1]
    heads = query.shape[2]
    visible = visible_in_blocks(query, first, lengths, block_table, block_size, None)
    used = visible.any(1)
    blocks = used_blocks(block_table, used, block_size)
    rows = cache[blocks].flatten(1, 2)

    # Unused rows may be NaN, and zero times NaN is NaN.
    rows = rows.masked_fill(~used[:, :, None], 0.0)[:, None]
    mask = visible.repeat_interleave(heads, dim=1)[:, None]
    queries = query.flatten(1, 2)[:, None]
    attended = F.scaled_dot_product_attention(queries, rows, rows, mask, scale=scale)
    return attended.view(query.shape)


def expect_writable(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Raise ``ValueError`` unless ``cache`` has places at ``slots`` for latents and keys."""
    op = "concat_and_cache_mla"
    expect_floating(op, "kv_c", kv_c)
    are_rows = kv_c.dim() == 2 and k_pe.dim() == 2
    if not are_rows or k_pe.shape[0] != kv_c.shape[0] or slots.shape != kv_c.shape[:1]:
        raise ValueError(
            f"{op}: kv_c has shape {tuple(kv_c.shape)}, k_pe {tuple(k_pe.shape)} and slots "
            f"{tuple(slots.shape)}, expected [tokens, kv_lora_rank], [tokens, qk_rope_head_dim] "
            "and [tokens]"
        )

    width = kv_c.shape[1] + k_pe.shape[1]
    if cache.dim() != 3 or cache.shape[2] != width:
        raise ValueError(
            f"{op}: cache has shape {tuple(cache.shape)}, expected "
            f"[num_blocks, block_size, {width}]"
        )

    for argument, x in (("k_pe", k_pe), ("cache", cache)):
        expect_same_dtype(op, argument, x, "kv_c", kv_c)
    for argument, x in (("k_pe", k_pe), ("cache", cache), ("slots", slots)):
        expect_same_device(op, argument, x, "kv_c", kv_c)
    expect_integers(op, "slots", slots)
    expect_in_range(op, "slots", slots, cache.shape[0] * cache.shape[1])


def expect_latents(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
) -> None:
    """Raise ``ValueError`` unless ``query`` holds tokens of sequences with latents in ``cache``."""
    op = "mla_paged_attention"
    expect_floating(op, "query", query)
    expect_same_dtype(op, "cache", cache, "query", query)
    expect_same_device(op, "cache", cache, "query", query)
    if query.dim() != 3 or cache.dim() != 3 or query.shape[2] != cache.shape[2]:
        raise ValueError(
            f"{op}: query has shape {tuple(query.shape)} and cache {tuple(cache.shape)}, expected "
            "[tokens, num_heads, size] and [num_blocks, block_size, size]"
        )

    expect_rank(kv_lora_rank)
    if kv_lora_rank > cache.shape[2]:
        raise ValueError(
            f"{op}: kv_lora_rank is {kv_lora_rank}, expected at most {cache.shape[2]} as cache has"
        )
    expect_sequences(op, query, block_table, query_start_loc, seq_lens, cache.shape[1])


def expect_rank(kv_lora_rank: int) -> None:
    """Raise ``ValueError`` unless a latent can have ``kv_lora_rank`` elements."""
    expect_size("mla_paged_attention", "kv_lora_rank", kv_lora_rank)
    expect_positive("mla_paged_attention", "kv_lora_rank", kv_lora_rank)
