"""Specs of attention. The references compute every score and exponential by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from opgraft.ops import attention as ops
from opgraft.ops.attention import functional, paged
from opgraft.ops.attention.codes_spec import decoded_rows, encoded
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 4
KEY_HEADS = 2
KEYS = 5
BLOCK_SIZE = 4
SPARE_BLOCKS = 40
"""Blocks of a drawn cache beyond those of its sequences."""


def _attention_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    """Draw heads: each head of size 1 has a key head of its own, other heads share key heads."""
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
    """Draw six packed sequences, one of them empty at least, and lengths of padded rows."""
    batch, tokens = lead
    total = batch * tokens
    within = draw.integers(0, total + 1, (4,)).sort().values
    bounds = torch.cat([torch.tensor([0]), within, within[-1:], torch.tensor([total])])
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
    """Draw keys and values, a place for each of them, and a cache with more places."""
    tokens = math.prod(lead)
    blocks = tokens // BLOCK_SIZE + 2
    return {
        "key": draw(tokens, KEY_HEADS, head_size),
        "value": draw(tokens, KEY_HEADS, head_size),
        "cache": draw(blocks, 2, KEY_HEADS, BLOCK_SIZE, head_size),
        "slots": torch.randperm(blocks * BLOCK_SIZE, generator=draw.generator)[:tokens],
    }


def _written_codes(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that draws a cache of codes for ``_written``. Any bytes are codes."""

    def draw_codes(draw: Draw, lead: Sequence[int], head_size: int) -> Tensor:
        blocks = math.prod(lead) // BLOCK_SIZE + 2
        shape = (blocks, 2, KEY_HEADS, BLOCK_SIZE, head_size + 4)
        return draw.integers(0, 256, shape).to(torch.uint8).view(dtype)

    return draw_codes


class DrawnSequences(NamedTuple):
    """Sequences for attention over pages.

    Attributes:
        tokens: the number of tokens in this call, over all sequences.
        blocks: the number of blocks of a cache for them.
        layout: ``block_table``, ``query_start_loc`` and ``seq_lens``, by argument.
    """

    tokens: int
    blocks: int
    layout: Arguments


