"""Attention without a key-value cache, ``softmax(Q · Kᵀ · scale) · V`` (Vaswani et al., arXiv:1706.03762)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    FLOATING,
    expect_ascending,
    expect_choice,
    expect_floating,
    expect_in_range,
    expect_integers,
    expect_same_device,
    expect_same_dtype,
    expect_same_shape,
    values_are_known,
)
from opgraft.ops.fakes import like
from torch import Tensor
from torch.nn import functional as F

__all__ = ["mm_encoder_attn", "scaled_dot_product_attention"]


def like_query_with_values(
    query: Tensor, key: Tensor, value: Tensor, *others: object, **settings: object
) -> Tensor:
    """Make a tensor of the shape of ``query``, with the last dimension of ``value``; a fake rule."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def like_query(query: Tensor, *others: object, **settings: object) -> Tensor:
    """Make one contiguous tensor like ``query``; a fake rule."""
    return like(query)


@register_functional("scaled_dot_product_attention", like_query_with_values, random="dropout_p")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``softmax(Q · Kᵀ · scale + mask) · V``, as ``torch.nn.functional.scaled_dot_product_attention`` does
    (arXiv:1706.03762).

    Args:
        query: ``[..., query_heads, L, E]``.
        key: ``[..., heads, S, E]``; without ``enable_gqa`` there are as many heads as query heads.
        value: ``[..., heads, S, Ev]``; the result is ``[..., query_heads, L, Ev]``.
        attn_mask: broadcasts to ``[..., query_heads, L, S]``; a boolean one is true where a key takes part, any other
            is added to the scores.
        dropout_p: probability with which an attention weight is dropped.
        is_causal: query ``i`` sees keys ``0 … i``. Not to be given beside ``attn_mask``: of torch's kernels some raise
            ``RuntimeError`` then, some apply both.
        scale: multiplies the scores; ``1/√E`` if not given.
        enable_gqa: each key head serves ``query_heads / heads`` query heads (arXiv:2305.13245).

    Raises:
        ValueError: shapes do not fit, dtypes or devices differ, or with ``enable_gqa`` the heads do not divide the
            query heads.
        RuntimeError: a shape of more dimensions does not fit; raised by torch.
    """
    op = "scaled_dot_product_attention"
    _expect_one_kind(op, query, key, value)
    _expect_attendable(op, query, key, value, enable_gqa)
    if attn_mask is not None:
        _expect_mask(op, attn_mask, query, key)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@register_functional("mm_encoder_attn", like_query)
def mm_encoder_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    """Attend both ways in a vision or audio encoder, over sequences packed one after another (arXiv:1706.03762).

    Each token sees those of its own sequence; each key head serves ``num_heads / num_kv_heads`` query heads
    (arXiv:2305.13245). The result has the shape of ``query``.

    Args:
        query: ``[batch, tokens, num_heads · head_size]`` or ``[batch, tokens, num_heads, head_size]``.
        key: the same with ``num_kv_heads``; without ``cu_seqlens`` its number of tokens is its own.
        value: as ``key``.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``.
        scale: multiplies the scores.
        cu_seqlens: where packed sequences begin and end: integers ``[sequences + 1]``, ascending from 0 to ``batch ·
            tokens``, on any device. Tokens of all batch rows count through.
        sequence_lengths: without ``cu_seqlens``, the true lengths ``[batch]`` of rows padded on the right: keys beyond
            them are not seen and the result there is zero. Not read beside ``cu_seqlens``, which says it all.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, ``cu_seqlens`` does not ascend from 0 to the number of
            tokens, or ``sequence_lengths`` are not from 0 to that of keys.
    """
    op = "mm_encoder_attn"
    expect_kv_heads(num_heads, num_kv_heads)
    _expect_one_kind(op, query, key, value)
    head_size = _head_size(query, num_heads)
    counts = {
        "query": (query, num_heads),
        "key": (key, num_kv_heads),
        "value": (value, num_kv_heads),
    }
    q, k, v = (as_heads(argument, x, heads, head_size) for argument, (x, heads) in counts.items())
    expect_same_shape(op, "value", v, "key", k)
    if q.shape[0] != k.shape[0] or (cu_seqlens is not None and q.shape[1] != k.shape[1]):
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)}, expected the batch, and with cu_seqlens also the tokens, of "
            f"query, {tuple(query.shape)}"
        )
    if cu_seqlens is not None:
        attended = _packed(q, k, v, scale, cu_seqlens)
    elif sequence_lengths is not None:
        attended = _padded(q, k, v, scale, sequence_lengths)
    else:
        attended = _attend(q, k, v, scale)
    return attended.reshape(query.shape)


def _head_size(query: Tensor, heads: int) -> int:
    if query.dim() not in (3, 4):
        raise ValueError(
            f"mm_encoder_attn: query has shape {tuple(query.shape)}, expected [batch, tokens, {heads} · head_size] or "
            f"[batch, tokens, {heads}, head_size]"
        )
    return query.shape[-1] if query.dim() == 4 else query.shape[-1] // heads


def expect_kv_heads(num_heads: int, num_kv_heads: int, op: str = "mm_encoder_attn") -> None:
    """Raise ``ValueError`` unless ``op`` has query heads, and key heads that divide them."""
    if num_heads < 1:
        raise ValueError(f"{op}: num_heads is {num_heads}, expected a positive number")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{op}: num_kv_heads is {num_kv_heads}, expected a divisor of {num_heads}")


def as_heads(argument: str, x: Tensor, heads: int, head_size: int) -> Tensor:
    """View an argument of ``mm_encoder_attn`` as ``[batch, tokens, heads, head_size]``, or raise ``ValueError``."""
    packed, split = (heads * head_size,), (heads, head_size)
    if tuple(x.shape[2:]) not in (packed, split):
        raise ValueError(
            f"mm_encoder_attn: {argument} has shape {tuple(x.shape)}, expected [batch, tokens, {packed[0]}] or [batch, "
            f"tokens, {heads}, {head_size}]"
        )
    return x.reshape(*x.shape[:2], *split)


def _expect_one_kind(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    expect_floating(op, "query", query)
    for argument, x in (("key", key), ("value", value)):
        expect_same_device(op, argument, x, "query", query)
        expect_same_dtype(op, argument, x, "query", query)


def _expect_attendable(
    op: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> None:
    batch, columns = query.shape[:-2], query.shape[-1:]
    if batch and key.shape == value.shape and key.shape[:-2] == batch and key.shape[-1:] == columns:
        return  # nothing is wrong, as is seen in a fraction of the time that it takes to say what is
    least = 3 if enable_gqa else 2
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < least:
            shape = "[..., heads, tokens, head_size]" if enable_gqa else "[..., tokens, head_size]"
            raise ValueError(f"{op}: {argument} has shape {tuple(x.shape)}, expected {shape}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{op}: key has head size {key.shape[-1]}, expected {query.shape[-1]} as query has"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{op}: value has {value.shape[-2]} tokens, expected {key.shape[-2]} as key has"
        )
    if enable_gqa:
        heads, key_heads, value_heads = (x.shape[-3] for x in (query, key, value))
        if value_heads != key_heads:
            raise ValueError(
                f"{op}: value has {value_heads} heads, expected {key_heads} as key has"
            )
        if not key_heads or heads % key_heads:
            raise ValueError(
                f"{op}: key has {key_heads} heads, expected a divisor of the {heads} heads of query"
            )
    for argument, x in (("key", key), ("value", value)):
        if not _broadcast(x.shape[:-least], query.shape[:-least]):
            raise ValueError(
                f"{op}: {argument} has shape {tuple(x.shape)}, expected it to fit {tuple(query.shape)}"
            )


def _expect_mask(op: str, mask: Tensor, query: Tensor, key: Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.float32):
        expect_choice(op, "the dtype of attn_mask", mask.dtype, (torch.bool, *FLOATING))
        expect_same_dtype(op, "attn_mask", mask, "query", query)
    expect_same_device(op, "attn_mask", mask, "query", query)
    scores = (*query.shape[:-1], key.shape[-2])
    if not _broadcast(mask.shape, scores):
        raise ValueError(
            f"{op}: attn_mask has shape {tuple(mask.shape)}, expected it to broadcast to {scores}"
        )


def _broadcast(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Tell whether two shapes broadcast with each other."""
    return all(
        size in (1, to) or to == 1 for size, to in zip(shape[::-1], other[::-1], strict=False)
    )


