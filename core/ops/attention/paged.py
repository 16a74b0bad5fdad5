"""Attention of decoders over keys and values in pages (Kwon et al., arXiv:2309.06180).

A cache ``[num_blocks, 2, num_kv_heads, block_size, head_size]`` holds keys (0) and values (1) of
blocks of tokens. Each sequence has a row in a table: the numbers of its blocks, in the order of its
tokens. The tokens of one call follow one another without padding, sequence by sequence: whole
prompts, parts of prompts, and single tokens. A cache of 8 bits holds ``head_size + 4`` bytes for
each token and head, see ``opgraft.ops.attention.codes``.
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
"""Tokens of contexts to gather at a time. A single longer context is gathered as a whole."""


@register_functional("write_kv_cache", nothing, mutates=("cache",))
def write_kv_cache(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens to their places in a cache (arXiv:2309.06180).

    Args:
        key: ``[tokens, num_kv_heads, head_size]``.
        value: as ``key``.
        cache: ``[num_blocks, 2, num_kv_heads, block_size, head_size]`` in the dtype of ``key``. Or
            rows of ``head_size + 4`` bytes, codes and their scale: ``int8`` codes, or ``uint8`` for
            fp8 e4m3.
        slots: the place of each token, ``block · block_size + offset``: integers ``[tokens]``, no
            two the same.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or a slot is not in the cache.
    """
    expect_writable(key, value, cache, slots)
    block_size = cache.shape[3]

    # Views of the cache with the token before the head: [num_blocks, block_size, heads, size].
    keys, values = cache.transpose(2, 3).unbind(1)
    place = (slots // block_size, slots % block_size)
    if cache.dtype in LARGEST_CODES:
        key = quantize_rows(key, cache.dtype)
        value = quantize_rows(value, cache.dtype)
    keys[place] = key
    values[place] = value


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
    """Attend with the last tokens of sequences over the keys and values in a cache.

    Computes ``softmax(cap(Q · Kᵀ · scale) + mask) · V`` (arXiv:1706.03762, in pages
    arXiv:2309.06180). A token sees itself and the earlier tokens of its sequence. Cache rows beyond
    the view of every token are not read, and may be NaN. The result has the shape of ``query``.

    Args:
        query: ``[tokens, num_heads, head_size]``, the tokens of all sequences one after another.
        cache: ``[num_blocks, 2, num_kv_heads, block_size, head_size]`` in the dtype of ``query``.
            Or rows of ``head_size + 4`` bytes, codes and their scale: ``int8`` codes, or ``uint8``
            for fp8 e4m3. Each key head serves ``num_heads / num_kv_heads`` query heads
            (arXiv:2305.13245).
        block_table: the blocks of each sequence, integers ``[sequences, most blocks]``. Entries
            beyond the view of every token may be anything.
        query_start_loc: the bounds of each sequence in ``query``: integers ``[sequences + 1]``,
            ascending from 0 to ``tokens``.
        seq_lens: tokens of each sequence in the cache: integers ``[sequences]``. The tokens of
            ``query`` are the last of them.
        scale: multiplies the scores.
        sliding_window: tokens in the view of a token, itself included (arXiv:2004.05150); by
            default all so far.
        logits_soft_cap: bounds scores as ``cap · tanh(score / cap)`` (arXiv:2408.00118).
        sinks: one more score per query head, without a value: floating-point ``[num_heads]``
            (arXiv:2309.17453).

    Raises:
        ValueError: a shape, a dtype, a device or a setting does not fit; ``query_start_loc`` does
            not ascend from 0 to the number of tokens; or a sequence has fewer tokens than in
            ``query``, or more than its blocks hold.
    """
    expect_pages(query, cache, block_table, query_start_loc, seq_lens)
    expect_settings(query, sliding_window, logits_soft_cap, sinks)
    attend = partial(
        _attend_over_pages,
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
        attend: called with queries ``[sequences, tokens, heads, size]``, the positions of the first
            tokens and the lengths, both ``[sequences]``, and the block table. Returns the attended
            values in the shape of the queries.
        query: this and the other arguments are those of ``paged_attention``.
        block_table: see ``query``.
        query_start_loc: see ``query``.
        seq_lens: see ``query``.
        block_size: tokens of a block.
        sliding_window: see ``query``.
    """
    if not values_are_known(query_start_loc):
        return _attend_unknown_lengths(attend, query, block_table, query_start_loc, seq_lens)

    bounds = query_start_loc.tolist()
    lengths = seq_lens.tolist()
    # With one token each, sequences need no loop.
    if lengths and bounds == list(range(len(bounds))):
        return _attend_single_tokens(attend, query, block_table, seq_lens, block_size)

    parts = []
    for (start, end), length, blocks in zip(pairwise(bounds), lengths, block_table, strict=True):
        if end <= start:
            continue
        first = length - (end - start)
        skipped = 0
        if sliding_window is not None:
            # Blocks before every window need no gathering, so positions count from behind them.
            skipped = max(0, first + 1 - sliding_window) // block_size
        firsts, ends = seq_lens.new_tensor([[first], [length]]) - skipped * block_size
        last = -(-length // block_size)
        row = blocks[None, skipped:last]
        parts.append(attend(query[None, start:end], firsts, ends, row)[0])
    return torch.cat(parts) if parts else torch.empty_like(query)


def _attend_single_tokens(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    block_size: int,
) -> Tensor:
    """Attend with one token of each sequence, ``GATHERED_AT_ONCE`` tokens of contexts at a time."""
    longest = block_table.shape[1] * block_size
    sequences = max(1, GATHERED_AT_ONCE // max(1, longest))
    parts = []
    for start in range(0, len(query), sequences):
        part = slice(start, start + sequences)
        lengths = seq_lens[part]
        parts.append(attend(query[part, None], lengths - 1, lengths, block_table[part])[:, 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_unknown_lengths(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Attend as if each sequence might have all tokens.

    A compiler does not know the lengths: a loop over them would break the graph.
    """
    count = query.shape[0]
    starts = query_start_loc[:-1].long()
    lengths = query_start_loc.diff()
    tokens = torch.arange(count, device=query.device)

    # Rows behind the end of a sequence hold other tokens: their results are not picked below.
    rows = (starts[:, None] + tokens).clamp(max=count - 1)
    attended = attend(query[rows], seq_lens - lengths, seq_lens, block_table)
    sequence = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True)
    return attended[sequence, tokens - starts[sequence]]


def _attend_over_pages(
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
    """Attend over ``[sequences, tokens, heads, head_size]``; the tokens begin at ``first``."""
    dtype = query.dtype
    block_size = cache.shape[3]
    visible = visible_in_blocks(query, first, lengths, block_table, block_size, sliding_window)
    used = visible.any(1)
    blocks = used_blocks(block_table, used, block_size)

    pages = cache[blocks]
    if cache.dtype in LARGEST_CODES:
        query = query.to(compute_dtype(dtype))
        pages = dequantize_rows(pages, query.dtype)

    # Keys and values: [2, sequences, heads, keys, size].
    pages = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)

    # Unused rows may be NaN, and zero times NaN is NaN.
    key, value = pages.masked_fill(~used[:, None, :, None], 0.0)
    query = query.transpose(1, 2)
    if logits_soft_cap is None and sinks is None:
        groups = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
        mask = visible[:, None]
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, **groups)
    else:
        attended = attend_stepwise(query, key, value, visible, scale, logits_soft_cap, sinks)
    return attended.transpose(1, 2).to(dtype)


