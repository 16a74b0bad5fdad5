"""Triton kernels for the scan of Mamba-2. Their maths and arguments are in ``chunk_scan``.

As in the paper (arXiv:2405.21060, section 6) a chunk is computed by products of matrices: what its tokens add to a
state, and after states were passed from chunk to chunk, what they get from each other and from before. Products are of
float32 numbers; for half types they are rounded to TF32 where a GPU has it.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from opgraft.ops.state_space import chunk_scan as definitions
from opgraft.ops.state_space.triton_scan import gated_output, given_or, pass_states, step_size
from opgraft.ops.triton_launch import Tile, as_rows, launch, power_of_two, replaces
from opgraft.ops.triton_segments import block_of_segment, blocks_at_most
from torch import Tensor

__all__ = ["mamba_chunk_scan"]

CHUNK = 64
"""Tokens of a chunk, whatever a caller has asked for: the result is the same."""

ELEMENTS = 64
"""Elements of a head that a program computes."""

STATES = 32
"""Elements of a state that it multiplies at a time."""


@triton.jit
def _program(starts, sequences, heads, head_size, chunk: tl.constexpr, tile_rows: tl.constexpr):
    """Find the chunk, the head, the tokens, how many of those there are, and the elements that a program computes."""
    tiles = tl.cdiv(head_size, tile_rows)
    head, block = (
        tl.program_id(0) // tiles % heads,
        (tl.program_id(0) // tiles // heads).to(tl.int64),
    )
    _, first, end = block_of_segment(block, starts, sequences, chunk)
    token = (first + tl.arange(0, chunk)).to(tl.int64)
    return (
        block,
        head,
        token,
        token < end,
        tl.program_id(0) % tiles * tile_rows + tl.arange(0, tile_rows),
    )


@triton.jit
def _sums_behind(step, chunk: tl.constexpr):
    """Add up the steps behind each place."""
    place = tl.arange(0, chunk)
    return tl.sum(tl.where(place[:, None] < place[None, :], step[None, :], 0.0), 1)


@triton.jit
def _decays(step, a, chunk: tl.constexpr):
    """Compute how much of the state after token ``m`` is left after ``l``, ``[l, m]``; nothing of a later one.

    What lies between is added up for each pair, as differences of long sums would lose what is small beside them.
    """
    place = tl.arange(0, chunk)
    between = tl.cumsum(tl.where(place[:, None] > place[None, :], (step * a)[:, None], 0.0), 0)
    return tl.where(place[:, None] >= place[None, :], tl.exp(between), 0.0)


@triton.jit
def _products(
    b, c, states, exists, elements_exist, size, precision: tl.constexpr, tile_columns: tl.constexpr
):
    """Multiply ``c`` of tokens by ``b`` of all, ``[tokens, tokens]``, and by states, ``[tokens, elements]``."""
    scores = tl.zeros((b.shape[0], b.shape[0]), tl.float32)
    before = tl.zeros((b.shape[0], states.shape[1]), tl.float32)
    for start in range(0, size, tile_columns):
        n, of_state = (
            start + tl.arange(0, tile_columns)[None, :],
            start + tl.arange(0, tile_columns)[:, None],
        )
        given = tl.load(b + n, exists & (n < size), 0.0).to(tl.float32)
        asked = tl.load(c + n, exists & (n < size), 0.0).to(tl.float32)
        state = tl.load(states + of_state, elements_exist & (of_state < size), 0.0)
        scores = tl.dot(asked, tl.trans(given), scores, input_precision=precision)
        before = tl.dot(asked, state, before, input_precision=precision)
    return scores, before


@triton.jit(do_not_specialize=["sequences"])
def chunk_states_kernel(
    x,
    dt,
    A,  # noqa: N803  # the letters of the paper
    B,  # noqa: N803
    dt_bias,
    starts,
    states,
    totals,
    sequences,
    heads,
    head_size,
    size,
    per_group,
    x_stride,
    dt_stride,
    b_stride,
    chunk: tl.constexpr,
    has_bias: tl.constexpr,
    dt_softplus: tl.constexpr,
    precision: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute what the tokens of a chunk make of nothing, and their summed steps."""
    block, head, token, exists, element = _program(
        starts, sequences, heads, head_size, chunk, tile_rows
    )
    step = step_size(
        dt + token * dt_stride + head, dt_bias + head + token * 0, exists, has_bias, dt_softplus
    )
    left = tl.exp(_sums_behind(step, chunk) * tl.load(A + head).to(tl.float32))
    inside = exists[None, :] & (element < head_size)[:, None]
    given = tl.load(
        x + token[None, :] * x_stride + head * head_size + element[:, None], inside, 0.0
    ).to(tl.float32)
    given *= (step * left)[None, :]
    states += ((block * heads + head) * head_size + element[:, None]) * size
    rows = B + token[:, None] * b_stride + head // per_group * size
    for start in range(0, size, tile_columns):
        n = start + tl.arange(0, tile_columns)[None, :]
        b = tl.load(rows + n, exists[:, None] & (n < size), 0.0).to(tl.float32)
        t = tl.dot(given, b, input_precision=precision)
        tl.store(states + n, t, (element < head_size)[:, None] & (n < size))
    tl.store(totals + block * heads + head, tl.sum(step))


