"""Triton kernels for causal convolutions. Their maths and arguments are in ``causal_conv``.

A program has some tokens of one sequence and some channels, and reads each input as often as there are taps, mostly
from the cache: no token waits for another. Inputs before a sequence are read from its state.
"""

# The types of jitted functions are those of Triton's language, which annotations do not tell.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from opgraft.ops.activation.triton import activated
from opgraft.ops.state_space import causal_conv as definitions
from opgraft.ops.triton_launch import (
    Tile,
    as_rows,
    entries_apart,
    launch,
    power_of_two,
    replaces,
)
from opgraft.ops.triton_segments import block_of_segment, blocks_at_most
from torch import Tensor

__all__ = ["causal_conv1d", "causal_conv1d_update"]

TOKENS, CHANNELS = 16, 128
"""The tile of a program."""


@triton.jit
def _input(line, state, token, start, channels_exist, stride, before: tl.constexpr):
    """Load inputs of some tokens and channels, those before the start of a sequence from its state."""
    ahead = token < start
    given = tl.load(line + token * stride, channels_exist & (token >= start), 0.0).to(tl.float32)
    stored = tl.load(state + token - start + before, channels_exist & ahead, 0.0).to(tl.float32)
    return tl.where(ahead, stored, given)


@triton.jit
def _finished(total, bias, channel, exists, has_bias: tl.constexpr, silu: tl.constexpr):
    """Add the bias and apply the activation, where there are such."""
    if has_bias:
        total += tl.load(bias + channel, exists, 0.0).to(tl.float32)
    if silu:
        total = activated(total, "silu", 0.0)
    return total


@triton.jit(do_not_specialize=["sequences"])
def causal_conv1d_kernel(
    x,
    weight,
    bias,
    starts,
    initial,
    y,
    final,
    sequences,
    channels,
    stride,
    before: tl.constexpr,
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    tiles = tl.cdiv(channels, tile_columns)
    sequence, first, end = block_of_segment(tl.program_id(0) // tiles, starts, sequences, tile_rows)
    start = tl.load(starts + sequence)
    channel = tl.program_id(0) % tiles * tile_columns + tl.arange(0, tile_columns)[None, :]
    token, exists = (first + tl.arange(0, tile_rows)[:, None]).to(tl.int64), channel < channels
    inside, of_sequence = exists & (token < end), sequence.to(tl.int64) * channels * before
    initial += of_sequence + channel * before
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tap in tl.static_range(before + 1):
        factor = tl.load(weight + channel * (before + 1) + tap, exists, 0.0).to(tl.float32)
        total += factor * _input(
            x + channel, initial, token - before + tap, start, inside, stride, before
        )
    total = _finished(total, bias, channel, exists, has_bias, silu)
    tl.store(y + token * channels + channel, total.to(y.dtype.element_ty), inside)
    if first == start:  # one program of a sequence stores its last inputs
        last = tl.full((1, 1), 0, tl.int64) + end - before
        for place in tl.static_range(before):
            t = _input(x + channel, initial, last + place, start, exists, stride, before)
            tl.store(
                final + of_sequence + channel * before + place, t.to(final.dtype.element_ty), exists
            )


@triton.jit(do_not_specialize=["elements"])
def causal_conv1d_update_kernel(
    x,
    state,
    weight,
    bias,
    slots,
    out,
    elements,
    channels,
    stride,
    state_stride,
    out_stride,
    before: tl.constexpr,
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Convolve elements, a channel of a token each, with a window of the inputs so far beside each other."""
    element = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    tap, exists = tl.arange(0, tile_columns)[None, :], element < elements
    row, channel = element // channels, element % channels
    slot = tl.load(slots + row, exists, 0).to(tl.int64)
    place = state + slot * state_stride + channel * before + tap
    newest = tl.load(x + row * stride + channel, exists, 0.0).to(tl.float32)
    window = tl.where(
        tap == before, newest, tl.load(place, exists & (tap < before), 0.0).to(tl.float32)
    )
    factors = tl.load(weight + channel * (before + 1) + tap, exists & (tap <= before), 0.0).to(
        tl.float32
    )
    total = tl.sum(tl.where(tap <= before, window * factors, 0.0), 1, keep_dims=True)
    total = _finished(total, bias, channel, exists, has_bias, silu)
    tl.store(out + row * out_stride + channel, total.to(out.dtype.element_ty), exists)
    tl.debug_barrier()  # the state is read before it is shifted
    tl.store(place - 1, window.to(state.dtype.element_ty), exists & (tap > 0) & (tap <= before))


@replaces(definitions.causal_conv1d)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    initial_states: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    definitions.expect_convolution(x, weight, query_start_loc, initial_states, bias, activation)
    y, final = x.new_empty(x.shape), initial_states.new_empty(initial_states.shape)
    (tokens, channels), sequences = x.shape, initial_states.shape[0]
    if sequences and channels:
        tile, rows = Tile(TOKENS, power_of_two(channels, CHANNELS), 4), as_rows(x, channels)
        operands = (
            weight.contiguous(),
            x if bias is None else bias.contiguous(),
            query_start_loc.contiguous(),
        )
        constants = {
            "before": weight.shape[1] - 1,
            "has_bias": bias is not None,
            "silu": activation is not None,
        }
        programs = blocks_at_most(tokens, sequences, TOKENS) * triton.cdiv(channels, tile.columns)
        states = (initial_states.contiguous(), y, final)
        sizes = (sequences, channels, rows.stride(0))
        launch(causal_conv1d_kernel, programs, tile, rows, *operands, *states, *sizes, **constants)
    return y, final


@replaces(definitions.causal_conv1d_update)
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    slots: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    definitions.expect_step(x, conv_state, weight, slots, out, bias, activation)
    if not (x.numel() and entries_apart(conv_state) and entries_apart(out)):
        definitions.causal_conv1d_update.native(x, conv_state, weight, slots, out, bias, activation)
        return
    channels, width = weight.shape
    taps, rows = power_of_two(width), as_rows(x, channels)
    tile = Tile(max(1, 512 // taps), taps, 4)
    operands = (
        weight.contiguous(),
        x if bias is None else bias.contiguous(),
        slots.contiguous(),
        out,
    )
    sizes = (x.numel(), channels, rows.stride(0), conv_state.stride(0), out.stride(0))
    constants = {"before": width - 1, "has_bias": bias is not None, "silu": activation is not None}
    programs = triton.cdiv(x.numel(), tile.rows)
    launch(
        causal_conv1d_update_kernel,
        programs,
        tile,
        rows,
        conv_state,
        *operands,
        *sizes,
        **constants,
    )
