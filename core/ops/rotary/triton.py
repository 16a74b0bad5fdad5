"""Triton kernels for rotary embeddings. Their maths and arguments are in ``functional``.

A program rotates several heads of one token, either of the query or of the key. One launch serves
both, and all versions of the query. Half types are rotated in float32 and rounded once.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from opgraft.ops.checks import expect_in_range
from opgraft.ops.rotary import functional as definitions
from opgraft.ops.triton_launch import Tile, apart, as_rows, launch, power_of_two, replaces, writable
from torch import Tensor

__all__ = [
    "apply_rotary_emb",
    "rotary_embedding",
    "rotary_embedding_",
    "mrope",
    "dual_chunk_rotary_embedding",
]

PAIRS = 1024
"""Pairs of elements for one program: eight for each thread of four warps."""


@triton.jit
def _row_of_chunk(position, version, length, chunk_size):
    """Return the row of the table for a version of the query, counted from 0.

    The versions are those of ``dual_chunk_rotary_embedding``.
    """
    place = position % length
    # The sign of a remainder here is the sign of the position.
    place = tl.where(place < 0, place + length, place)

    before = place + length
    farthest = tl.minimum(2 * length - 1, chunk_size)

    row = tl.where(version == 1, tl.minimum(before, chunk_size), before)
    row = tl.where(version == 0, place, row)
    row = tl.where(version == 4, place + chunk_size, row)
    return tl.where(version == 2, farthest, row)


@triton.jit
def _axis_of_pair(pair, first_bound, second_bound, is_interleaved: tl.constexpr):
    """Return the axis of the position that turns a pair: 0 time, 1 height, 2 width."""
    if is_interleaved:
        turn = pair % 3
        bound = tl.where(turn == 1, first_bound, second_bound)
        axis = tl.where(pair < bound, turn, 0)
    else:
        is_behind_time = (pair >= first_bound).to(tl.int32)
        axis = is_behind_time + (pair >= second_bound).to(tl.int32)
    return axis


@triton.jit
def _angles(
    cos,
    sin,
    positions,
    token,
    version,
    length,
    table_stride,
    first_bound,
    second_bound,
    pairs,
    table: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Load the cosines and sines of a token, by the rule ``table`` for rows.

    The rules are "sequence", "positions" and "chunks" with one row for a token, and "interleaved"
    and "contiguous" with a row for each pair.
    """
    pair = tl.arange(0, tile_columns)[None, :]
    exists = pair < pairs
    if table == "sequence":
        row = token % length
    elif table == "positions":
        row = tl.load(positions + token).to(tl.int64)
    elif table == "chunks":
        position = tl.load(positions + token).to(tl.int64)
        row = _row_of_chunk(position, version, first_bound, second_bound)
    else:
        axis = _axis_of_pair(pair, first_bound, second_bound, table == "interleaved")
        row = tl.load(positions + axis * length + token, exists, 0).to(tl.int64)

    place = row * table_stride + pair
    c = tl.load(cos + place, exists, 0.0).to(tl.float32)
    s = tl.load(sin + place, exists, 0.0).to(tl.float32)
    return c, s


@triton.jit
def _rotate_halves(x, out, exists, c, s, pairs, tile_columns: tl.constexpr):
    """Rotate heads with pairs of one element from each half."""
    pair = tl.arange(0, tile_columns)[None, :]
    inside = exists & (pair < pairs)

    # Both halves are loaded before the first store, as the result may lie over the input.
    first = tl.load(x + pair, inside, 0.0).to(tl.float32)
    second = tl.load(x + pairs + pair, inside, 0.0).to(tl.float32)

    turned_first = first * c - second * s
    turned_second = second * c + first * s

    tl.store(out + pair, turned_first.to(out.dtype.element_ty), inside)
    tl.store(out + pairs + pair, turned_second.to(out.dtype.element_ty), inside)


