"""Specs of latent attention, whose reference computes every score and exponential by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from opgraft.ops.attention import latent as ops
from opgraft.ops.attention.latent import functional
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, ROPE, BLOCK_SIZE, SPARE_BLOCKS = 3, 4, 4, 9


def _written(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw latents, rotated keys and places of their own for them, in a cache with more places."""
    tokens = math.prod(lead)
    blocks = tokens // BLOCK_SIZE + 2
    return {
        "kv_c": draw(tokens, size),
        "k_pe": draw(tokens, ROPE),
        "cache": draw(blocks, BLOCK_SIZE, size + ROPE),
        "slots": torch.randperm(blocks * BLOCK_SIZE, generator=draw.generator)[:tokens],
    }


def _write(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache, size = cache.clone(), kv_c.shape[1]
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, cache.shape[1])
        cache[block, offset, :size] = kv_c[token]
        cache[block, offset, size:] = k_pe[token]
    return cache


def _latent_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
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
        "query": draw(int(lengths.sum()), HEADS, size + ROPE),
        "cache": draw(blocks, BLOCK_SIZE, size + ROPE),
        "block_table": table.to(torch.int32),
        "query_start_loc": F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "seq_lens": seq_lens.to(torch.int32),
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
        places = [divmod(position, cache.shape[1]) for position in range(length)]
        rows = [cache[int(block_table[sequence, block]), offset] for block, offset in places]
        seen += [
            torch.stack(rows[: position + 1]) for position in range(length - (end - start), length)
        ]
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
        result[token] = torch.einsum(
            "hk,kc->hc", weights / weights.sum(-1, keepdim=True), rows[:, :kv_lora_rank]
        )
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
    """Attend with one token after another to contiguous rows that are repeated for the heads."""
    attended = []
    for row, seen in zip(
        query, _rows_seen(cache, block_table, query_start_loc, seq_lens), strict=True
    ):
        key = seen.expand(1, len(row), -1, -1)
        value = key[..., :kv_lora_rank]
        attended.append(
            F.scaled_dot_product_attention(row[None, :, None], key, value, scale=scale)[0, :, 0]
        )
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
    return ops.MLAPagedAttention(kv_lora_rank, scale), (
        query,
        cache,
        block_table,
        query_start_loc,
        seq_lens,
    )


def _latent_flops(
    query: Tensor, query_start_loc: Tensor, seq_lens: Tensor, kv_lora_rank: int, **others: Any
) -> int:
    counts = query_start_loc.diff()
    pairs = counts * seq_lens - counts * (counts - 1) // 2
    return 2 * query.shape[1] * (query.shape[2] + kv_lora_rank) * int(pairs.sum())


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
