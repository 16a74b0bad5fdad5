"""Triton kernels for the scan of Mamba-2. ``chunk_scan`` has the maths and arguments.

As in the paper (arXiv:2405.21060, section 6) products of matrices compute a chunk, in three
launches. The first computes the chunk's own part of the state. The second passes states from chunk
to chunk. The third computes the output of each token, from the chunk's first state and from the
tokens of the chunk up to and including this one. Products are of float32 numbers. For half types a
GPU with TF32 rounds the factors to TF32.
"""

# Annotations cannot tell the types of Triton's language, so mypy leaves jitted functions alone.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from opgraft.ops.activation.triton import load_float32
from opgraft.ops.state_space import chunk_scan as definitions
from opgraft.ops.state_space.triton_scan import (
    gated_output,
    given_or,
    pass_states,
    step_size,
    token_rows,
)
from opgraft.ops.triton_launch import Tile, launch, power_of_two, replaces
from opgraft.ops.triton_segments import block_of_segment, blocks_at_most
from torch import Tensor

__all__ = ["mamba_chunk_scan"]

CHUNK = 64
"""Tokens of a chunk, whatever ``chunk_size`` a caller gives: the result does not depend on it."""

ELEMENTS = 64
"""Elements of a head that a program computes."""

STATES = 32
"""Elements of a state that a program multiplies at a time."""


