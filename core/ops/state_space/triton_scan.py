"""Triton kernels for the scan and step of Mamba. ``selective_scan`` has the maths and arguments.

Sequences are cut into chunks, and all chunks are scanned at once, in three launches. The first
scans each chunk from zeros: the result is the chunk's own part of the state. The second passes
states from chunk to chunk, in few steps. The third scans each chunk again, from its true first
state. A program finds the sequence of its chunk without the host. States are float32 throughout.
"""

# Annotations cannot tell the types of Triton's language, so mypy leaves jitted functions alone.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from opgraft.ops.activation.triton import activated, load_float32, softplus
from opgraft.ops.state_space import selective_scan as definitions
from opgraft.ops.triton_launch import (
    Tile,
    as_rows,
    entries_apart,
    launch,
    power_of_two,
    replaces,
    tile_of,
)
from opgraft.ops.triton_segments import block_of_segment, blocks_at_most
from torch import Tensor

__all__ = ["selective_scan", "selective_state_update"]

CHUNK = 64
"""Tokens of a chunk. A program scans the tokens of a chunk one after another."""

LARGEST_STATE = 1024
"""Elements of the state of a channel that a program holds in registers."""


@triton.jit
def step_size(dt, bias, exists, has_bias: tl.constexpr, dt_softplus: tl.constexpr):
    """Load step sizes, add the bias, and apply softplus if asked. A missing token has step zero."""
    step = tl.load(dt, exists, 0.0).to(tl.float32)
    if has_bias:
        step += tl.load(bias, exists, 0.0).to(tl.float32)
    if dt_softplus:
        step = softplus(step)
    # The softplus of a missing token is not zero, but a missing token must not decay the state.
    return tl.where(exists, step, 0.0)


@triton.jit
def _next_state(
    state, a, x, dt, b, dt_bias, exists, in_state, has_bias: tl.constexpr, dt_softplus: tl.constexpr
):
    """Compute the state after one token, and return the state, the token's input and the step."""
    given = tl.load(x, exists, 0.0).to(tl.float32)
    step = step_size(dt, dt_bias, exists, has_bias, dt_softplus)
    b = tl.load(b, in_state, 0.0).to(tl.float32)
    after = tl.exp(step * a) * state + step * given * b
    return after, given, step


@triton.jit
def gated_output(y, x, weight, z, exists, has_weight: tl.constexpr, has_gate: tl.constexpr):
    """Compute ``(y + weight · x) · silu(z)``, without a missing weight or gate."""
    if has_weight:
        y += tl.load(weight, exists, 0.0).to(tl.float32) * x
    if has_gate:
        gate = tl.load(z, exists, 0.0).to(tl.float32)
        y *= activated(gate, "silu", 0.0)
    return y


@triton.jit
def _output(
    state, c, x, weight, z, exists, in_state, has_weight: tl.constexpr, has_gate: tl.constexpr
):
    """Compute the output of a token from the state after the token and the token's input ``x``."""
    c = tl.load(c, in_state, 0.0).to(tl.float32)
    y = tl.sum(state * c, 1, keep_dims=True)
    return gated_output(y, x, weight, z, exists, has_weight, has_gate)


@triton.jit
def _chunk_of_program(starts, sequences, channels, chunk: tl.constexpr, tile_rows: tl.constexpr):
    """Find the number of a program's chunk, the bounds of the chunk's tokens, and the channels."""
    tiles = tl.cdiv(channels, tile_rows)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    _, first, end = block_of_segment(block, starts, sequences, chunk)
    first_channel = tl.program_id(0) % tiles * tile_rows
    channel = first_channel + tl.arange(0, tile_rows)[:, None]

    # The last chunk of a sequence may be partly empty.
    end_of_chunk = tl.minimum(first + chunk, end)
    return block, first, end_of_chunk, channel


