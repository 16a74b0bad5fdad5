"""Attention of decoders over keys and values in pages (Kwon et al., arXiv:2309.06180).

A cache ``[num_blocks, 2, num_kv_heads, block_size, head_size]`` holds keys (0) and values (1) of blocks of tokens. A
sequence has the blocks that its row of a table names, in the order of its tokens. The tokens of a call belong to
sequences that follow one another without padding, prompts and parts of them beside single tokens. A cache of 8 bits
holds ``head_size + 4`` bytes for each token and head, which ``opgraft.ops.attention.codes`` describes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.attention.codes import LARGEST_CODES, dequantize_rows, quantize_rows, row_size
from opgraft.ops.attention.functional import like_query
from opgraft.ops.checks import (
    expect_ascending,
    expect_floating,
    expect_in_range,
    expect_integers,
    expect_positive,
    expect_same_device,
    expect_same_dtype,
    expect_same_shape,
    values_are_checked,
    values_are_known,
)
from opgraft.ops.fakes import nothing
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["paged_attention", "write_kv_cache"]


GATHERED_AT_ONCE = 1 << 16
"""Tokens of contexts that are gathered at a time; a single longer context is gathered as a whole."""


@register_functional("write_kv_cache", nothing, mutates=("cache",))
def write_kv_cache(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens to their places in a cache (arXiv:2309.06180).

    Args:
        key: ``[tokens, num_kv_heads, head_size]``.
        value: as ``key``.
        cache: ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, in the dtype of ``key``; or rows of
            ``head_size + 4`` bytes, codes and their scale, as ``int8``, or as ``uint8`` for fp8 e4m3.
        slots: the place of each token, ``block · block_size + offset``, integers ``[tokens]``, no two the same.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or a slot is not in the cache.
    """
    expect_writable(key, value, cache, slots)
    block_size = cache.shape[3]
    keys, values = cache.transpose(2, 3).unbind(1)
    place = slots // block_size, slots % block_size
    quantized = cache.dtype in LARGEST_CODES
    keys[place] = quantize_rows(key, cache.dtype) if quantized else key
    values[place] = quantize_rows(value, cache.dtype) if quantized else value


@register_functional("paged_attention", like_query)
def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the last tokens of sequences to all their tokens so far, whose keys and values are in a cache.

    Computes ``softmax(cap(Q · Kᵀ · scale) + mask) · V`` (arXiv:1706.03762, in pages arXiv:2309.06180). A token sees
    itself and those before it in its sequence. What no token sees is not read, be it NaN. The result has the shape of
    ``query``.

    Args:
        query: ``[tokens, num_heads, head_size]``, the tokens of all sequences one after another.
        cache: ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, in the dtype of ``query``; or rows of
            ``head_size + 4`` bytes, codes and their scale, as ``int8``, or as ``uint8`` for fp8 e4m3. Each key head
            serves ``num_heads / num_kv_heads`` query heads (arXiv:2305.13245).
        block_table: blocks of each sequence, integers ``[sequences, most blocks]``. Entries whose tokens none sees may
            be anything.
        query_start_loc: where the tokens of each sequence begin and end in ``query``: integers ``[sequences + 1]``,
            ascending from 0 to ``tokens``.
        seq_lens: tokens of each sequence in the cache, those of ``query`` included, which are the last: integers
            ``[sequences]``.
        scale: multiplies the scores.
        sliding_window: tokens that a token sees, with itself (arXiv:2004.05150); all so far if not given.
        logits_soft_cap: bounds scores as ``cap · tanh(score / cap)`` (arXiv:2408.00118).
        sinks: one more score per query head, which has no value: floating-point ``[num_heads]`` (arXiv:2309.17453).

    Raises:
        ValueError: a shape, a dtype, a device or a setting does not fit, ``query_start_loc`` does not ascend from 0 to
            the number of tokens, or a sequence has fewer tokens than in ``query`` or more than its blocks hold.
    """
    expect_pages(query, cache, block_table, query_start_loc, seq_lens)
    expect_settings(query, sliding_window, logits_soft_cap, sinks)
    attend = partial(
        _over_pages,
        cache=cache,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
    )
    return by_sequences(
        attend, query, block_table, query_start_loc, seq_lens, cache.shape[3], sliding_window
    )


def by_sequences(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sliding_window: int | None = None,
) -> Tensor:
    """Attend with the tokens of ``query``, ``[tokens, heads, size]``, sequence by sequence.

    Args:
        attend: gets ``[sequences, tokens, heads, size]``, the positions of first tokens and the lengths,
            ``[sequences]``, and the table; returns the shape of the first.
        query: as that of ``paged_attention``, and so are the other arguments.
        block_table: see ``query``.
        query_start_loc: see ``query``.
        seq_lens: see ``query``.
        block_size: tokens of a block.
        sliding_window: see ``query``.
    """
    if not values_are_known(query_start_loc):
        return _of_unknown_lengths(attend, query, block_table, query_start_loc, seq_lens)
    bounds, lengths = query_start_loc.tolist(), seq_lens.tolist()
    if lengths and bounds == list(range(len(bounds))):
        return _of_one_token_each(attend, query, block_table, seq_lens, block_size)
    size, window = block_size, sliding_window
    parts = []
    for (start, end), length, blocks in zip(pairwise(bounds), lengths, block_table, strict=True):
        first = length - (end - start)
        skipped = 0 if window is None else max(0, first + 1 - window) // size
        ends = seq_lens.new_tensor([[first], [length]]) - skipped * size
        if end > start:
            row = blocks[None, skipped : -(-length // size)]
            parts.append(attend(query[None, start:end], ends[0], ends[1], row)[0])
    return torch.cat(parts) if parts else torch.empty_like(query)


def _of_one_token_each(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
) -> Tensor:
    """Attend with one token of each sequence, ``GATHERED_AT_ONCE`` tokens of contexts at a time."""
    most = max(1, GATHERED_AT_ONCE // max(1, block_table.shape[1] * block_size))
    parts = []
    for start in range(0, len(query), most):
        part = slice(start, start + most)
        lengths = seq_lens[part]
        parts.append(attend(query[part, None], lengths - 1, lengths, block_table[part])[:, 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_unknown_lengths(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Attend where lengths are data: as if any sequence might have all tokens, since a loop would break a graph."""
    starts, counts = query_start_loc[:-1].long(), query_start_loc.diff()
    tokens = torch.arange(query.shape[0], device=query.device)
    rows = (starts[:, None] + tokens).clamp(max=query.shape[0] - 1)
    attended = attend(query[rows], seq_lens - counts, seq_lens, block_table)
    sequence = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True)
    return attended[sequence, tokens - starts[sequence]]