@triton.jit
def _head_of_program(
    starts, sequences, heads, head_size, chunk: tl.constexpr, tile_rows: tl.constexpr
):
    """Find a program's chunk, head, tokens, mask of the tokens, and elements of the head."""
    tiles = tl.cdiv(head_size, tile_rows)
    row = tl.program_id(0) // tiles
    head = row % heads
    block = (row // heads).to(tl.int64)

    _, first, end = block_of_segment(block, starts, sequences, chunk)
    token = (first + tl.arange(0, chunk)).to(tl.int64)
    exists = token < end

    first_element = tl.program_id(0) % tiles * tile_rows
    element = first_element + tl.arange(0, tile_rows)
    return block, head, token, exists, element


@triton.jit
def _steps(
    dt, bias, head, token, stride, exists, has_bias: tl.constexpr, dt_softplus: tl.constexpr
):
    """Load the steps of a head for some tokens, ``[tokens]``."""
    # Adding zeros gives the bias, one number per head, the shape of the tokens.
    bias_at = bias + head + token * 0
    return step_size(dt + token * stride + head, bias_at, exists, has_bias, dt_softplus)


@triton.jit
def _sums_behind(step, chunk: tl.constexpr):
    """Sum the steps of all later tokens of the chunk, for each token."""
    place = tl.arange(0, chunk)
    is_later = place[:, None] < place[None, :]
    later = tl.where(is_later, step[None, :], 0.0)
    return tl.sum(later, 1)


@triton.jit
def _decays(step, a, chunk: tl.constexpr):
    """Compute the share ``[l, m]`` of the state after token ``m`` that is left after ``l``.

    The share is 0 if token ``l`` is before ``m``.
    """
    place = tl.arange(0, chunk)
    is_earlier = place[:, None] > place[None, :]
    # Each pair has a sum of its own: a difference of two long sums would lose small steps.
    each_pair = tl.where(is_earlier, (step * a)[:, None], 0.0)
    between = tl.cumsum(each_pair, 0)

    is_not_later = place[:, None] >= place[None, :]
    return tl.where(is_not_later, tl.exp(between), 0.0)


@triton.jit
def _products(
    b, c, states, exists, elements_exist, size, precision: tl.constexpr, tile_columns: tl.constexpr
):
    """Compute ``c @ b.T`` ``[tokens, tokens]``, and ``c @ states`` ``[tokens, elements]``."""
    # A loop over parts of the state keeps any size of state in registers.
    scores = tl.zeros((b.shape[0], b.shape[0]), tl.float32)
    before = tl.zeros((b.shape[0], states.shape[1]), tl.float32)

    for start in range(0, size, tile_columns):
        n = start + tl.arange(0, tile_columns)[None, :]
        of_state = start + tl.arange(0, tile_columns)[:, None]
        inside = exists & (n < size)
        b_part = load_float32(b + n, inside)
        c_part = load_float32(c + n, inside)
        # Transposed, as the product needs: elements of the state by elements of the head.
        state = tl.load(states + of_state, elements_exist & (of_state < size), 0.0)
        scores = tl.dot(c_part, tl.trans(b_part), scores, input_precision=precision)
        before = tl.dot(c_part, state, before, input_precision=precision)
    return scores, before


@triton.jit
def _within(scores, step, a, x, before, chunk: tl.constexpr, precision: tl.constexpr):
    """Add to ``before`` the outputs that tokens get from the inputs ``x`` of the same chunk."""
    decayed = scores * _decays(step, a, chunk)
    weighted = x * step[:, None]
    return tl.dot(decayed, weighted, before, input_precision=precision)


# Every batch has another number of sequences, so the number must not choose a compiled variant.
@triton.jit(do_not_specialize=["sequences"])
def chunk_states_kernel(
    x,
    dt,
    B,  # noqa: N803  # the letters of the paper
    A,  # noqa: N803
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
    """Store the own state of a chunk, computed from a state of zeros, and the sum of the steps."""
    block, head, token, exists, element = _head_of_program(
        starts, sequences, heads, head_size, chunk, tile_rows
    )
    step = _steps(dt, dt_bias, head, token, dt_stride, exists, has_bias, dt_softplus)
    a = tl.load(A + head).to(tl.float32)
    left = tl.exp(_sums_behind(step, chunk) * a)

    element = element[:, None]
    channel = head * head_size + element
    in_head = element < head_size
    inside = exists[None, :] & in_head
    given = load_float32(x + token[None, :] * x_stride + channel, inside)
    # A token's part of the state decays by the steps of all later tokens.
    given *= (step * left)[None, :]

    # Programs of other heads and elements store other rows of the same chunk.
    states += (block * heads * head_size + channel) * size
    group = head // per_group * size
    b_row = B + token[:, None] * b_stride + group
    for start in range(0, size, tile_columns):
        n = start + tl.arange(0, tile_columns)[None, :]
        in_state = n < size
        b = load_float32(b_row + n, exists[:, None] & in_state)
        own = tl.dot(given, b, input_precision=precision)
        tl.store(states + n, own, in_head & in_state)

    tl.store(totals + block * heads + head, tl.sum(step))


@triton.jit(do_not_specialize=["sequences"])
def chunk_scan_kernel(
    x,
    dt,
    B,  # noqa: N803
    C,  # noqa: N803
    z,
    A,  # noqa: N803
    D,  # noqa: N803
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
    """Store the outputs of a chunk, from the first state and tokens up to and including their own."""
    block, head, token, exists, element = _head_of_program(
        starts, sequences, heads, head_size, chunk, tile_rows
    )
    step = _steps(dt, dt_bias, head, token, dt_stride, exists, has_bias, dt_softplus)
    a = tl.load(A + head).to(tl.float32)

    row = token[:, None]
    channel = head * head_size + element[None, :]
    group = head // per_group * size
    exists = exists[:, None]
    in_head = element[None, :] < head_size
    inside = exists & in_head

    states += (block * heads * head_size + channel) * size
    b = B + row * b_stride + group
    c = C + row * c_stride + group
    scores, before = _products(b, c, states, exists, in_head, size, precision, tile_columns)
    given = load_float32(x + row * x_stride + channel, inside)

    # The first state has decayed by all steps up to a token, its own included.
    before *= tl.exp(tl.cumsum(step, 0) * a)[:, None]
    t = _within(scores, step, a, given, before, chunk, precision)

    weight = D + head + channel * 0
    z_at = z + row * z_stride + channel
    t = gated_output(t, given, weight, z_at, inside, has_weight, has_gate)
    tl.store(y + row * heads * head_size + channel, t, inside)


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
    # The checks of the definition, so errors are the same on every device.
    definitions.expect_heads(*given)
    if not initial_states.numel():
        return definitions.mamba_chunk_scan.native(*given, dt_softplus)

    starts = query_start_loc.contiguous()
    return _scan_chunks(x, dt, A, B, C, starts, initial_states, D, z, dt_bias, dt_softplus)


def _scan_chunks(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    starts: Tensor,
    initial_states: Tensor,
    D: Tensor | None,  # noqa: N803
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels for checked arguments, and return the outputs and the last states."""
    sequences, heads, head_size, size = initial_states.shape
    blocks = blocks_at_most(x.shape[0], sequences, CHUNK)
    y = x.new_empty(x.shape)
    states = x.new_empty((blocks, heads * head_size, size), dtype=torch.float32)
    totals = x.new_empty((blocks, heads), dtype=torch.float32)

    rows = token_rows(x, dt, B, C, z)
    strides = [each.stride(0) for each in rows]
    a, weight, bias = given_or(x, A, D, dt_bias)
    per_group = heads // B.shape[1]
    sizes = (sequences, heads, head_size, size, per_group)

    tile = _tile_of_products(head_size, size)
    programs = blocks * heads * triton.cdiv(head_size, tile.rows)
    constants: dict[str, Any] = {
        "chunk": CHUNK,
        "has_bias": dt_bias is not None,
        "dt_softplus": dt_softplus,
        # Exact products for float32 input, as torch computes by default.
        "precision": "ieee" if x.dtype == torch.float32 else "tf32",
    }

    first = (a, bias, starts, states, totals, *sizes, *strides[:3])
    launch(chunk_states_kernel, programs, tile, *rows[:3], *first, **constants)
    # From here on ``states`` has the first states of chunks.
    final = pass_states(states, totals, a, initial_states, starts, CHUNK)

    constants["has_weight"] = D is not None
    constants["has_gate"] = z is not None
    second = (a, weight, bias, starts, states, y, *sizes, *strides)
    launch(chunk_scan_kernel, programs, tile, *rows, *second, **constants)
    return y, final


def _tile_of_products(head_size: int, size: int) -> Tile:
    # A product of matrices by tl.dot takes 16 rows and columns at least.
    elements = max(16, power_of_two(head_size, ELEMENTS))
    columns = max(16, power_of_two(size, STATES))
    return Tile(elements, columns, 4)