# Every batch has another number of sequences, so the number must not choose a compiled variant.
@triton.jit(do_not_specialize=["sequences"])
def scan_kernel(
    x,
    dt,
    B,  # noqa: N803  # the letters of the paper
    C,  # noqa: N803
    z,
    A,  # noqa: N803
    D,  # noqa: N803
    dt_bias,
    starts,
    states,
    totals,
    y,
    sequences,
    channels,
    size,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    chunk: tl.constexpr,
    from_states: tl.constexpr,
    has_weight: tl.constexpr,
    has_gate: tl.constexpr,
    has_bias: tl.constexpr,
    dt_softplus: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Scan a chunk: with ``from_states`` for the outputs, else for the chunk's own state.

    With ``from_states`` the scan starts from the chunk's first state. Without, the scan starts from
    zeros, and stores the last state and the sum of the steps.
    """
    block, first, end, channel = _chunk_of_program(starts, sequences, channels, chunk, tile_rows)
    n = tl.arange(0, tile_columns)[None, :]
    exists = channel < channels
    in_state = n < size
    inside = exists & in_state

    place = block * channels + channel
    token = first.to(tl.int64)
    a = load_float32(A + channel * size + n, inside)
    bias = dt_bias + channel
    total = tl.zeros((tile_rows, 1), tl.float32)

    # The mask is empty without from_states, so that scan starts from zeros.
    state_at = states + place * size + n
    state = tl.load(state_at, inside & from_states, 0.0)

    for _ in range(first, end):
        x_at = x + token * x_stride + channel
        dt_at = dt + token * dt_stride + channel
        b_at = B + token * b_stride + n
        state, given, step = _next_state(
            state, a, x_at, dt_at, b_at, bias, exists, in_state, has_bias, dt_softplus
        )
        total += step
        if from_states:
            z_at = z + token * z_stride + channel
            t = _output(
                state,
                C + token * c_stride + n,
                given,
                D + channel,
                z_at,
                exists,
                in_state,
                has_weight,
                has_gate,
            )
            tl.store(y + token * channels + channel, t, exists)
        token += 1

    if not from_states:
        tl.store(state_at, state, inside)
        tl.store(totals + place, total, exists)


@triton.jit
def passed_states_kernel(
    states,
    totals,
    A,  # noqa: N803
    initial,
    final,
    starts,
    rows,
    size,
    per_total,
    a_stride,
    a_element,
    chunk: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Replace each chunk's own state by the first state, and store the last state of a sequence."""
    tiles = tl.cdiv(rows, tile_rows)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    first_row = tl.program_id(0) % tiles * tile_rows
    row = first_row + tl.arange(0, tile_rows)[:, None]
    n = tl.arange(0, tile_columns)[None, :]

    exists = row < rows
    inside = exists & (n < size)

    element = row.to(tl.int64) * size + n
    state_at = sequence * rows * size + element
    # Rows that share a step size share an entry of the totals, and a row of A.
    shared = row // per_total
    a = load_float32(A + shared * a_stride + n * a_element, inside)
    state = load_float32(initial + state_at, inside)

    start = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    # Sequences before have start // chunk whole chunks at most, and one partial chunk each.
    block = start // chunk + sequence
    for _ in range(tl.cdiv(end - start, chunk)):
        place = states + block * rows * size + element
        own = tl.load(place, inside, 0.0)
        total = tl.load(totals + block * (rows // per_total) + shared, exists, 0.0)
        tl.store(place, state, inside)
        # The steps of a chunk decay a state as one step of their sum does.
        state = tl.exp(total * a) * state + own
        block += 1
    tl.store(final + state_at, state, inside)


@triton.jit
def _head_of_program(heads, head_size, tile_rows: tl.constexpr):
    """Find the token, the head and the elements of the head that a program computes."""
    tiles = tl.cdiv(head_size, tile_rows)
    row = tl.program_id(0) // tiles
    element = tl.program_id(0) % tiles * tile_rows + tl.arange(0, tile_rows)[:, None]
    return (row // heads).to(tl.int64), row % heads, element


@triton.jit
def step_kernel(
    x,
    dt,
    B,  # noqa: N803
    C,  # noqa: N803
    z,
    A,  # noqa: N803
    D,  # noqa: N803
    dt_bias,
    slots,
    state,
    out,
    heads,
    head_size,
    size,
    per_group,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    state_stride,
    out_stride,
    of_heads: tl.constexpr,
    has_weight: tl.constexpr,
    has_gate: tl.constexpr,
    has_bias: tl.constexpr,
    dt_softplus: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Compute one token for some elements of a head.

    With ``of_heads`` a head has one step, one ``A``, one ``D`` and one bias for all elements.
    """
    token, head, element = _head_of_program(heads, head_size, tile_rows)
    n = tl.arange(0, tile_columns)[None, :]
    exists = element < head_size
    in_state = n < size
    inside = exists & in_state
    channel = head * head_size + element

    if of_heads:
        # The head has one number. Adding zeros gives the number the shape of a tile.
        number = head + element * 0
        decay = number + n * 0
    else:
        number = channel
        decay = number * size + n

    a = load_float32(A + decay, inside)
    slot = tl.load(slots + token).to(tl.int64)
    place = state + slot * state_stride + channel * size + n

    x_at = x + token * x_stride + channel
    dt_at = dt + token * dt_stride + number
    z_at = z + token * z_stride + channel

    group = head // per_group * size
    b_at = B + token * b_stride + group + n
    c_at = C + token * c_stride + group + n

    before = load_float32(place, inside)
    after, given, _ = _next_state(
        before, a, x_at, dt_at, b_at, dt_bias + number, exists, in_state, has_bias, dt_softplus
    )

    tl.store(place, after, inside)
    t = _output(after, c_at, given, D + number, z_at, exists, in_state, has_weight, has_gate)
    tl.store(out + token * out_stride + channel, t, exists)


def token_rows(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor | None) -> list[Tensor]:
    """View tensors with values per token as rows, with ``x`` in the place of a missing gate."""
    by_token = (x, dt, b, c, x if z is None else z)
    return [as_rows(each, each.shape[1:].numel()) for each in by_token]


def given_or(x: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Return contiguous tensors, with ``x`` in the place of each missing one.

    A kernel needs a pointer for every argument, and does not read the pointer of a missing tensor.
    """
    return [x if other is None else other.contiguous() for other in others]


@replaces(definitions.selective_scan)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    query_start_loc: Tensor,
    initial_states: Tensor,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    given = (x, dt, A, B, C, query_start_loc, initial_states, D, z, dt_bias)
    # The checks of the definition, so errors are the same on every device.
    definitions.expect_channels(*given)
    tokens, channels = x.shape
    sequences, _, size = initial_states.shape
    if not initial_states.numel() or size > LARGEST_STATE:
        return definitions.selective_scan.native(*given, dt_softplus)

    starts = query_start_loc.contiguous()
    columns = power_of_two(size)
    # One warp: the loop over tokens is sequential, so more programs are better than larger ones.
    tile = Tile(max(1, 512 // columns), columns, 1)

    blocks = blocks_at_most(tokens, sequences, CHUNK)
    states = x.new_empty((blocks, channels, size), dtype=torch.float32)
    totals = x.new_empty((blocks, channels), dtype=torch.float32)
    y = x.new_empty(x.shape)

    rows = token_rows(x, dt, B, C, z)
    strides = [each.stride(0) for each in rows]
    a, weight, bias = given_or(x, A, D, dt_bias)

    others = (a, weight, bias, starts, states, totals, y, sequences, channels, size, *strides)
    programs = blocks * triton.cdiv(channels, tile.rows)

    constants: dict[str, Any] = {
        "chunk": CHUNK,
        "has_weight": D is not None,
        "has_gate": z is not None,
        "has_bias": dt_bias is not None,
        "dt_softplus": dt_softplus,
    }

    launch(scan_kernel, programs, tile, *rows, *others, **constants, from_states=False)
    # From here on ``states`` has the first states of chunks.
    final = pass_states(states, totals, a, initial_states, starts, CHUNK)
    launch(scan_kernel, programs, tile, *rows, *others, **constants, from_states=True)
    return y, final


def pass_states(
    states: Tensor, totals: Tensor, a: Tensor, initial: Tensor, starts: Tensor, chunk: int
) -> Tensor:
    """Replace the own states of chunks by first states, and return the last states of sequences.

    Args:
        states: the state of each chunk, scanned from zeros, ``[chunks, rows, state]``; written to.
        totals: summed steps of each chunk, float32 ``[chunks, rows]``, or ``[chunks, rows / n]`` if
            ``n`` neighbouring rows share their steps.
        a: the decay of a state by a step, ``[rows, state]``, or one for each column of ``totals``.
        initial: ``[sequences, ..., state]``.
        starts: bounds of the tokens of sequences, ``[sequences + 1]``.
        chunk: tokens of a chunk.
    """
    _, rows, size = states.shape
    sequences = initial.shape[0]
    final = initial.new_empty(initial.shape)
    tile = tile_of(size, 1024, LARGEST_STATE)
    programs = sequences * triton.cdiv(rows, tile.rows)

    # A stride of zero reads one decay for all elements of a state.
    strides = (size, 1) if a.dim() == 2 else (1, 0)
    sizes = (rows, size, rows // totals.shape[1], *strides)
    operands = (totals, a, initial.contiguous(), final, starts)
    launch(passed_states_kernel, programs, tile, states, *operands, *sizes, chunk=chunk)
    return final


@replaces(definitions.selective_state_update)
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    slots: Tensor,
    out: Tensor,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> None:
    given = (state, x, dt, A, B, C, slots, out, D, z, dt_bias)
    definitions.expect_update("selective_state_update", *given)
    tokens, heads, head_size = x.shape
    size = A.shape[2]

    # A kernel writes by strides, so no two slots may share memory.
    fits = x.numel() and 0 < size <= LARGEST_STATE
    if not (fits and entries_apart(state) and entries_apart(out)):
        definitions.selective_state_update.native(*given, dt_softplus)
        return

    of_heads = A.stride(1) == 0 and _are_expanded(dt, A, D, dt_bias)
    if of_heads:
        dt = dt[..., 0]
        A = A[:, 0, 0]  # noqa: N806
        D = None if D is None else D[:, 0]  # noqa: N806
        dt_bias = None if dt_bias is None else dt_bias[:, 0]

    rows = token_rows(x, dt, B, C, z)
    strides = [each.stride(0) for each in (*rows, state, out)]
    a, weight, bias = given_or(x, A, D, dt_bias)
    operands = (a, weight, bias, slots.contiguous(), state, out)
    sizes = (heads, head_size, size, heads // B.shape[1])

    tile = tile_of(size, 2048, LARGEST_STATE)
    programs = tokens * heads * triton.cdiv(head_size, tile.rows)
    launch(
        step_kernel,
        programs,
        tile,
        *rows,
        *operands,
        *sizes,
        *strides,
        of_heads=of_heads,
        has_weight=D is not None,
        has_gate=z is not None,
        has_bias=dt_bias is not None,
        dt_softplus=dt_softplus,
    )


def _are_expanded(*numbers: Tensor | None) -> bool:
    """Return True if the last dimension of each tensor repeats one element.

    Mamba-2 expands one number per head. The kernel reads such a number where it lies: a copy of the
    expanded ``A`` would be as large as the state.
    """
    given = [each for each in numbers if each is not None]
    return all(each.stride(-1) == 0 for each in given)