def _over_pages(
    query: Tensor,
    first: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    cache: Tensor,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over ``[sequences, tokens, heads, head_size]``, of tokens at positions from ``first`` on."""
    dtype, size, queries = (
        query.dtype,
        cache.shape[3],
        torch.arange(query.shape[1], device=query.device),
    )
    keys = torch.arange(block_table.shape[1] * size, device=query.device)
    visible = (
        visible_keys(first[:, None] + queries, keys, sliding_window)
        & (keys < lengths[:, None])[:, None]
    )
    used = visible.any(1)
    blocks = block_table.where(used.view(*block_table.shape, size).any(-1), 0)
    pages = cache[blocks]
    if cache.dtype in LARGEST_CODES:
        query = query.to(compute_dtype(dtype))
        pages = dequantize_rows(pages, query.dtype)
    # Of keys and values [sequences, heads, keys, size].
    pages = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    # As a share of zero times NaN is NaN.
    key, value = pages.masked_fill(~used[:, None, :, None], 0.0)
    query = query.transpose(1, 2)
    if logits_soft_cap is None and sinks is None:
        groups = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        mask = visible[:, None]
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, **groups)
    else:
        attended = attend_stepwise(query, key, value, visible, scale, logits_soft_cap, sinks)
    return attended.transpose(1, 2).to(dtype)


def visible_keys(queries: Tensor, keys: Tensor, sliding_window: int | None) -> Tensor:
    """Return ``[..., queries, keys]``: true where a query at a position sees a key at one."""
    behind = queries.unsqueeze(-1) - keys
    return (behind >= 0) if sliding_window is None else (behind >= 0) & (behind < sliding_window)


def attend_stepwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    logits_soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over ``[..., heads, tokens, head_size]`` step by step in float32, as a soft cap and sinks need it."""
    kv_heads, dtype = key.shape[-3], compute_dtype(query.dtype)
    groups = query.reshape(
        *query.shape[:-3], kv_heads, query.shape[-3] // kv_heads, *query.shape[-2:]
    ).to(dtype)
    scores = groups @ key.unsqueeze(-3).to(dtype).mT * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    if visible is not None:
        # Finite, so that rows that see nothing, which nobody reads, are no NaN in a backward pass.
        scores = scores.masked_fill(~visible[..., None, None, :, :], torch.finfo(dtype).min)
    if sinks is None:
        shares = scores.softmax(dim=-1)
    else:
        column = sinks.to(dtype).view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    return (shares @ value.unsqueeze(-3).to(dtype)).flatten(-4, -3).to(query.dtype)


def expect_writable(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Raise ``ValueError`` unless ``cache`` has places for keys and values of tokens at ``slots``."""
    op = "write_kv_cache"
    expect_floating(op, "key", key)
    expect_same_shape(op, "value", value, "key", key)
    _expect_cache(op, cache, "key", key)
    if key.shape[1] != cache.shape[2] or slots.shape != key.shape[:1]:
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)} and slots {tuple(slots.shape)}, expected [tokens, "
            f"{cache.shape[2]}, {key.shape[2]}] and [tokens]"
        )
    expect_same_dtype(op, "value", value, "key", key)
    for argument, x in (("value", value), ("cache", cache), ("slots", slots)):
        expect_same_device(op, argument, x, "key", key)
    expect_integers(op, "slots", slots)
    expect_in_range(op, "slots", slots, cache.shape[0] * cache.shape[3])


def _expect_cache(op: str, cache: Tensor, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``cache`` has pages of heads such as those of ``x``, ``[tokens, heads, size]``."""
    if cache.dtype not in LARGEST_CODES:
        expect_same_dtype(op, "cache", cache, argument, x)
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise ValueError(
            f"{op}: cache has shape {tuple(cache.shape)}, expected [num_blocks, 2, num_kv_heads, block_size, head_size]"
        )
    if x.dim() != 3 or row_size(x.shape[2], cache.dtype) != cache.shape[4]:
        size = cache.shape[4] - row_size(0, cache.dtype)
        raise ValueError(
            f"{op}: {argument} has shape {tuple(x.shape)}, expected [tokens, heads, {size}] as cache has"
        )


def expect_pages(
    query: Tensor, cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> None:
    """Raise ``ValueError`` unless the tokens of ``query`` belong to sequences whose blocks ``cache`` has."""
    op = "paged_attention"
    expect_floating(op, "query", query)
    _expect_cache(op, cache, "query", query)
    if not cache.shape[2] or query.shape[1] % cache.shape[2]:
        raise ValueError(
            f"{op}: cache has {cache.shape[2]} heads, expected a divisor of the {query.shape[1]} of query"
        )
    expect_same_device(op, "cache", cache, "query", query)
    expect_sequences(op, query, block_table, query_start_loc, seq_lens, cache.shape[3])


def expect_sequences(
    op: str,
    query: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
) -> None:
    """Raise ``ValueError`` unless the tokens of ``query`` are the last ones of sequences that their blocks hold."""
    integers = {
        "block_table": block_table,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
    }
    for argument, x in integers.items():
        expect_integers(op, argument, x)
        expect_same_device(op, argument, x, "query", query)
    if seq_lens.dim() != 1 or block_table.dim() != 2 or block_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"{op}: block_table has shape {tuple(block_table.shape)} and seq_lens {tuple(seq_lens.shape)}, expected "
            "[sequences, most blocks] and [sequences]"
        )
    expect_ascending(op, "query_start_loc", query_start_loc, query.shape[0])
    if query_start_loc.shape[0] != seq_lens.shape[0] + 1:
        raise ValueError(
            f"{op}: query_start_loc has shape {tuple(query_start_loc.shape)}, expected ({seq_lens.shape[0] + 1},) as "
            "one more than seq_lens"
        )
    if values_are_checked(seq_lens):
        room, counts = block_table.shape[1] * block_size, query_start_loc.diff()
        if bool(((seq_lens < counts) | (seq_lens > room)).any()):
            raise ValueError(
                f"{op}: seq_lens are {seq_lens.tolist()}, expected at least {counts.tolist()} as in query and at most "
                f"{room} as in {block_table.shape[1]} blocks of {block_size}"
            )


def expect_settings(
    query: Tensor, sliding_window: int | None, logits_soft_cap: float | None, sinks: Tensor | None
) -> None:
    """Raise ``ValueError`` unless ``paged_attention`` can compute with these settings."""
    op = "paged_attention"
    for argument, setting in (
        ("sliding_window", sliding_window),
        ("logits_soft_cap", logits_soft_cap),
    ):
        if setting is not None:
            expect_positive(op, argument, setting)
    if sinks is not None:
        expect_floating(op, "sinks", sinks)
        expect_same_device(op, "sinks", sinks, "query", query)
        if sinks.shape != query.shape[1:2]:
            raise ValueError(
                f"{op}: sinks has shape {tuple(sinks.shape)}, expected ({query.shape[1]},), one per head"
            )