def visible_in_blocks(
    query: Tensor,
    first: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    block_size: int,
    sliding_window: int | None,
) -> Tensor:
    """Return the keys in the view of each token: booleans ``[sequences, tokens, keys]``.

    Args:
        query: ``[sequences, tokens, ...]``.
        first: the positions of the first tokens, ``[sequences]``.
        lengths: tokens of each sequence so far, ``[sequences]``.
        block_table: ``[sequences, blocks]``; ``keys`` is ``blocks · block_size``.
        block_size: tokens of a block.
        sliding_window: as that of ``paged_attention``.
    """
    queries = torch.arange(query.shape[1], device=query.device)
    keys = torch.arange(block_table.shape[1] * block_size, device=query.device)
    visible = visible_keys(first[:, None] + queries, keys, sliding_window)
    exists = keys < lengths[:, None]
    return visible & exists[:, None]


def used_blocks(block_table: Tensor, used: Tensor, block_size: int) -> Tensor:
    """Return the table with block 0 in place of each block without a used key.

    Entries for unused blocks may be anything, even out of the cache.

    Args:
        block_table: ``[sequences, blocks]``.
        used: booleans ``[sequences, blocks · block_size]``.
        block_size: tokens of a block.
    """
    is_used = used.view(*block_table.shape, block_size).any(-1)
    return block_table.where(is_used, 0)


def visible_keys(queries: Tensor, keys: Tensor, sliding_window: int | None) -> Tensor:
    """Return ``[..., queries, keys]``: true if the query at a position sees the key at another."""
    behind = queries.unsqueeze(-1) - keys
    visible = behind >= 0
    if sliding_window is None:
        return visible
    return visible & (behind < sliding_window)