def _packed(query: Tensor, key: Tensor, value: Tensor, scale: float, cu_seqlens: Tensor) -> Tensor:
    """Attend within the blocks of ``[batch, tokens, heads, head_size]``, whose rows count as one."""
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    tokens = query.shape[0]
    expect_integers("mm_encoder_attn", "cu_seqlens", cu_seqlens)
    expect_ascending("mm_encoder_attn", "cu_seqlens", cu_seqlens, tokens)
    if not values_are_known(cu_seqlens):
        # The lengths are data: a loop over them would break the graph, a mask does not.
        bounds = cu_seqlens.to(query.device)
        segment = torch.searchsorted(bounds, torch.arange(tokens, device=query.device), right=True)
        return _attend(query[None], key[None], value[None], scale, segment[:, None] == segment)[0]
    lengths = [end - start for start, end in pairwise(cu_seqlens.tolist())]
    segments = zip(*(torch.split_with_sizes(x, lengths) for x in (query, key, value)), strict=True)
    attended = [_attend(q[None], k[None], v[None], scale)[0] for q, k, v in segments]
    return torch.cat(attended) if attended else torch.empty_like(query)


def _padded(query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: Tensor) -> Tensor:
    if lengths.shape != query.shape[:1]:
        raise ValueError(
            f"mm_encoder_attn: sequence_lengths has shape {tuple(lengths.shape)}, expected ({query.shape[0]},)"
        )
    expect_integers("mm_encoder_attn", "sequence_lengths", lengths)
    expect_same_device("mm_encoder_attn", "sequence_lengths", lengths, "query", query)
    expect_in_range("mm_encoder_attn", "sequence_lengths", lengths, key.shape[1] + 1)
    key_seen = torch.arange(key.shape[1], device=lengths.device) < lengths[:, None]
    query_seen = torch.arange(query.shape[1], device=lengths.device) < lengths[:, None]
    attended = _attend(query, key, value, scale, key_seen[:, None, None, :])
    return attended.masked_fill(~query_seen[:, :, None, None], 0.0)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attend over ``[batch, tokens, heads, head_size]``."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    # A branch, as torch takes no symbol here.
    groups = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, **groups).transpose(
        1, 2
    )