def draw_sequences(draw: Draw, lead: Sequence[int], spare_blocks: int) -> DrawnSequences:
    """Draw ``sequences, longest = lead`` sequences of at most ``longest`` tokens.

    The first sequence has ``longest`` tokens. Each has up to ten earlier tokens in the cache.
    """
    sequences, longest = lead
    lengths = draw.integers(int(longest == 1), longest + 1, (sequences,))
    lengths[:1] = longest
    seq_lens = lengths + draw.integers(0, 11, (sequences,))

    needed = (seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    blocks = int(needed.sum()) + spare_blocks

    # Entries beyond the end of a sequence name blocks of other sequences.
    table = draw.integers(0, blocks, (sequences, (longest + 10) // BLOCK_SIZE + 3))
    shuffled = torch.randperm(blocks, generator=draw.generator)
    own_blocks = torch.split_with_sizes(shuffled[:-spare_blocks], needed.tolist())
    for row, own in zip(table, own_blocks, strict=True):
        row[: len(own)] = own

    layout = {
        "block_table": table.to(torch.int32),
        "query_start_loc": F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "seq_lens": seq_lens.to(torch.int32),
    }
    return DrawnSequences(int(lengths.sum()), blocks, layout)


def _paged_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    drawn = draw_sequences(draw, lead, SPARE_BLOCKS)
    return {
        "query": draw(drawn.tokens, HEADS, head_size),
        "cache": draw(drawn.blocks, 2, KEY_HEADS, BLOCK_SIZE, head_size),
        **drawn.layout,
        "scale": 0.3,
    }


def _paged_codes(dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that draws a cache of codes, with all blocks of ``_paged_inputs``."""

    def draw_codes(draw: Draw, lead: Sequence[int], head_size: int) -> Tensor:
        sequences, longest = lead
        blocks = sequences * (longest // BLOCK_SIZE + 4) + SPARE_BLOCKS
        elements = draw(blocks, 2, KEY_HEADS, BLOCK_SIZE, head_size)
        return encoded(elements.double(), dtype)

    return draw_codes


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attend over ``[..., heads, tokens, size]``; each key head serves a group of query heads."""
    heads = query.shape[-3]
    key_head = torch.arange(heads) * key.shape[-3] // heads
    keys = key[..., key_head, :, :]
    values = value[..., key_head, :, :]

    scores = torch.einsum("...qe,...ke->...qk", query, keys) * scale
    if mask is not None:
        scores = scores + mask

    # Relative to the highest score, so that no exponential overflows.
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    shares = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("...qk,...ke->...qe", shares, values)


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
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return attention(query, key, value, scale, attn_mask)


def _split(x: Tensor, heads: int) -> Tensor:
    """Split ``x`` to ``[batch, heads, tokens, size]``."""
    batch, tokens, *rest = x.shape
    size = math.prod(rest) // heads
    return x.reshape(batch, tokens, heads, size).transpose(1, 2)


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
    q = _split(query, num_heads)
    k = _split(key, num_kv_heads)
    v = _split(value, num_kv_heads)
    if cu_seqlens is None:
        lengths = [q.shape[2]] * q.shape[0]
        if sequence_lengths is not None:
            lengths = sequence_lengths.tolist()
        padded = _attention_of_rows(q, k, v, lengths, scale)
        return padded.transpose(1, 2).reshape(query.shape)

    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
    packed = torch.zeros_like(q)
    for start, end in pairwise(cu_seqlens.tolist()):
        if start < end:
            part = slice(start, end)
            packed[:, part] = attention(q[:, part], k[:, part], v[:, part], scale)
    return packed.transpose(0, 1).reshape(query.shape)


def _attention_of_rows(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Attend within the first tokens of each row of ``[batch, heads, tokens, size]``."""
    result = torch.zeros_like(q)
    for row, length in enumerate(lengths):
        if length:
            part = (row, slice(None), slice(length))
            result[part] = attention(q[part], k[part], v[part], scale)
    return result


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
    """Attend in one call over all tokens as one row, with a mask for the sequences."""
    if cu_seqlens is None:
        return None

    sequence = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    same_sequence = sequence[:, None] == sequence
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (query, key, value))
    attended = F.scaled_dot_product_attention(
        _split(q, num_heads),
        _split(k, num_kv_heads),
        _split(v, num_kv_heads),
        same_sequence,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
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
    head_size = math.prod(query.shape[2:]) // num_heads
    op = ops.MMEncoderAttention(num_heads, head_size, scale, num_kv_heads)
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


def _keys_and_values_seen(
    cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each token of the query the keys and values so far, ``[heads, keys, size]``."""
    cache = decoded_rows(cache)
    for sequence, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        length = int(seq_lens[sequence])
        rows = []
        for position in range(length):
            block, offset = divmod(position, cache.shape[3])
            rows.append(cache[int(block_table[sequence, block]), :, :, offset])
        for position in range(length - (end - start), length):
            key, value = torch.stack(rows[: position + 1], 2)
            yield key, value


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
    heads = query.shape[1]
    key_head = torch.arange(heads) * cache.shape[2] // heads
    first = -sliding_window if sliding_window else 0
    pairs = _keys_and_values_seen(cache, block_table, query_start_loc, seq_lens)
    for token, (key, value) in enumerate(pairs):
        scores = torch.einsum("he,hke->hk", query[token], key[key_head, first:]) * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * (1 - 2 / (1 + torch.exp(2 * scores / logits_soft_cap)))
        weights = torch.exp(scores)
        sums = weights.sum(-1)
        if sinks is not None:
            sums = sums + torch.exp(sinks)
        shares = weights / sums[:, None]
        result[token] = torch.einsum("hk,hke->he", shares, value[key_head, first:])
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
    """Attend with one token after another over contiguous keys."""
    if logits_soft_cap is not None or sinks is not None or not cache.is_floating_point():
        return None

    first = -sliding_window if sliding_window else 0
    pairs = _keys_and_values_seen(cache, block_table, query_start_loc, seq_lens)
    attended = []
    for row, (key, value) in zip(query, pairs, strict=True):
        out = F.scaled_dot_product_attention(
            row[None, :, None],
            key[None, :, first:],
            value[None, :, first:],
            scale=scale,
            enable_gqa=True,
        )
        attended.append(out[0, :, 0])
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
    if cu_seqlens is None:
        batch, tokens = query.shape[:2]
        pairs = batch * tokens**2
    else:
        pairs = int(cu_seqlens.diff().square().sum())
    return 4 * math.prod(query.shape[2:]) * pairs


def _paged_flops(query: Tensor, query_start_loc: Tensor, seq_lens: Tensor, **others: Any) -> int:
    return 4 * math.prod(query.shape[1:]) * pairs_seen(query_start_loc, seq_lens)


def pairs_seen(query_start_loc: Tensor, seq_lens: Tensor) -> int:
    """Return the pairs of a token and a key in its view, over all sequences."""
    counts = query_start_loc.diff()
    # The last token sees all keys, and each earlier token one less.
    pairs = counts * seq_lens - counts * (counts - 1) // 2
    return int(pairs.sum())


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
