"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864).

Elements of a head are rotated in pairs: pair ``i`` at position ``p`` by the angle ``p · θ_i``. In
the GPT-NeoX style, a pair has one element from each half of the rotated part. In the GPT-J style, a
pair is an even element and the next odd one.

A table ``cos_sin_cache`` of ``[positions, rotary_dim]`` has a row for each position: the cosines of
``rotary_dim / 2`` angles, then the sines, both times the scale of a variant. The first
``rotary_dim`` elements of each head are rotated, the rest passes. Half types are rotated in float32
and rounded once. Table and heads may differ in dtype.

For each position, query and key have ``heads · head_size`` elements or ``[heads, head_size]``. The
numbers of heads may differ. The tokens are in the shape of the positions, or flattened.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    expect_floating,
    expect_in_range,
    expect_integers,
    expect_positive,
    expect_same_device,
    expect_same_dtype,
)
from opgraft.ops.fakes import like, nothing
from opgraft.ops.precision import compute_dtype
from torch import Tensor

__all__ = [
    "apply_rotary_emb",
    "dual_chunk_rotary_embedding",
    "mrope",
    "rotary_embedding",
    "rotary_embedding_",
]

VERSIONS_OF_QUERY = 5
"""The number of rotated versions of the query from ``dual_chunk_rotary_embedding``."""


def like_query_and_key(
    positions: Tensor, query: Tensor, key: Tensor, *others: object, **settings: object
) -> tuple[Tensor, Tensor]:
    """Make contiguous tensors like query and key: a fake rule."""
    return like(query), like(key)


def like_queries_and_key(
    positions: Tensor, query: Tensor, key: Tensor, *others: object, **settings: object
) -> tuple[Tensor, Tensor]:
    """Make five queries side by side, and a key, contiguous: a fake rule."""
    *lead, width = query.shape
    return query.new_empty((*lead, VERSIONS_OF_QUERY * width)), like(key)


@register_functional("apply_rotary_emb", like)
def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool = True) -> Tensor:
    """Rotate heads by given cosines and sines (arXiv:2104.09864).

    The pair ``(x1, x2)`` becomes ``(x1 · cos - x2 · sin, x2 · cos + x1 · sin)``.

    Args:
        x: ``[..., sequence, heads, head_size]``.
        cos: ``[sequence, head_size / 2]``.
        sin: as ``cos``.
        is_neox_style: pair the halves of a head; otherwise even elements with odd ones.

    Raises:
        ValueError: ``x`` has fewer than three dimensions, or ``cos`` or ``sin`` does not fit ``x``.
    """
    expect_floating("apply_rotary_emb", "x", x)
    if x.dim() < 3 or x.shape[-1] % 2:
        raise ValueError(
            f"apply_rotary_emb: x has shape {tuple(x.shape)}, expected "
            "[..., sequence, heads, head_size] with an even head_size"
        )

    expected = (x.shape[-3], x.shape[-1] // 2)
    for argument, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) != expected:
            raise ValueError(
                f"apply_rotary_emb: {argument} has shape {tuple(table.shape)}, expected "
                f"{expected} for x of shape {tuple(x.shape)}"
            )
        expect_floating("apply_rotary_emb", argument, table)
        expect_same_device("apply_rotary_emb", argument, table, "x", x)
    return _rotated_pairs(x, cos.unsqueeze(-2), sin.unsqueeze(-2), is_neox_style)


@register_functional("RotaryEmbedding", like_query_and_key)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by positions, from a table of cosines and sines (arXiv:2104.09864).

    Args:
        positions: integers ``[num_tokens]`` or ``[batch, sequence]``, rows of the table.
        query: the heads to rotate, in one of the shapes of this module.
        key: as ``query``; not ``None``, unlike the argument of the op class.
        head_size: elements of a head.
        cos_sin_cache: ``[positions, rotary_dim]``.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.

    Raises:
        ValueError: a position is outside the table, the tokens are not those of ``positions``, a
            last dimension is no multiple of ``head_size``, or dtypes or devices do not fit.
    """
    cos_sin = _table_rows("rotary_embedding", positions, cos_sin_cache)
    return _rotated_pair("rotary_embedding", query, key, cos_sin, head_size, is_neox_style)


@register_functional("RotaryEmbedding", nothing, mutates=("query", "key"))
def rotary_embedding_(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> None:
    """Compute ``rotary_embedding`` in place: write the rotated heads over ``query`` and ``key``."""
    rotated_query, rotated_key = rotary_embedding.native(
        positions, query, key, head_size, cos_sin_cache, is_neox_style
    )
    query.copy_(rotated_query)
    key.copy_(rotated_key)


@register_functional("MRotaryEmbedding", like_query_and_key)
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    mrope_section: Sequence[int],
    is_neox_style: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by positions in time, height and width (Qwen2-VL, arXiv:2409.12191).

    Each of the three positions turns some of the pairs.

    Args:
        positions: integers ``[3, num_tokens]`` or ``[3, batch, sequence]``, rows of the table.
        query: the heads to rotate, in one of the shapes of this module.
        key: as ``query``.
        head_size: elements of a head.
        cos_sin_cache: ``[positions, rotary_dim]``.
        mrope_section: the numbers of pairs for time, height and width; together
            ``rotary_dim / 2``.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.
        interleaved: pairs take turns, as in Qwen3-VL: time, height, width, time and so on, until
            height and width have their numbers. Otherwise the pairs of time come first, then the
            pairs of height, then the pairs of width.

    Raises:
        ValueError: as ``rotary_embedding``, or the sections do not fit the table.
    """
    if positions.dim() < 2 or positions.shape[0] != 3:
        raise ValueError(
            f"mrope: positions have shape {tuple(positions.shape)}, expected [3, num_tokens]"
        )

    rows = _table_rows("mrope", positions, cos_sin_cache)
    expect_sections(mrope_section, cos_sin_cache.shape[1], interleaved)
    cos_sin = _by_section(rows, mrope_section, interleaved)
    return _rotated_pair("mrope", query, key, cos_sin, head_size, is_neox_style)


