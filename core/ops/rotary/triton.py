"""Triton kernels for rotary embeddings. Their maths and arguments are in ``functional``.

A program rotates several heads of one token, of the query or of the key; one launch serves both, and all versions of
the query where there are several. Half types are rotated in float32 and rounded once.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
"""Pairs of elements that a program rotates: eight for each thread of four warps."""


@triton.jit
def _row_of_chunk(position, version, length, chunk_size):
    """Find the row of the table by which ``dual_chunk_rotary_embedding`` rotates this version (from 0) of a query."""
    place = position % length
    # The sign of a remainder here is that of the position.
    place = tl.where(place < 0, place + length, place)
    before, farthest = place + length, tl.minimum(2 * length - 1, chunk_size)
    row = tl.where(
        version == 0, place, tl.where(version == 1, tl.minimum(before, chunk_size), before)
    )
    return tl.where(version == 2, farthest, tl.where(version == 4, place + chunk_size, row))


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
    """Load cosines and sines of a token, from the row that ``table`` says, pair by pair where axes differ."""
    pair = tl.arange(0, tile_columns)[None, :]
    if table == "sequence":
        row = token % length
    elif table == "positions":
        row = tl.load(positions + token).to(tl.int64)
    elif table == "chunks":
        row = _row_of_chunk(
            tl.load(positions + token).to(tl.int64), version, first_bound, second_bound
        )
    else:
        if table == "interleaved":
            axis = tl.where(pair < tl.where(pair % 3 == 1, first_bound, second_bound), pair % 3, 0)
        else:
            axis = (pair >= first_bound).to(tl.int32) + (pair >= second_bound).to(tl.int32)
        row = tl.load(positions + axis * length + token, pair < pairs, 0).to(tl.int64)
    c = tl.load(cos + row * table_stride + pair, pair < pairs, 0.0).to(tl.float32)
    s = tl.load(sin + row * table_stride + pair, pair < pairs, 0.0).to(tl.float32)
    return c, s


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
    """Rotate the heads that begin at ``x`` and exist; a head has up to ``rest`` elements behind its rotated part."""
    if neox:
        pair = tl.arange(0, tile_columns)[None, :]
        inside = exists & (pair < pairs)
        first = tl.load(x + pair, inside, 0.0).to(tl.float32)
        second = tl.load(x + pairs + pair, inside, 0.0).to(tl.float32)
        tl.store(out + pair, (first * c - second * s).to(out.dtype.element_ty), inside)
        tl.store(out + pairs + pair, (second * c + first * s).to(out.dtype.element_ty), inside)
    else:
        both = tl.arange(0, 2 * tile_columns)[None, :]
        inside = exists & (both < 2 * pairs)
        together = tl.load(x + both, inside, 0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(together, (tile_rows, tile_columns, 2)))
        together = tl.join(first * c - second * s, second * c + first * s)
        together = tl.reshape(together, (tile_rows, 2 * tile_columns))
        tl.store(out + both, together.to(out.dtype.element_ty), inside)
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
    """Rotate; each ``together`` heads of the query are followed by their other versions, if there are several."""
    of_query = tl.cdiv(query_heads, tile_rows) * versions
    blocks = of_query + tl.cdiv(key_heads, tile_rows)
    token, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    version = tl.where(block < of_query, block % versions, 0)
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
    head = tl.where(block < of_query, block // versions, block - of_query) * tile_rows
    head = head.to(tl.int64) + tl.arange(0, tile_rows)[:, None]
    if block < of_query:
        x = query + token * query_stride + head * query_head_stride
        place = (
            token * query_heads * versions
            + head
            + (head // together * (versions - 1) + version) * together
        )
        y = x if in_place else query_out + place * head_size
        _rotate(
            x, y, head < query_heads, c, s, pairs, head_size, neox, rest, tile_rows, tile_columns
        )
    else:
        x = key + token * key_stride + head * key_head_stride
        y = x if in_place else key_out + (token * key_heads + head) * head_size
        _rotate(x, y, head < key_heads, c, s, pairs, head_size, neox, rest, tile_rows, tile_columns)


class _Angles(NamedTuple):
    """The place of the angles: tables of one stride with adjacent columns, and how the kernel picks their rows.

    The bounds are where the second and the third section of pairs begin, or length and size of a chunk.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    length: int
    table: str
    bounds: tuple[int, int] = (0, 0)

    @property
    def versions(self) -> int:
        """Count how often the query is rotated."""
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
    return _Angles(
        cache[:, :pairs], cache[:, pairs:], positions.contiguous(), tokens, table, bounds
    )


