"""Triton kernels for the scan and the step of Mamba. Their maths and arguments are in ``selective_scan``.

Sequences are cut into chunks, which are scanned at once: first from nothing, for what each adds to a state, then from
the states that they begin with. In between one kernel passes states from chunk to chunk, which takes few steps. A
program finds the sequence of its chunk by itself. States are float32 throughout.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from opgraft.ops.activation.triton import activated, softplus
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
"""Tokens of a chunk, which a program scans one after another."""

LARGEST_STATE = 1024
"""Elements of the state of a channel that a program holds in registers."""


@triton.jit
def step_size(dt, bias, exists, has_bias: tl.constexpr, dt_softplus: tl.constexpr):
    """Load step sizes with their bias, positive if that is asked for; none where there is no token."""
    step = tl.load(dt, exists, 0.0).to(tl.float32)
    if has_bias:
        step += tl.load(bias, exists, 0.0).to(tl.float32)
    if dt_softplus:
        step = softplus(step)
    return tl.where(exists, step, 0.0)


@triton.jit
def gated_output(y, x, weight, z, exists, has_weight: tl.constexpr, has_gate: tl.constexpr):
    """Compute ``(y + weight · x) · silu(z)``, without what is not given."""
    if has_weight:
        y += tl.load(weight, exists, 0.0).to(tl.float32) * x
    if has_gate:
        y *= activated(tl.load(z, exists, 0.0).to(tl.float32), "silu", 0.0)
    return y


@triton.jit
def _program(starts, sequences, channels, chunk: tl.constexpr, tile_rows: tl.constexpr):
    """Find the chunk that a program scans, where its tokens begin and end, and the channels."""
    tiles = tl.cdiv(channels, tile_rows)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    _, first, end = block_of_segment(block, starts, sequences, chunk)
    channel = tl.program_id(0) % tiles * tile_rows + tl.arange(0, tile_rows)[:, None]
    return block, first, tl.minimum(first + chunk, end), channel


@triton.jit(do_not_specialize=["sequences"])
def scan_kernel(
    x,
    dt,
    A,  # noqa: N803  # the letters of the paper
    B,  # noqa: N803
    C,  # noqa: N803
    D,  # noqa: N803
    z,
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
    """Scan a chunk from its state and store outputs, or from nothing and store its own state and summed steps."""
    block, first, end, channel = _program(starts, sequences, channels, chunk, tile_rows)
    n, exists, place = (
        tl.arange(0, tile_columns)[None, :],
        channel < channels,
        block * channels + channel,
    )
    inside, token = exists & (n < size), first.to(tl.int64)
    a = tl.load(A + channel * size + n, inside, 0.0).to(tl.float32)
    total, state = (
        tl.zeros((tile_rows, 1), tl.float32),
        tl.load(states + place * size + n, inside & from_states, 0.0),
    )
    for _ in range(first, end):
        given = tl.load(x + token * x_stride + channel, exists, 0.0).to(tl.float32)
        step = step_size(
            dt + token * dt_stride + channel, dt_bias + channel, exists, has_bias, dt_softplus
        )
        b = tl.load(B + token * b_stride + n, n < size, 0.0).to(tl.float32)
        state, total = tl.exp(step * a) * state + step * given * b, total + step
        if from_states:
            t = tl.sum(
                state * tl.load(C + token * c_stride + n, n < size, 0.0).to(tl.float32),
                1,
                keep_dims=True,
            )
            t = gated_output(
                t, given, D + channel, z + token * z_stride + channel, exists, has_weight, has_gate
            )
            tl.store(y + token * channels + channel, t.to(y.dtype.element_ty), exists)
        token += 1
    if not from_states:
        tl.store(states + place * size + n, state, inside)
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
    """Put the state that each chunk of a sequence begins with in the place of its own, and store the last one."""
    tiles = tl.cdiv(rows, tile_rows)
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * tile_rows + tl.arange(0, tile_rows)[:, None]
    n = tl.arange(0, tile_columns)[None, :]
    inside, element = (row < rows) & (n < size), row.to(tl.int64) * size + n
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    a = tl.load(A + row // per_total * a_stride + n * a_element, inside, 0.0).to(tl.float32)
    state = tl.load(initial + sequence * rows * size + element, inside, 0.0).to(tl.float32)
    block = start // chunk + sequence
    for _ in range(tl.cdiv(end - start, chunk)):
        place = states + block * rows * size + element
        own = tl.load(place, inside, 0.0)
        total = tl.load(totals + block * (rows // per_total) + row // per_total, row < rows, 0.0)
        tl.store(place, state, inside)
        state = tl.exp(total * a) * state + own
        block += 1
    tl.store(final + sequence * rows * size + element, state.to(final.dtype.element_ty), inside)


@triton.jit
def step_kernel(
    x,
    dt,
    A,  # noqa: N803
    B,  # noqa: N803
    C,  # noqa: N803
    D,  # noqa: N803
    z,
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
    """Compute a token of some elements of a head. ``of_heads`` says that their steps and weights are one per head."""
    row, tiles = tl.program_id(0) // tl.cdiv(head_size, tile_rows), tl.cdiv(head_size, tile_rows)
    head, token = row % heads, (row // heads).to(tl.int64)
    element = tl.program_id(0) % tiles * tile_rows + tl.arange(0, tile_rows)[:, None]
    n, exists, group = tl.arange(0, tile_columns)[None, :], element < head_size, head // per_group
    inside, channel = exists & (n < size), head * head_size + element
    number = head + element * 0 if of_heads else channel
    state += tl.load(slots + token).to(tl.int64) * state_stride + channel * size + n
    given = tl.load(x + token * x_stride + channel, exists, 0.0).to(tl.float32)
    step = step_size(
        dt + token * dt_stride + number, dt_bias + number, exists, has_bias, dt_softplus
    )
    place = number + n * 0 if of_heads else number * size + n
    a = tl.load(A + place, inside, 0.0).to(tl.float32)
    b = tl.load(B + token * b_stride + group * size + n, n < size, 0.0).to(tl.float32)
    c = tl.load(C + token * c_stride + group * size + n, n < size, 0.0).to(tl.float32)
    t = tl.exp(step * a) * tl.load(state, inside, 0.0).to(tl.float32) + step * given * b
    tl.store(state, t.to(state.dtype.scalar.element_ty), inside)
    t = tl.sum(t * c, 1, keep_dims=True)
    t = gated_output(
        t, given, D + number, z + token * z_stride + channel, exists, has_weight, has_gate
    )
    tl.store(out + token * out_stride + channel, t.to(out.dtype.element_ty), exists)


def given_or(x: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Return contiguous tensors, and ``x``, which a kernel does not read, in the place of those that are not given."""
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
    definitions.expect_channels(*given)
    (tokens, channels), (sequences, _, size) = x.shape, initial_states.shape
    if not initial_states.numel() or size > LARGEST_STATE:
        return definitions.selective_scan.native(*given, dt_softplus)
    starts, columns = query_start_loc.contiguous(), power_of_two(size)
    tile, blocks = (
        Tile(max(1, 512 // columns), columns, 1),
        blocks_at_most(tokens, sequences, CHUNK),
    )
    states, totals = (
        x.new_empty(n, dtype=torch.float32) for n in ((blocks, channels, size), (blocks, channels))
    )
    y = x.new_empty(x.shape)
    rows = [as_rows(each, each.shape[1]) for each in (x, dt, B, C, x if z is None else z)]
    a, weight, bias = given_or(x, A, D, dt_bias)
    operands = (a, *rows[2:4], weight, rows[4], bias, starts, states, totals, y)
    sizes = (sequences, channels, size, *(each.stride(0) for each in rows))
    constants: dict[str, Any] = {
        "chunk": CHUNK,
        "has_weight": D is not None,
        "has_gate": z is not None,
    }
    constants |= {"has_bias": dt_bias is not None, "dt_softplus": dt_softplus}
    programs = blocks * triton.cdiv(channels, tile.rows)
    launch(
        scan_kernel,
        programs,
        tile,
        rows[0],
        rows[1],
        *operands,
        *sizes,
        **constants,
        from_states=False,
    )
    final = pass_states(states, totals, a, initial_states, starts, CHUNK)
    launch(
        scan_kernel,
        programs,
        tile,
        rows[0],
        rows[1],
        *operands,
        *sizes,
        **constants,
        from_states=True,
    )
    return y, final


def pass_states(
    states: Tensor, totals: Tensor, a: Tensor, initial: Tensor, starts: Tensor, chunk: int
) -> Tensor:
    """Put the states that chunks begin with in the place of their own, and return those that sequences end with.

    Args:
        states: what each chunk makes of nothing, ``[chunks, rows, state]``; written to.
        totals: summed steps of each chunk, float32 ``[chunks, rows]``, or one for several neighbouring rows.
        a: what a step decays a state by, ``[rows, state]``, or ``[rows]`` as ``totals`` has them.
        initial: ``[sequences, ..., state]``.
        starts: where the tokens of sequences begin and end, ``[sequences + 1]``.
        chunk: tokens of a chunk.
    """
    (_, rows, size), sequences, final = (
        states.shape,
        initial.shape[0],
        initial.new_empty(initial.shape),
    )
    tile = tile_of(size, 1024, LARGEST_STATE)
    programs = sequences * triton.cdiv(rows, tile.rows)
    strides = (size, 1) if a.dim() == 2 else (1, 0)
    operands = (
        totals,
        a,
        initial.contiguous(),
        final,
        starts,
        rows,
        size,
        rows // totals.shape[1],
        *strides,
    )
    launch(passed_states_kernel, programs, tile, states, *operands, chunk=chunk)
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
    (tokens, heads, head_size), size = x.shape, A.shape[2]
    if not (
        x.numel() and 0 < size <= LARGEST_STATE and entries_apart(state) and entries_apart(out)
    ):
        definitions.selective_state_update.native(*given, dt_softplus)
        return
    of_heads = (
        all(each is None or each.stride(-1) == 0 for each in (dt, A, D, dt_bias))
        and A.stride(1) == 0
    )
    if of_heads:
        dt, A = dt[..., 0], A[:, 0, 0]  # noqa: N806
        D, dt_bias = (None if each is None else each[:, 0] for each in (D, dt_bias))  # noqa: N806
    rows = [as_rows(each, each[0].numel()) for each in (x, dt, B, C, x if z is None else z)]
    a, weight, bias = given_or(x, A, D, dt_bias)
    operands = (a, *rows[2:4], weight, rows[4], bias, slots.contiguous(), state, out)
    sizes = (heads, head_size, size, heads // B.shape[1])
    strides = (*(each.stride(0) for each in rows), state.stride(0), out.stride(0))
    constants: dict[str, Any] = {
        "of_heads": of_heads,
        "has_weight": D is not None,
        "has_gate": z is not None,
    }
    constants |= {"has_bias": dt_bias is not None, "dt_softplus": dt_softplus}
    tile = tile_of(size, 2048, LARGEST_STATE)
    programs = tokens * heads * triton.cdiv(head_size, tile.rows)
    launch(step_kernel, programs, tile, rows[0], rows[1], *operands, *sizes, *strides, **constants)
