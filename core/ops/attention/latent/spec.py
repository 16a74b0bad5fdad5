"""Specs of latent attention. The reference computes every score and exponential by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from opgraft.ops.attention import latent as ops
from opgraft.ops.attention.latent import functional
from opgraft.ops.attention.spec import BLOCK_SIZE, draw_sequences, pairs_seen
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 3
ROPE = 4
SPARE_BLOCKS = 9
"""Blocks of a drawn cache beyond those of its sequences."""


def _written(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw latents and rotated keys, a place for each of them, and a cache with more places."""
    tokens = math.prod(lead)
    blocks = tokens // BLOCK_SIZE + 2
    return {
        "kv_c": draw(tokens, size),
        "k_pe": draw(tokens, ROPE),
        "cache": draw(blocks, BLOCK_SIZE, size + ROPE),
        "slots": torch.randperm(blocks * BLOCK_SIZE, generator=draw.generator)[:tokens],
    }


def _write(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache = cache.clone()
    size = kv_c.shape[1]
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, cache.shape[1])
        cache[block, offset, :size] = kv_c[token]
        cache[block, offset, size:] = k_pe[token]
    return cache


def _latent_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    drawn = draw_sequences(draw, lead, SPARE_BLOCKS)
    return {
        "query": draw(drawn.tokens, HEADS, size + ROPE),
        "cache": draw(drawn.blocks, BLOCK_SIZE, size + ROPE),
        **drawn.layout,
        "kv_lora_rank": size,
        "scale": 0.3,
    }


def _rows_seen(
    cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> list[Tensor]:
    """Return for each token of the query the rows up to its own, ``[keys, size]``."""
    seen = []
    for sequence, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        length = int(seq_lens[sequence])
        rows = []
        for position in range(length):
            block, offset = divmod(position, cache.shape[1])
            rows.append(cache[int(block_table[sequence, block]), offset])
        for position in range(length - (end - start), length):
            seen.append(torch.stack(rows[: position + 1]))
    return seen


def _attention_over_latents(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    result = query.new_zeros(*query.shape[:2], kv_lora_rank)
    for token, rows in enumerate(_rows_seen(cache, block_table, query_start_loc, seq_lens)):
        scores = torch.einsum("he,ke->hk", query[token], rows) * scale
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        shares = weights / weights.sum(-1, keepdim=True)
        result[token] = torch.einsum("hk,kc->hc", shares, rows[:, :kv_lora_rank])
    return result


def _by_torch(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> Any:
    """Attend with one token after another over contiguous rows, repeated for the heads."""
    rows_seen = _rows_seen(cache, block_table, query_start_loc, seq_lens)
    attended = []
    for row, seen in zip(query, rows_seen, strict=True):
        key = seen.expand(1, len(row), -1, -1)
        value = key[..., :kv_lora_rank]
        out = F.scaled_dot_product_attention(row[None, :, None], key, value, scale=scale)
        attended.append(out[0, :, 0])
    return torch.stack(attended)


def _latent_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_lora_rank: int,
    scale: float,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = ops.MLAPagedAttention(kv_lora_rank, scale)
    return op, (query, cache, block_table, query_start_loc, seq_lens)


def _latent_flops(
    query: Tensor, query_start_loc: Tensor, seq_lens: Tensor, kv_lora_rank: int, **others: Any
) -> int:
    _, heads, size = query.shape
    return 2 * heads * (size + kv_lora_rank) * pairs_seen(query_start_loc, seq_lens)


SPECS = (
    OpSpec(
        functional.concat_and_cache_mla,
        _written,
        _write,
        flops=lambda **others: 0,
        module=lambda **arguments: (ops.ConcatAndCacheMLA(), arguments),
        leads=((1,), (7,), (2, 3), (0,)),
        sizes=(1, 9, 64),
        large=(((83,), 512),),
        differentiable=False,
    ),
    OpSpec(
        functional.mla_paged_attention,
        _latent_inputs,
        _attention_over_latents,
        _latent_flops,
        module=_latent_attention,
        leads=((2, 1), (10, 3), (5, 7), (2, 0), (0, 3)),
        sizes=(1, 9, 64),
        large=(((4, 1), 512), ((2, 83), 128)),
        tolerances=HALF_NORM,
        outside=(Outside("torch.nn.functional.scaled_dot_product_attention", _by_torch),),
    ),
)