def expect_sections(mrope_section: Sequence[int], rotary_dim: int, interleaved: bool) -> None:
    """Raise ``ValueError`` unless the sections of ``mrope`` share out the pairs of a head."""
    pairs = rotary_dim // 2
    if len(mrope_section) != 3 or min(mrope_section) < 0 or sum(mrope_section) != pairs:
        raise ValueError(
            f"mrope: mrope_section is {list(mrope_section)}, expected three counts with sum "
            f"{pairs}, half of rotary_dim={rotary_dim}"
        )
    if not interleaved:
        return

    _, height, width = mrope_section
    most_height = (pairs + 1) // 3
    most_width = pairs // 3
    if height > most_height or width > most_width:
        raise ValueError(
            f"mrope: mrope_section is {list(mrope_section)}, expected at most {most_height} pairs "
            f"for height and {most_width} for width, so that they can take turns"
        )


@register_functional("dual_chunk_rotary_embedding", like_queries_and_key)
def dual_chunk_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    chunk_size: int,
    local_size: int,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key by places in chunks: distances stay small (An et al., arXiv:2402.17463).

    With ``L = chunk_size - local_size``, the key at position ``p`` is rotated by ``p mod L``. The
    query is rotated five times, with a place for keys

    1. of its own chunk: ``p mod L``
    2. of the chunk before: ``min(p mod L + L, chunk_size)``
    3. of chunks further back: ``min(2·L - 1, chunk_size)``, the same for all
    4. of the chunk before, without a bound: ``p mod L + L``
    5. of chunks further back, without a bound: ``p mod L + chunk_size``

    and the five are concatenated along the last dimension.

    Args:
        positions: integers ``[num_tokens]`` or ``[batch, sequence]``, not negative.
        query: the heads to rotate, in one of the shapes of this module.
        key: as ``query``.
        head_size: elements of a head.
        cos_sin_cache: ``[positions, rotary_dim]``, at least ``L + chunk_size`` rows.
        chunk_size: positions of a chunk.
        local_size: positions that a chunk shares with the next.
        is_neox_style: pair the halves of the rotated part; otherwise even elements with odd ones.

    Raises:
        ValueError: as ``rotary_embedding``, the table is too short, or ``local_size`` is not from 0
            to below ``chunk_size``.
    """
    op = "dual_chunk_rotary_embedding"
    length = chunk_length(chunk_size, local_size)
    if cos_sin_cache.shape[0] < length + chunk_size:
        raise ValueError(
            f"{op}: cos_sin_cache has {cos_sin_cache.shape[0]} rows, expected at least "
            f"{length + chunk_size} for chunk_size={chunk_size} and local_size={local_size}"
        )

    # Negative positions alone are refused: every place in a chunk has a row in the table.
    expect_in_range(op, "positions", positions, torch.iinfo(torch.int64).max)

    place = positions % length
    before = place + length
    further = torch.full_like(place, min(2 * length - 1, chunk_size))
    other_places = (before.clamp(max=chunk_size), further, before, place + chunk_size)

    own_rows = _table_rows(op, place, cos_sin_cache)
    first, rotated_key = _rotated_pair(op, query, key, own_rows, head_size, is_neox_style)

    queries = [first]
    for other in other_places:
        rows = _table_rows(op, other, cos_sin_cache)
        queries.append(_rotated_heads(op, "query", query, rows, head_size, is_neox_style))
    return torch.cat(queries, dim=-1), rotated_key


def chunk_length(chunk_size: int, local_size: int) -> int:
    """Return ``chunk_size - local_size``.

    Raises:
        ValueError: ``local_size`` is not from 0 to below ``chunk_size``.
    """
    if not 0 <= local_size < chunk_size:
        raise ValueError(
            f"dual_chunk_rotary_embedding: local_size is {local_size}, expected 0 to below "
            f"chunk_size={chunk_size}"
        )
    return chunk_size - local_size


def _table_rows(op: str, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return the table's rows at ``positions``, ``[*positions.shape, rotary_dim]``."""
    expect_integers(op, "positions", positions)
    expect_floating(op, "cos_sin_cache", cos_sin_cache)
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2:
        raise ValueError(
            f"{op}: cos_sin_cache has shape {tuple(cos_sin_cache.shape)}, expected "
            "[positions, rotary_dim], the latter even"
        )

    expect_same_device(op, "positions", positions, "cos_sin_cache", cos_sin_cache)
    expect_in_range(op, "positions", positions, cos_sin_cache.shape[0])
    return cos_sin_cache[positions]