@triton.jit
def _rotate_neighbours(
    x, out, exists, c, s, pairs, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    """Rotate heads with pairs of an even element and the next odd one."""
    both = tl.arange(0, 2 * tile_columns)[None, :]
    inside = exists & (both < 2 * pairs)
    # One load: two loads of every other element would read the same memory twice.
    together = tl.load(x + both, inside, 0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(together, (tile_rows, tile_columns, 2)))

    together = tl.join(first * c - second * s, second * c + first * s)
    together = tl.reshape(together, (tile_rows, 2 * tile_columns))
    tl.store(out + both, together.to(out.dtype.element_ty), inside)


@triton.jit
def _rotate(
    x,
    out,
    exists,
    c,
    s,
    pairs,
    head_size,
    neox: tl.constexpr,
    rest: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Rotate the existing heads at ``x``; copy up to ``rest`` elements behind the rotated part."""
    if neox:
        _rotate_halves(x, out, exists, c, s, pairs, tile_columns)
    else:
        _rotate_neighbours(x, out, exists, c, s, pairs, tile_rows, tile_columns)

    if rest > 0:
        behind = 2 * pairs + tl.arange(0, rest)[None, :]
        inside = exists & (behind < head_size)
        tl.store(out + behind, tl.load(x + behind, inside, 0.0), inside)


@triton.jit
def rotary_kernel(
    query,
    key,
    query_out,
    key_out,
    positions,
    cos,
    sin,
    length,
    query_heads,
    key_heads,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    table_stride,
    first_bound,
    second_bound,
    pairs,
    head_size,
    together,
    versions: tl.constexpr,
    table: tl.constexpr,
    neox: tl.constexpr,
    in_place: tl.constexpr,
    rest: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Rotate query and key.

    With several versions of the query, the result has groups of ``together`` heads: the first
    version of the group, then the others.
    """
    of_query = tl.cdiv(query_heads, tile_rows) * versions
    blocks = of_query + tl.cdiv(key_heads, tile_rows)

    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    is_query = block < of_query
    version = tl.where(is_query, block % versions, 0)

    c, s = _angles(
        cos,
        sin,
        positions,
        token,
        version,
        length,
        table_stride,
        first_bound,
        second_bound,
        pairs,
        table,
        tile_columns,
    )

    head_block = tl.where(is_query, block // versions, block - of_query)
    head = (head_block * tile_rows).to(tl.int64) + tl.arange(0, tile_rows)[:, None]

    if is_query:
        x = query + token * query_stride + head * query_head_stride
        earlier_versions = head // together * (versions - 1) + version
        place = token * query_heads * versions + head + earlier_versions * together
        y = x if in_place else query_out + place * head_size
        exists = head < query_heads
        _rotate(x, y, exists, c, s, pairs, head_size, neox, rest, tile_rows, tile_columns)
    else:
        x = key + token * key_stride + head * key_head_stride
        y = x if in_place else key_out + (token * key_heads + head) * head_size
        exists = head < key_heads
        _rotate(x, y, exists, c, s, pairs, head_size, neox, rest, tile_rows, tile_columns)


class _Angles(NamedTuple):
    """The tables of cosines and sines, and the kernel's rule to pick rows.

    Attributes:
        cos: ``[rows, pairs]``, with adjacent columns.
        sin: the same, with the stride of ``cos``.
        positions: the positions of the tokens; three for each token with sections. The rule
            "sequence" reads none: any pointer will do.
        length: the number of tokens; of a sequence, for the rule "sequence".
        table: the rule, see ``_angles``.
        bounds: with sections, the ends of two of them; by chunks, length and size of a chunk.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    length: int
    table: str
    bounds: tuple[int, int] = (0, 0)

    @property
    def versions(self) -> int:
        """The number of versions of the query."""
        return definitions.VERSIONS_OF_QUERY if self.table == "chunks" else 1


def _from_cache(
    cos_sin_cache: Tensor,
    positions: Tensor,
    tokens: int,
    table: str = "positions",
    bounds: tuple[int, int] = (0, 0),
) -> _Angles:
    pairs = cos_sin_cache.shape[1] // 2
    cache = as_rows(cos_sin_cache, 2 * pairs)
    cos = cache[:, :pairs]
    sin = cache[:, pairs:]
    return _Angles(cos, sin, positions.contiguous(), tokens, table, bounds)


def _launch_rotation(
    query: Tensor,
    key: Tensor,
    outs: tuple[Tensor, Tensor],
    angles: _Angles,
    neox: bool,
    together: int = 1,
) -> None:
    """Rotate ``[tokens, heads, head_size]`` with adjacent elements.

    The rotation is in place if ``outs`` are query and key. By chunks, ``outs`` has all versions of
    the query, each of ``together`` heads at a time.
    """
    if not query.numel() + key.numel():
        return

    tokens, query_heads, head_size = query.shape
    key_heads = key.shape[1]
    pairs = angles.cos.shape[1]
    versions = angles.versions

    # The sizes of a tile are powers of two.
    columns = power_of_two(pairs)
    rows = min(max(1, PAIRS // columns), power_of_two(max(query_heads, key_heads)))
    warps = min(4, max(1, rows * columns // 128))
    blocks = versions * triton.cdiv(query_heads, rows) + triton.cdiv(key_heads, rows)

    query_out, key_out = outs
    in_place = query_out is query

    # In place, the elements behind the rotated part stay where they are.
    behind = 0 if in_place else head_size - 2 * pairs
    launch(
        rotary_kernel,
        tokens * blocks,
        Tile(rows, columns, warps),
        query,
        key,
        query_out,
        key_out,
        angles.positions,
        angles.cos,
        angles.sin,
        angles.length,
        query_heads,
        key_heads,
        *query.stride()[:2],
        *key.stride()[:2],
        angles.cos.stride(0),
        *angles.bounds,
        pairs,
        head_size,
        together,
        versions=versions,
        table=angles.table,
        neox=neox,
        in_place=in_place,
        rest=power_of_two(behind) if behind else 0,
    )


def _as_heads(x: Tensor, tokens: int, head_size: int) -> Tensor:
    """Return ``x`` as ``[tokens, heads, head_size]`` with adjacent elements: a view or a copy."""
    heads = x.numel() // (tokens * head_size) if tokens else 0
    viewed = x.reshape(tokens, heads, head_size)
    return viewed if viewed.stride(-1) == 1 else viewed.contiguous()


def _kernel_takes(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
) -> bool:
    """Return True if the kernel takes these; else the native definition runs or raises."""
    if positions.dtype not in (torch.int32, torch.int64):
        return False
    if not cos_sin_cache.is_floating_point() or cos_sin_cache.dim() != 2:
        return False

    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        return False
    if positions.device != cos_sin_cache.device or query.dtype != key.dtype:
        return False
    return _has_heads(positions, query, head_size) and _has_heads(positions, key, head_size)


def _has_heads(positions: Tensor, x: Tensor, head_size: int) -> bool:
    """Return True if ``x`` has heads for each position, with tokens in the same shape or flat."""
    if not x.is_floating_point() or x.dim() < 2 or x.shape[-1] % head_size:
        return False

    tokens = positions.shape
    same_shape = x.dim() > len(tokens) and x.shape[: len(tokens)] == tokens
    if not same_shape and x.shape[0] != tokens.numel():
        return False
    return positions.device == x.device


def _rotated(
    query: Tensor, key: Tensor, head_size: int, angles: _Angles, neox: bool
) -> tuple[Tensor, Tensor]:
    tokens = angles.length
    versions = angles.versions

    *lead, width = query.shape
    query_out = query.new_empty((*lead, versions * width))
    key_out = key.new_empty(key.shape)

    _launch_rotation(
        _as_heads(query, tokens, head_size),
        _as_heads(key, tokens, head_size),
        (query_out, key_out),
        angles,
        neox,
        together=width // head_size if versions > 1 else 1,
    )
    return query_out, key_out


@replaces(definitions.apply_rotary_emb)
def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool = True) -> Tensor:
    if not _has_angles(x, cos, sin):
        return definitions.apply_rotary_emb.native(x, cos, sin, is_neox_style)

    out = x.new_empty(x.shape)

    sequence, heads_of_token, head_size = x.shape[-3:]
    tokens = x.numel() // (heads_of_token * head_size)
    heads = _as_heads(x, tokens, head_size)
    angles = _Angles(cos.contiguous(), sin.contiguous(), cos, sequence, "sequence")
    no_key = heads[:, :0]

    _launch_rotation(heads, no_key, (out, out), angles, is_neox_style)
    return out


def _has_angles(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return True if ``x`` has pairs, and ``cos`` and ``sin`` have a number for each."""
    if x.dim() < 3 or x.shape[-1] % 2 or not x.numel():
        return False
    if not cos.shape == sin.shape == (x.shape[-3], x.shape[-1] // 2):
        return False
    if not (x.is_floating_point() and cos.is_floating_point() and sin.is_floating_point()):
        return False
    return x.device == cos.device == sin.device


@replaces(definitions.rotary_embedding)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    if not _kernel_takes(positions, query, key, head_size, cos_sin_cache):
        return definitions.rotary_embedding.native(
            positions, query, key, head_size, cos_sin_cache, is_neox_style
        )

    expect_in_range("rotary_embedding", "positions", positions, cos_sin_cache.shape[0])
    angles = _from_cache(cos_sin_cache, positions, positions.numel())
    return _rotated(query, key, head_size, angles, is_neox_style)


@replaces(definitions.rotary_embedding_)
def rotary_embedding_(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> None:
    fits = _kernel_takes(positions, query, key, head_size, cos_sin_cache)
    if not (fits and writable(query) and writable(key) and apart(query, key)):
        rotated = rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style)
        query.copy_(rotated[0])
        key.copy_(rotated[1])
        return

    expect_in_range("rotary_embedding_", "positions", positions, cos_sin_cache.shape[0])

    tokens = positions.numel()
    query_heads = _as_heads(query, tokens, head_size)
    key_heads = _as_heads(key, tokens, head_size)
    angles = _from_cache(cos_sin_cache, positions, tokens)
    _launch_rotation(query_heads, key_heads, (query_heads, key_heads), angles, is_neox_style)


@replaces(definitions.mrope)
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
    of_three = positions.dim() >= 2 and positions.shape[0] == 3
    if not (of_three and _kernel_takes(positions[0], query, key, head_size, cos_sin_cache)):
        return definitions.mrope.native(
            positions,
            query,
            key,
            head_size,
            cos_sin_cache,
            mrope_section,
            is_neox_style,
            interleaved,
        )

    definitions.expect_sections(mrope_section, cos_sin_cache.shape[1], interleaved)
    expect_in_range("mrope", "positions", positions, cos_sin_cache.shape[0])

    time, height, width = mrope_section
    tokens = positions[0].numel()
    if interleaved:
        ends = (3 * height, 3 * width)
        angles = _from_cache(cos_sin_cache, positions, tokens, "interleaved", ends)
    else:
        ends = (time, time + height)
        angles = _from_cache(cos_sin_cache, positions, tokens, "contiguous", ends)
    return _rotated(query, key, head_size, angles, is_neox_style)


@replaces(definitions.dual_chunk_rotary_embedding)
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
    op = "dual_chunk_rotary_embedding"
    length = definitions.chunk_length(chunk_size, local_size)
    fits = _kernel_takes(positions, query, key, head_size, cos_sin_cache)
    if not fits or cos_sin_cache.shape[0] < length + chunk_size:
        return definitions.dual_chunk_rotary_embedding.native(
            positions, query, key, head_size, cos_sin_cache, chunk_size, local_size, is_neox_style
        )

    expect_in_range(op, "positions", positions, torch.iinfo(torch.int64).max)
    angles = _from_cache(
        cos_sin_cache, positions, positions.numel(), "chunks", (length, chunk_size)
    )
    return _rotated(query, key, head_size, angles, is_neox_style)
