"""Specs of attention, whose references compute every score and exponential by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from opgraft.ops import attention as ops
from opgraft.ops.attention import functional
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, KEY_HEADS, KEYS = 4, 2, 5


def _inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
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


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attend over ``[..., heads, tokens, size]``, each key head for the query heads that share it."""
    shared = torch.arange(query.shape[-3]) * key.shape[-3] // query.shape[-3]
    scores = torch.einsum("...qe,...ke->...qk", query, key[..., shared, :, :]) * scale
    scores = scores if mask is None else scores + mask
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("...qk,...ke->...qe", weights / weights.sum(-1, keepdim=True), value[..., shared, :, :])


def _reference(
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
    return attention(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, attn_mask)


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
        lengths = [q.shape[2]] * q.shape[0] if sequence_lengths is None else sequence_lengths.tolist()
        for row, n in enumerate(lengths):
            if n:
                result[row, :, :n] = attention(q[row, :, :n], k[row, :, :n], v[row, :, :n], scale)
        return result.transpose(1, 2).reshape(query.shape)
    packed, q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (result, q, k, v))
    for start, end in pairwise(cu_seqlens.tolist()):
        if start < end:
            packed[:, start:end] = attention(q[:, start:end], k[:, start:end], v[:, start:end], scale)
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
    op = ops.MMEncoderAttention(num_heads, math.prod(query.shape[2:]) // num_heads, scale, num_kv_heads)
    return op, (query, key, value, cu_seqlens, None, sequence_lengths)


def _flops(query: Tensor, key: Tensor, **others: Any) -> int:
    return 4 * query.numel() * key.shape[-2]


def _encoder_flops(query: Tensor, cu_seqlens: Tensor | None = None, **others: Any) -> int:
    batch, tokens = query.shape[:2]
    pairs = batch * tokens**2 if cu_seqlens is None else int(cu_seqlens.diff().square().sum())
    return 4 * math.prod(query.shape[2:]) * pairs


SPECS = (
    OpSpec(
        functional.scaled_dot_product_attention,
        _inputs,
        _reference,
        _flops,
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
)
