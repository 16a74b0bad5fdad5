"""Attention without a key-value cache: ``softmax(Q · Kᵀ · scale) · V``.

Source: Vaswani et al., arXiv:1706.03762.
"""

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
    """Make a tensor of the shape of ``query`` with the last dimension of ``value``: a fake rule."""
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def like_query(query: Tensor, *others: object, **settings: object) -> Tensor:
    """Make one contiguous tensor like ``query``: a fake rule."""
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
    """Compute ``softmax(Q · Kᵀ · scale + mask) · V`` (arXiv:1706.03762).

    The arguments are those of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: ``[..., query_heads, L, E]``.
        key: ``[..., heads, S, E]``; without ``enable_gqa``, ``heads`` equals ``query_heads``.
        value: ``[..., heads, S, Ev]``; the result is ``[..., query_heads, L, Ev]``.
        attn_mask: broadcasts to ``[..., query_heads, L, S]``. A boolean mask is true for the keys
            to attend to; any other mask is added to the scores.
        dropout_p: probability to drop an attention weight.
        is_causal: query ``i`` sees keys ``0 … i``. Do not give ``attn_mask`` as well: some of
            torch's kernels then raise ``RuntimeError``, and some apply both.
        scale: multiplies the scores; ``1/√E`` by default.
        enable_gqa: each key head serves ``query_heads / heads`` query heads (arXiv:2305.13245).

    Raises:
        ValueError: shapes do not fit, or dtypes or devices differ. With ``enable_gqa``: the heads
            do not divide the query heads.
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
    """Attend both ways in a vision or audio encoder, over sequences packed one after another.

    Each token sees the tokens of its own sequence (arXiv:1706.03762). Each key head serves
    ``num_heads / num_kv_heads`` query heads (arXiv:2305.13245). The result has the shape of
    ``query``.

    Args:
        query: ``[batch, tokens, num_heads · head_size]`` or
            ``[batch, tokens, num_heads, head_size]``.
        key: the same with ``num_kv_heads``; without ``cu_seqlens``, the number of tokens may differ
            from the query's.
        value: as ``key``.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``.
        scale: multiplies the scores.
        cu_seqlens: the bounds of packed sequences: integers ``[sequences + 1]``, ascending from 0
            to ``batch · tokens``, on any device. Tokens are counted through all batch rows.
        sequence_lengths: the true lengths ``[batch]`` of rows padded on the right. Keys beyond the
            length are not seen, and the result there is zero. Not read beside ``cu_seqlens``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit; ``cu_seqlens`` does not ascend from 0
            to the number of tokens; or ``sequence_lengths`` are not from 0 to the number of keys.
    """
    op = "mm_encoder_attn"
    expect_kv_heads(num_heads, num_kv_heads)
    _expect_one_kind(op, query, key, value)

    head_size = _head_size(query, num_heads)
    q = as_heads("query", query, num_heads, head_size)
    k = as_heads("key", key, num_kv_heads, head_size)
    v = as_heads("value", value, num_kv_heads, head_size)
    expect_same_shape(op, "value", v, "key", k)

    is_packed = cu_seqlens is not None
    if q.shape[0] != k.shape[0] or (is_packed and q.shape[1] != k.shape[1]):
        raise ValueError(
            f"{op}: key has shape {tuple(key.shape)}, expected the batch, and with cu_seqlens also "
            f"the tokens, of query, {tuple(query.shape)}"
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
            f"mm_encoder_attn: query has shape {tuple(query.shape)}, expected "
            f"[batch, tokens, {heads} · head_size] or [batch, tokens, {heads}, head_size]"
        )
    last = query.shape[-1]
    return last if query.dim() == 4 else last // heads


def expect_kv_heads(num_heads: int, num_kv_heads: int, op: str = "mm_encoder_attn") -> None:
    """Raise ``ValueError`` unless ``op`` has query heads, and key heads that divide them."""
    if num_heads < 1:
        raise ValueError(f"{op}: num_heads is {num_heads}, expected a positive number")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{op}: num_kv_heads is {num_kv_heads}, expected a divisor of {num_heads}")


def as_heads(argument: str, x: Tensor, heads: int, head_size: int) -> Tensor:
    """View an argument of ``mm_encoder_attn`` as ``[batch, tokens, heads, head_size]``.

    Raises:
        ValueError: the shape is neither this one nor ``[batch, tokens, heads · head_size]``.
    """
    columns = heads * head_size
    shape = tuple(x.shape[2:])
    if shape not in ((columns,), (heads, head_size)):
        raise ValueError(
            f"mm_encoder_attn: {argument} has shape {tuple(x.shape)}, expected "
            f"[batch, tokens, {columns}] or [batch, tokens, {heads}, {head_size}]"
        )
    batch, tokens = x.shape[:2]
    return x.reshape(batch, tokens, heads, head_size)


def _expect_one_kind(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    expect_floating(op, "query", query)
    for argument, x in (("key", key), ("value", value)):
        expect_same_device(op, argument, x, "query", query)
        expect_same_dtype(op, argument, x, "query", query)


def _expect_attendable(
    op: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> None:
    """Raise ``ValueError`` unless the shapes fit each other."""
    batch = query.shape[:-2]
    columns = query.shape[-1:]
    # This runs with each call. Equal shapes are the usual case, and these comparisons the cheapest.
    if batch and key.shape == value.shape and key.shape[:-2] == batch and key.shape[-1:] == columns:
        return

    _expect_dimensions(op, query, key, value, enable_gqa)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{op}: key has head size {key.shape[-1]}, expected {query.shape[-1]} as query has"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{op}: value has {value.shape[-2]} tokens, expected {key.shape[-2]} as key has"
        )

    shared = 2
    if enable_gqa:
        # Heads need not be equally many, so they do not broadcast.
        shared = 3
        _expect_groups(op, query.shape[-3], key.shape[-3], value.shape[-3])

    batch = query.shape[:-shared]
    for argument, x in (("key", key), ("value", value)):
        if not _broadcast(x.shape[:-shared], batch):
            raise ValueError(
                f"{op}: {argument} has shape {tuple(x.shape)}, expected it to fit "
                f"{tuple(query.shape)}"
            )


def _expect_dimensions(
    op: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> None:
    """Raise ``ValueError`` if a tensor has too few dimensions."""
    expected = ["tokens", "head_size"]
    if enable_gqa:
        expected = ["heads", *expected]
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < len(expected):
            raise ValueError(
                f"{op}: {argument} has shape {tuple(x.shape)}, expected "
                f"[..., {', '.join(expected)}]"
            )


def _expect_groups(op: str, heads: int, key_heads: int, value_heads: int) -> None:
    """Raise ``ValueError`` unless each key head serves equally many query heads."""
    if value_heads != key_heads:
        raise ValueError(f"{op}: value has {value_heads} heads, expected {key_heads} as key has")
    if not key_heads or heads % key_heads:
        raise ValueError(
            f"{op}: key has {key_heads} heads, expected a divisor of the {heads} heads of query"
        )


def _expect_mask(op: str, mask: Tensor, query: Tensor, key: Tensor) -> None:
    # Torch takes masks of these two dtypes beside a query of any dtype.
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
    """Return True if two shapes broadcast with each other."""
    shared = min(len(shape), len(other))
    # Dynamo of torch 2.9 takes zip() of one length alone.
    sizes = zip(shape[len(shape) - shared :], other[len(other) - shared :], strict=True)
    return all(size in (1, to) or to == 1 for size, to in sizes)


def _packed(query: Tensor, key: Tensor, value: Tensor, scale: float, cu_seqlens: Tensor) -> Tensor:
    """Attend within packed sequences of ``[batch, tokens, heads, head_size]``, as one long row."""
    query = query.flatten(0, 1)
    key = key.flatten(0, 1)
    value = value.flatten(0, 1)
    tokens = query.shape[0]
    expect_integers("mm_encoder_attn", "cu_seqlens", cu_seqlens)
    expect_ascending("mm_encoder_attn", "cu_seqlens", cu_seqlens, tokens)

    if not values_are_known(cu_seqlens):
        # A compiler does not know the lengths: a loop over them would break the graph.
        same_sequence = _same_sequence(cu_seqlens.to(query.device), tokens)
        return _attend(query[None], key[None], value[None], scale, same_sequence)[0]

    lengths = [end - start for start, end in pairwise(cu_seqlens.tolist())]
    queries = torch.split_with_sizes(query, lengths)
    keys = torch.split_with_sizes(key, lengths)
    values = torch.split_with_sizes(value, lengths)

    attended = []
    for q, k, v in zip(queries, keys, values, strict=True):
        attended.append(_attend(q[None], k[None], v[None], scale)[0])
    return torch.cat(attended) if attended else torch.empty_like(query)


def _same_sequence(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return ``[tokens, tokens]``: true for two tokens of one sequence."""
    positions = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, positions, right=True)
    return sequence[:, None] == sequence


def _padded(query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: Tensor) -> Tensor:
    op = "mm_encoder_attn"
    argument = "sequence_lengths"
    if lengths.shape != query.shape[:1]:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(lengths.shape)}, expected ({query.shape[0]},)"
        )

    expect_integers(op, argument, lengths)
    expect_same_device(op, argument, lengths, "query", query)
    expect_in_range(op, argument, lengths, key.shape[1] + 1)
    key_seen = torch.arange(key.shape[1], device=lengths.device) < lengths[:, None]
    query_seen = torch.arange(query.shape[1], device=lengths.device) < lengths[:, None]
    attended = _attend(query, key, value, scale, key_seen[:, None, None, :])

    # Padding may hold anything, and a row without a visible key is NaN.
    return attended.masked_fill(~query_seen[:, :, None, None], 0.0)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """Attend over ``[batch, tokens, heads, head_size]``."""
    q = query.transpose(1, 2)
    k = key.transpose(1, 2)
    v = value.transpose(1, 2)
    # A branch, as torch takes no symbol for enable_gqa.
    groups = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, **groups)
    return attended.transpose(1, 2)
