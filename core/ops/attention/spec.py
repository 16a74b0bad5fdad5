"""Specs of attention, whose references compute every score and exponential by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from opgraft.ops import attention as ops
from opgraft.ops.attention import functional, paged
from opgraft.ops.attention.codes_spec import decoded_rows, encoded
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, KEY_HEADS, KEYS = 4, 2, 5
BLOCK_SIZE, SPARE_BLOCKS = 4, 40


def _attention_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    """Draw heads of size 1 with their own keys, others with shared ones."""
    *batch, queries = lead
    heads = HEADS if head_size == 1 else KEY_HEADS
    return {
        "query": draw(*batch, HEADS, queries, head_size),
        "key": draw(*batch, heads, KEYS, head_size),
        "value": draw(*batch, heads, KEYS, head_size),
        "attn_mask": draw(queries, KEYS),
        "enable_gqa": True,
    }


def _encoder_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    """Draw six packed sequences, of which one at least is empty, or padded rows."""
    batch, tokens = lead
    within = draw.integers(0, batch * tokens + 1, (4,)).sort().values
    bounds = torch.cat([torch.tensor([0]), within, within[-1:], torch.tensor([batch * tokens])])
    return {
        "query": draw(batch, tokens, HEADS * head_size),
        "key": draw(batch, tokens, KEY_HEADS, head_size),
        "value": draw(batch, tokens, KEY_HEADS * head_size),
        "num_heads": HEADS,
        "num_kv_heads": KEY_HEADS,
        "scale": 0.3,
        "cu_seqlens": bounds.to(torch.int32),
        "sequence_lengths": draw.integers(0, tokens + 1, (batch,)),
    }


def _written(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    """Draw keys, values and places of their own for them, in a cache with more places."""
    tokens = math.prod(lead)
    blocks = tokens // BLOCK_SIZE + 2
    return {
        "key": draw(tokens, KEY_HEADS, head_size),
        "value": draw(tokens, KEY_HEADS, head_size),
        "cache": draw(blocks, 2, KEY_HEADS, BLOCK_SIZE, head_size),
        "slots": torch.randperm(blocks * BLOCK_SIZE, generator=draw.generator)[:tokens],
    }


def _written_codes(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Make what draws a cache of rows of codes, of which any bytes are some, for ``_written``."""

    def drawn(draw: Draw, lead: Sequence[int], head_size: int) -> Tensor:
        shape = math.prod(lead) // BLOCK_SIZE + 2, 2, KEY_HEADS, BLOCK_SIZE, head_size + 4
        return draw.integers(0, 256, shape).to(torch.uint8).view(dtype)

    return drawn