def _launch_rotation(
    query: Tensor,
    key: Tensor,
    outs: tuple[Tensor, Tensor],
    angles: _Angles,
    neox: bool,
    together: int = 1,
) -> None:
    """Rotate ``[tokens, heads, head_size]`` with adjacent elements, in place if ``outs`` are query and key.

    By chunks the query gets all its versions, each of ``together`` heads at a time.
    """
    if not query.numel() + key.numel():
        return
    tokens, query_heads, head_size = query.shape
    key_heads, pairs = key.shape[1], angles.cos.shape[1]
    columns = power_of_two(pairs)
    rows = min(max(1, PAIRS // columns), power_of_two(max(query_heads, key_heads)))
    blocks = angles.versions * triton.cdiv(query_heads, rows) + triton.cdiv(key_heads, rows)
    in_place = outs[0] is query
    behind = 0 if in_place else head_size - 2 * pairs
    operands = (key, *outs, angles.positions, angles.cos, angles.sin)
    sizes = (angles.length, query_heads, key_heads, *query.stride()[:2], *key.stride()[:2])
    table = (angles.cos.stride(0), *angles.bounds, pairs, head_size, together)
    rest = power_of_two(behind) if behind else 0
    constants: dict[str, Any] = {"versions": angles.versions, "table": angles.table, "neox": neox}
    constants |= {"in_place": in_place, "rest": rest}
    tile = Tile(rows, columns, min(4, max(1, rows * columns // 128)))
    launch(rotary_kernel, tokens * blocks, tile, query, *operands, *sizes, *table, **constants)


def _as_heads(x: Tensor, tokens: int, head_size: int) -> Tensor:
    """View ``x`` as ``[tokens, heads, head_size]`` with adjacent elements; copy it where strides do not allow it."""
    heads = x.numel() // (tokens * head_size) if tokens else 0
    viewed = x.reshape(tokens, heads, head_size)
    return viewed if viewed.stride(-1) == 1 else viewed.contiguous()


def _fits(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
) -> bool:
    """Tell whether the kernel can take these; what it cannot the native definition computes, or says what is wrong."""
    return (
        positions.dtype in (torch.int32, torch.int64)
        and cos_sin_cache.is_floating_point()
        and cos_sin_cache.dim() == 2
        and cos_sin_cache.shape[1] % 2 == 0
        and 0 < cos_sin_cache.shape[1] <= head_size
        and positions.device == cos_sin_cache.device
        and query.dtype == key.dtype
        and all(_has_heads(positions, x, head_size) for x in (query, key))
    )


def _has_heads(positions: Tensor, x: Tensor, head_size: int) -> bool:
    """Tell whether ``x`` has heads to rotate for each position, with tokens arranged like these or flattened."""
    tokens = positions.shape
    return (
        x.is_floating_point()
        and x.dim() >= 2
        and x.shape[-1] % head_size == 0
        and (
            (x.dim() > len(tokens) and x.shape[: len(tokens)] == tokens)
            or x.shape[0] == tokens.numel()
        )
        and positions.device == x.device
    )


def _rotated(
    query: Tensor, key: Tensor, head_size: int, angles: _Angles, neox: bool
) -> tuple[Tensor, Tensor]:
    tokens, width = angles.length, query.shape[-1]
    outs = (query.new_empty((*query.shape[:-1], angles.versions * width)), key.new_empty(key.shape))
    heads = (_as_heads(query, tokens, head_size), _as_heads(key, tokens, head_size))
    _launch_rotation(*heads, outs, angles, neox, width // head_size if angles.versions > 1 else 1)
    return outs


@replaces(definitions.apply_rotary_emb)
def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool = True) -> Tensor:
    fits = (
        x.dim() >= 3
        and cos.shape == sin.shape == (x.shape[-3], x.shape[-1] // 2)
        and x.shape[-1] % 2 == 0
    )
    floating = all(t.is_floating_point() for t in (x, cos, sin))
    if not (fits and floating and x.numel() and x.device == cos.device == sin.device):
        return definitions.apply_rotary_emb.native(x, cos, sin, is_neox_style)
    out, head_size = x.new_empty(x.shape), x.shape[-1]
    heads = _as_heads(x, x.numel() // (x.shape[-2] * head_size), head_size)
    angles = _Angles(cos.contiguous(), sin.contiguous(), cos, x.shape[-3], "sequence")
    _launch_rotation(heads, heads[:, :0], (out, out), angles, is_neox_style)  # no heads for a key
    return out


@replaces(definitions.rotary_embedding)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor]:
    if not _fits(positions, query, key, head_size, cos_sin_cache):
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
    fits = _fits(positions, query, key, head_size, cos_sin_cache)
    if not (fits and writable(query) and writable(key) and apart(query, key)):
        rotated = rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style)
        for target, value in zip((query, key), rotated, strict=True):
            target.copy_(value)
        return
    expect_in_range("rotary_embedding_", "positions", positions, cos_sin_cache.shape[0])
    tokens = positions.numel()
    heads = (_as_heads(query, tokens, head_size), _as_heads(key, tokens, head_size))
    _launch_rotation(*heads, heads, _from_cache(cos_sin_cache, positions, tokens), is_neox_style)


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
    if not (of_three and _fits(positions[0], query, key, head_size, cos_sin_cache)):
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
    ends = (3 * height, 3 * width) if interleaved else (time, time + height)
    table = "interleaved" if interleaved else "contiguous"
    angles = _from_cache(cos_sin_cache, positions, positions[0].numel(), table, ends)
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
    fits = _fits(positions, query, key, head_size, cos_sin_cache)
    if not fits or cos_sin_cache.shape[0] < length + chunk_size:
        return definitions.dual_chunk_rotary_embedding.native(
            positions, query, key, head_size, cos_sin_cache, chunk_size, local_size, is_neox_style
        )
    expect_in_range(op, "positions", positions, torch.iinfo(torch.int64).max)
    angles = _from_cache(
        cos_sin_cache, positions, positions.numel(), "chunks", (length, chunk_size)
    )
    return _rotated(query, key, head_size, angles, is_neox_style)