@triton.jit(do_not_specialize=["sequences"])
def chunk_scan_kernel(
    x,
    dt,
    A,  # noqa: N803
    B,  # noqa: N803
    C,  # noqa: N803
    D,  # noqa: N803
    z,
    dt_bias,
    starts,
    states,
    y,
    sequences,
    heads,
    head_size,
    size,
    per_group,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    chunk: tl.constexpr,
    has_weight: tl.constexpr,
    has_gate: tl.constexpr,
    has_bias: tl.constexpr,
    dt_softplus: tl.constexpr,
    precision: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    block, head, token, exists, element = _program(
        starts, sequences, heads, head_size, chunk, tile_rows
    )
    step = step_size(
        dt + token * dt_stride + head, dt_bias + head + token * 0, exists, has_bias, dt_softplus
    )
    row, channel, group = (
        token[:, None],
        head * head_size + element[None, :],
        head // per_group * size,
    )
    exists, element = exists[:, None], element[None, :] < head_size
    states += (block * heads * head_size + channel) * size
    b, c, a = (
        B + row * b_stride + group,
        C + row * c_stride + group,
        tl.load(A + head).to(tl.float32),
    )
    scores, before = _products(b, c, states, exists, element, size, precision, tile_columns)
    given = tl.load(x + row * x_stride + channel, exists & element, 0.0).to(tl.float32)
    before *= tl.exp(tl.cumsum(step, 0) * a)[:, None]
    t = tl.dot(
        scores * _decays(step, a, chunk), given * step[:, None], before, input_precision=precision
    )
    t = gated_output(
        t,
        given,
        D + head + channel * 0,
        z + row * z_stride + channel,
        exists & element,
        has_weight,
        has_gate,
    )
    tl.store(y + row * heads * head_size + channel, t.to(y.dtype.element_ty), exists & element)


@replaces(definitions.mamba_chunk_scan)
def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    query_start_loc: Tensor,
    initial_states: Tensor,
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    given = (x, dt, A, B, C, query_start_loc, initial_states, chunk_size, D, z, dt_bias)
    definitions.expect_heads(*given)
    if not initial_states.numel():
        return definitions.mamba_chunk_scan.native(*given, dt_softplus)
    sequences, heads, head_size, size = initial_states.shape
    blocks = blocks_at_most(x.shape[0], sequences, CHUNK)
    starts, y = query_start_loc.contiguous(), x.new_empty(x.shape)
    states = x.new_empty((blocks, heads * head_size, size), dtype=torch.float32)
    totals = x.new_empty((blocks, heads), dtype=torch.float32)
    rows = [as_rows(each, each.shape[1:].numel()) for each in (x, dt, B, C, x if z is None else z)]
    a, weight, bias = given_or(x, A, D, dt_bias)
    sizes, strides = (
        (sequences, heads, head_size, size, heads // B.shape[1]),
        [each.stride(0) for each in rows],
    )
    tile = Tile(max(16, power_of_two(head_size, ELEMENTS)), max(16, power_of_two(size, STATES)), 4)
    constants: dict[str, Any] = {
        "chunk": CHUNK,
        "has_bias": dt_bias is not None,
        "dt_softplus": dt_softplus,
    }
    constants |= {"precision": "ieee" if x.dtype == torch.float32 else "tf32"}
    programs = blocks * heads * triton.cdiv(head_size, tile.rows)
    first = (rows[1], a, rows[2], bias, starts, states, totals)
    launch(chunk_states_kernel, programs, tile, rows[0], *first, *sizes, *strides[:3], **constants)
    final = pass_states(states, totals, a, initial_states, starts, CHUNK)
    constants |= {"has_weight": D is not None, "has_gate": z is not None}
    second = (rows[1], a, *rows[2:4], weight, rows[4], bias, starts, states, y)
    launch(chunk_scan_kernel, programs, tile, rows[0], *second, *sizes, *strides, **constants)
    return y, final