def attend_stepwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    logits_soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over ``[..., heads, tokens, head_size]`` step by step, in float32 at least.

    Torch's attention takes neither a soft cap nor sinks.
    """
    dtype = compute_dtype(query.dtype)
    *lead, heads, tokens, head_size = query.shape
    kv_heads = key.shape[-3]

    # Each key head serves a group of query heads: [..., kv_heads, group, tokens, head_size].
    groups = query.reshape(*lead, kv_heads, heads // kv_heads, tokens, head_size).to(dtype)
    scores = groups @ key.unsqueeze(-3).to(dtype).mT * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    if visible is not None:
        # Finite: a row without a visible key is never read, but must give no NaN backwards.
        lowest = torch.finfo(dtype).min
        scores = scores.masked_fill(~visible[..., None, None, :, :], lowest)

    shares = scores.softmax(dim=-1) if sinks is None else _softmax_with_sinks(scores, sinks)
    attended = shares @ value.unsqueeze(-3).to(dtype)
    return attended.flatten(-4, -3).to(query.dtype)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax of ``[..., kv_heads, group, tokens, keys]`` with one more score per head.

    The share of the sink is left out.
    """
    kv_heads, group = scores.shape[-4:-2]
    of_heads = sinks.to(scores.dtype).view(kv_heads, group, 1, 1)
    column = of_heads.expand(*scores.shape[:-1], 1)
    shares = torch.cat((scores, column), dim=-1).softmax(dim=-1)
    return shares[..., :-1]


def expect_writable(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Raise ``ValueError`` unless ``cache`` has places at ``slots`` for the keys and values."""
    op = "write_kv_cache"
    expect_floating(op, "key", key)
    expect_same_shape(op, "value", value, "key", key)
    _expect_cache(op, cache, "key", key)
    if key.shape[1] != cache.shape[2] or slots.shape != key.shape[:1]:
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)} and slots {tuple(slots.shape)}, expected "
            f"[tokens, {cache.shape[2]}, {key.shape[2]}] and [tokens]"
        )

    expect_same_dtype(op, "value", value, "key", key)
    for argument, x in (("value", value), ("cache", cache), ("slots", slots)):
        expect_same_device(op, argument, x, "key", key)
    expect_integers(op, "slots", slots)
    expect_in_range(op, "slots", slots, cache.shape[0] * cache.shape[3])


def _expect_cache(op: str, cache: Tensor, argument: str, x: Tensor) -> None:
    """Raise ``ValueError`` unless ``cache`` has pages for heads like ``[tokens, heads, size]``."""
    if cache.dtype not in LARGEST_CODES:
        expect_same_dtype(op, "cache", cache, argument, x)
    if cache.dim() != 5 or cache.shape[1] != 2:
        raise ValueError(
            f"{op}: cache has shape {tuple(cache.shape)}, expected "
            "[num_blocks, 2, num_kv_heads, block_size, head_size]"
        )
    if x.dim() != 3 or row_size(x.shape[2], cache.dtype) != cache.shape[4]:
        size = cache.shape[4] - row_size(0, cache.dtype)
        raise ValueError(
            f"{op}: {argument} has shape {tuple(x.shape)}, expected [tokens, heads, {size}] as "
            "cache has"
        )


def expect_pages(
    query: Tensor, cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> None:
    """Raise ``ValueError`` unless ``query`` holds tokens of sequences with blocks in ``cache``."""
    op = "paged_attention"
    expect_floating(op, "query", query)
    _expect_cache(op, cache, "query", query)

    heads = query.shape[1]
    kv_heads = cache.shape[2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"{op}: cache has {kv_heads} heads, expected a divisor of the {heads} of query"
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
    """Raise ``ValueError`` unless ``query`` holds the last tokens of sequences in their blocks."""
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
            f"{op}: block_table has shape {tuple(block_table.shape)} and seq_lens "
            f"{tuple(seq_lens.shape)}, expected [sequences, most blocks] and [sequences]"
        )

    expect_ascending(op, "query_start_loc", query_start_loc, query.shape[0])
    expected = seq_lens.shape[0] + 1
    if query_start_loc.shape[0] != expected:
        raise ValueError(
            f"{op}: query_start_loc has shape {tuple(query_start_loc.shape)}, expected "
            f"({expected},) as one more than seq_lens"
        )
    if not values_are_checked(seq_lens):
        return

    blocks = block_table.shape[1]
    room = blocks * block_size
    counts = query_start_loc.diff()
    if bool(((seq_lens < counts) | (seq_lens > room)).any()):
        raise ValueError(
            f"{op}: seq_lens are {seq_lens.tolist()}, expected at least {counts.tolist()} as in "
            f"query and at most {room} as in {blocks} blocks of {block_size}"
        )


def expect_settings(
    query: Tensor, sliding_window: int | None, logits_soft_cap: float | None, sinks: Tensor | None
) -> None:
    """Raise ``ValueError`` unless ``paged_attention`` can compute with these settings."""
    op = "paged_attention"
    if sliding_window is not None:
        expect_positive(op, "sliding_window", sliding_window)
    if logits_soft_cap is not None:
        expect_positive(op, "logits_soft_cap", logits_soft_cap)
    if sinks is None:
        return

    expect_floating(op, "sinks", sinks)
    expect_same_device(op, "sinks", sinks, "query", query)
    if sinks.shape != query.shape[1:2]:
        raise ValueError(
            f"{op}: sinks has shape {tuple(sinks.shape)}, expected ({query.shape[1]},), one per "
            "head"
        )