def _by_section(rows: Tensor, mrope_section: Sequence[int], interleaved: bool) -> Tensor:
    """Reduce ``[3, *tokens, rotary_dim]`` to ``[*tokens, rotary_dim]``, one axis for each pair."""
    *lead, rotary_dim = rows.shape
    # Cosines and sines apart: [3, *tokens, 2, pairs].
    angles = rows.reshape(*lead, 2, rotary_dim // 2)
    if not interleaved:
        sections = torch.split_with_sizes(angles, list(mrope_section), dim=-1)
        own = [section[axis] for axis, section in enumerate(sections)]
        return torch.cat(own, dim=-1).flatten(-2)

    chosen = angles[0].clone()
    for axis in (1, 2):
        turns = slice(axis, 3 * mrope_section[axis], 3)
        chosen[..., turns] = angles[axis, ..., turns]
    return chosen.flatten(-2)


def _rotated_pair(
    op: str, query: Tensor, key: Tensor, cos_sin: Tensor, head_size: int, is_neox_style: bool
) -> tuple[Tensor, Tensor]:
    expect_floating(op, "query", query)
    expect_floating(op, "key", key)
    expect_same_dtype(op, "key", key, "query", query)
    expect_same_device(op, "key", key, "query", query)

    rotated_query = _rotated_heads(op, "query", query, cos_sin, head_size, is_neox_style)
    rotated_key = _rotated_heads(op, "key", key, cos_sin, head_size, is_neox_style)
    return rotated_query, rotated_key


def _rotated_heads(
    op: str, argument: str, x: Tensor, cos_sin: Tensor, head_size: int, is_neox_style: bool
) -> Tensor:
    """Rotate the heads of ``x``; ``cos_sin`` is ``[*tokens, rotary_dim]``."""
    rotary_dim = cos_sin.shape[-1]
    expect_positive(op, "head_size", head_size)
    if rotary_dim > head_size:
        raise ValueError(
            f"{op}: cos_sin_cache has rotary_dim {rotary_dim}, expected at most "
            f"head_size={head_size}"
        )

    expect_same_device(op, argument, x, "cos_sin_cache", cos_sin)
    cos_sin = _per_token(op, argument, x, cos_sin)
    if x.dim() < 2 or x.shape[-1] % head_size:
        raise ValueError(
            f"{op}: {argument} has shape {tuple(x.shape)}, expected a last dimension that is a "
            f"multiple of head_size={head_size}"
        )

    *lead, width = x.shape
    heads = x.reshape(*lead, width // head_size, head_size)
    # Dimensions of size 1, so that a token's row broadcasts over its heads.
    missing = (1,) * (heads.dim() - cos_sin.dim())
    cos, sin = cos_sin.reshape(*cos_sin.shape[:-1], *missing, rotary_dim).chunk(2, dim=-1)

    rotated = _rotated_pairs(heads[..., :rotary_dim], cos, sin, is_neox_style)
    if rotary_dim < head_size:
        rotated = torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
    return rotated.reshape(x.shape)


def _per_token(op: str, argument: str, x: Tensor, cos_sin: Tensor) -> Tensor:
    """Return ``cos_sin`` with tokens in the shape of those in ``x``: unchanged, or flattened."""
    tokens = cos_sin.shape[:-1]
    if x.dim() > len(tokens) and x.shape[: len(tokens)] == tokens:
        return cos_sin
    if x.dim() < 2 or x.shape[0] != tokens.numel():
        raise ValueError(
            f"{op}: {argument} has shape {tuple(x.shape)}, expected it to begin with "
            f"{tuple(tokens)} as positions do, or with {tokens.numel()}"
        )
    return cos_sin.flatten(0, -2)


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    """Rotate the pairs of ``x``; ``cos`` and ``sin`` broadcast to ``[..., pairs]``."""
    dtype = compute_dtype(x.dtype)
    if is_neox_style:
        first, second = x.to(dtype).chunk(2, dim=-1)
    else:
        first = x[..., 0::2].to(dtype)
        second = x[..., 1::2].to(dtype)

    cos = cos.to(dtype)
    sin = sin.to(dtype)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin

    if is_neox_style:
        rotated = torch.cat((rotated_first, rotated_second), dim=-1)
    else:
        rotated = torch.stack((rotated_first, rotated_second), dim=-1).flatten(-2)
    return rotated.to(x.dtype)