def _paged_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    """Draw sequences of up to ``longest`` tokens, of which the first has as many, with up to ten tokens before them."""
    sequences, longest = lead
    lengths = draw.integers(int(longest == 1), longest + 1, (sequences,))
    lengths[:1] = longest
    seq_lens = lengths + draw.integers(0, 11, (sequences,))
    needed = (seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    blocks = int(needed.sum()) + SPARE_BLOCKS
    table = draw.integers(0, blocks, (sequences, (longest + 10) // BLOCK_SIZE + 3))
    own = torch.randperm(blocks, generator=draw.generator)
    for row, part in zip(
        table, torch.split_with_sizes(own[:-SPARE_BLOCKS], needed.tolist()), strict=True
    ):
        row[: len(part)] = part
    return {
        "query": draw(int(lengths.sum()), HEADS, head_size),
        "cache": draw(blocks, 2, KEY_HEADS, BLOCK_SIZE, head_size),
        "block_table": table.to(torch.int32),
        "query_start_loc": F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "seq_lens": seq_lens.to(torch.int32),
        "scale": 0.3,
    }


def _paged_codes(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Make what draws a cache of codes, with at least the blocks that ``_paged_inputs`` has a table for."""

    def drawn(draw: Draw, lead: Sequence[int], head_size: int) -> Tensor:
        sequences, longest = lead
        blocks = sequences * (longest // BLOCK_SIZE + 4) + SPARE_BLOCKS
        return encoded(draw(blocks, 2, KEY_HEADS, BLOCK_SIZE, head_size).double(), dtype)

    return drawn


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attend over ``[..., heads, tokens, size]``, each key head for the query heads that share it."""
    shared = torch.arange(query.shape[-3]) * key.shape[-3] // query.shape[-3]
    scores = torch.einsum("...qe,...ke->...qk", query, key[..., shared, :, :]) * scale
    scores = scores if mask is None else scores + mask
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum(
        "...qk,...ke->...qe", weights / weights.sum(-1, keepdim=True), value[..., shared, :, :]
    )


def _reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if is_causal:
        later = torch.arange(key.shape[-2]) > torch.arange(query.shape[-2])[:, None]
        attn_mask = torch.where(later, -math.inf, 0.0).double()
    return attention(
        query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, attn_mask
    )


def _split(x: Tensor, heads: int) -> Tensor:
    """Split ``x`` to ``[batch, heads, tokens, size]``."""
    batch, tokens, *rest = x.shape
    return x.reshape(batch, tokens, heads, math.prod(rest) // heads).transpose(1, 2)


def _encoder(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    q, k, v = _split(query, num_heads), _split(key, num_kv_heads), _split(value, num_kv_heads)
    result = torch.zeros_like(q)
    if cu_seqlens is None:
        lengths = (
            [q.shape[2]] * q.shape[0] if sequence_lengths is None else sequence_lengths.tolist()
        )
        for row, n in enumerate(lengths):
            if n:
                result[row, :, :n] = attention(q[row, :, :n], k[row, :, :n], v[row, :, :n], scale)
        return result.transpose(1, 2).reshape(query.shape)
    packed, q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (result, q, k, v))
    for start, end in pairwise(cu_seqlens.tolist()):
        if start < end:
            packed[:, start:end] = attention(
                q[:, start:end], k[:, start:end], v[:, start:end], scale
            )
    return packed.transpose(0, 1).reshape(query.shape)


def _torch_encoder(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
) -> Any:
    """Attend in one call with the mask of all blocks, for a batch that counts as one row."""
    if cu_seqlens is None:
        return None
    sequence = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    rows = zip((query, key, value), (num_heads, num_kv_heads, num_kv_heads), strict=True)
    q, k, v = (_split(x.reshape(1, -1, *x.shape[2:]), heads) for x, heads in rows)
    attended = F.scaled_dot_product_attention(
        q, k, v, sequence[:, None] == sequence, scale=scale, enable_gqa=num_heads != num_kv_heads
    )
    return attended.transpose(1, 2).reshape(query.shape)


def _encoder_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = ops.MMEncoderAttention(
        num_heads, math.prod(query.shape[2:]) // num_heads, scale, num_kv_heads
    )
    return op, (query, key, value, cu_seqlens, None, sequence_lengths)


def _write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache = cache.clone()
    if not cache.is_floating_point():
        key, value = (encoded(x.float().double(), cache.dtype) for x in (key, value))
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, cache.shape[3])
        cache[block, 0, :, offset] = key[token]
        cache[block, 1, :, offset] = value[token]
    return cache


def _tokens_of(
    cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each token of the query its position, and keys and values up to it, ``[heads, keys, size]``."""
    cache = decoded_rows(cache)
    for sequence, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        length = int(seq_lens[sequence])
        places = [divmod(position, cache.shape[3]) for position in range(length)]
        rows = [cache[int(block_table[sequence, block]), :, :, offset] for block, offset in places]
        for position in range(length - (end - start), length):
            key, value = torch.stack(rows[: position + 1], 2)
            yield position, key, value


def _paged(
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
    result = torch.zeros_like(query)
    shared = torch.arange(query.shape[1]) * cache.shape[2] // query.shape[1]
    for token, (_, key, value) in enumerate(
        _tokens_of(cache, block_table, query_start_loc, seq_lens)
    ):
        key, value = (x[shared, -sliding_window if sliding_window else 0 :] for x in (key, value))
        scores = torch.einsum("he,hke->hk", query[token], key) * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * (1 - 2 / (1 + torch.exp(2 * scores / logits_soft_cap)))
        weights = torch.exp(scores)
        sums = weights.sum(-1) + (0 if sinks is None else torch.exp(sinks))
        result[token] = torch.einsum("hk,hke->he", weights / sums[:, None], value)
    return result


def _torch_paged(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Any:
    """Attend with one token after another to contiguous keys."""
    if logits_soft_cap is not None or sinks is not None or not cache.is_floating_point():
        return None
    attended = []
    for row, (_, key, value) in zip(
        query, _tokens_of(cache, block_table, query_start_loc, seq_lens), strict=True
    ):
        k, v = (x[None, :, -sliding_window if sliding_window else 0 :] for x in (key, value))
        attended.append(
            F.scaled_dot_product_attention(row[None, :, None], k, v, scale=scale, enable_gqa=True)[
                0, :, 0
            ]
        )
    return torch.stack(attended)


def _paged_op(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = ops.PagedAttention(scale, sliding_window, logits_soft_cap)
    return op, (query, cache, block_table, query_start_loc, seq_lens, sinks)


def _attention_flops(query: Tensor, key: Tensor, **others: Any) -> int:
    return 4 * query.numel() * key.shape[-2]


def _encoder_flops(query: Tensor, cu_seqlens: Tensor | None = None, **others: Any) -> int:
    batch, tokens = query.shape[:2]
    pairs = batch * tokens**2 if cu_seqlens is None else int(cu_seqlens.diff().square().sum())
    return 4 * math.prod(query.shape[2:]) * pairs


def _paged_flops(query: Tensor, query_start_loc: Tensor, seq_lens: Tensor, **others: Any) -> int:
    counts = query_start_loc.diff()
    pairs = counts * seq_lens - counts * (counts - 1) // 2
    return 4 * math.prod(query.shape[1:]) * int(pairs.sum())


SPECS = (
    OpSpec(
        functional.scaled_dot_product_attention,
        _attention_inputs,
        _reference_attention,
        _attention_flops,
        module=lambda **arguments: (ops.ScaledDotProductAttention(), arguments),
        variants={
            "": {"attn_mask": None},
            "mask": {},
            "causal": {"attn_mask": None, "is_causal": True},
            "scale": {"attn_mask": None, "scale": 0.3},
        },
        leads=((2, 1), (3, 7), (2, 3, 4), (0, 3), (2, 0)),
        sizes=(1, 9, 64),
        large=(((2, 83), 80), ((1, 257), 64)),
        tolerances=HALF_NORM,
        outside=(
            Outside(
                "torch.nn.functional.scaled_dot_product_attention",
                lambda **arguments: F.scaled_dot_product_attention(**arguments),
            ),
        ),
    ),
    OpSpec(
        functional.mm_encoder_attn,
        _encoder_inputs,
        _encoder,
        _encoder_flops,
        module=_encoder_op,
        variants={
            "": {"cu_seqlens": None, "sequence_lengths": None},
            "packed": {},
            "padded": {"cu_seqlens": None},
        },
        leads=((1, 1), (3, 10), (2, 4), (0, 3), (2, 0)),
        sizes=(3, 9, 64),
        large=(((1, 257), 80), ((3, 83), 72)),
        tolerances=HALF_NORM,
        outside=(Outside("torch.nn.functional.scaled_dot_product_attention", _torch_encoder),),
    ),
    OpSpec(
        paged.write_kv_cache,
        _written,
        _write,
        flops=lambda **others: 0,
        module=lambda **arguments: (ops.WriteKVCache(), arguments),
        variants={
            "": {},
            "int8": {"cache": _written_codes(torch.int8)},
            "fp8": {"cache": _written_codes(torch.uint8)},
        },
        leads=((1,), (7,), (2, 3), (0,)),
        sizes=(1, 9, 64),
        large=(((83,), 80),),
        differentiable=False,
    ),
    OpSpec(
        paged.paged_attention,
        _paged_inputs,
        _paged,
        _paged_flops,
        module=_paged_op,
        variants={
            "": {},
            "window": {"sliding_window": 3},
            "cap": {"logits_soft_cap": 0.7},
            "sinks": {"sinks": lambda draw, lead, size: draw(HEADS)},
            "int8": {"cache": _paged_codes(torch.int8)},
            "fp8": {"cache": _paged_codes(torch.uint8)},
            "all": {
                "sliding_window": 5,
                "logits_soft_cap": 2.0,
                "sinks": lambda draw, lead, size: draw(HEADS),
            },
        },
        leads=((2, 1), (11, 3), (5, 7), (2, 0), (0, 3)),
        sizes=(1, 9, 64),
        large=(((4, 1), 128), ((2, 83), 80)),
        tolerances=HALF_NORM,
        outside=(Outside("torch.nn.functional.scaled_dot_product_attention", _torch_paged),),
    ),
)
