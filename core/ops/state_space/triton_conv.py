"""Triton kernels for causal convolutions. ``causal_conv`` has the maths and arguments.

A program computes some tokens and channels of one sequence. A program reads each input once per
tap, mostly from the cache, so no token waits for another. Inputs before a sequence come from the
state.
"""

# Annotations cannot tell the types of Triton's language, so mypy leaves jitted functions alone.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from opgraft.ops.activation.triton import activated, load_float32, rows_of
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

TOKENS = 16
"""Tokens that a program computes."""

CHANNELS = 128
"""Channels that a program computes, at most."""


@triton.jit
def _input(line, state, token, start, channels_exist, stride, before: tl.constexpr):
    """Load inputs of tokens and channels; those before the start of a sequence from the state."""
    ahead = token < start
    behind = token >= start
    given = load_float32(line + token * stride, channels_exist & behind)
    stored = load_float32(state + token - start + before, channels_exist & ahead)
    return tl.where(ahead, stored, given)


@triton.jit
def _finished(total, bias, channel, exists, has_bias: tl.constexpr, silu: tl.constexpr):
    """Add the bias and apply the activation, if given."""
    if has_bias:
        total += load_float32(bias + channel, exists)
    if silu:
        total = activated(total, "silu", 0.0)
    return total


# Every batch has another number of sequences, so the number must not choose a compiled variant.
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
    """Convolve tokens and channels of one sequence, and store the last inputs of the sequence."""
    tiles = tl.cdiv(channels, tile_columns)
    block = tl.program_id(0) // tiles
    sequence, first, end = block_of_segment(block, starts, sequences, tile_rows)
    start = tl.load(starts + sequence)

    first_channel = tl.program_id(0) % tiles * tile_columns
    channel = first_channel + tl.arange(0, tile_columns)[None, :]
    token = (first + tl.arange(0, tile_rows)[:, None]).to(tl.int64)
    exists = channel < channels
    inside = exists & (token < end)

    # A state has the channels one after another, each with its last inputs.
    state = (sequence.to(tl.int64) * channels + channel) * before
    initial += state
    final += state
    inputs = x + channel
    taps = weight + channel * (before + 1)

    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tap in tl.static_range(before + 1):
        factor = load_float32(taps + tap, exists)
        earlier = token - before + tap
        total += factor * _input(inputs, initial, earlier, start, inside, stride, before)

    total = _finished(total, bias, channel, exists, has_bias, silu)
    tl.store(y + token * channels + channel, total, inside)

    # Every sequence has a first block, even without tokens: that program stores the last inputs.
    if first == start:
        _store_last_inputs(inputs, initial, final, start, end, exists, stride, before)


@triton.jit
def _store_last_inputs(inputs, initial, final, start, end, exists, stride, before: tl.constexpr):
    """Store the inputs of the last ``before`` tokens, some of which the initial state may have."""
    last = tl.full((1, 1), 0, tl.int64) + end - before
    for place in tl.static_range(before):
        t = _input(inputs, initial, last + place, start, exists, stride, before)
        tl.store(final + place, t, exists)


# As above: the number of elements changes with the number of sequences.
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
    """Convolve elements, each a channel of a token, by windows ``[elements, taps]`` of inputs."""
    element = rows_of(tl.program_id(0), tile_rows)
    tap = tl.arange(0, tile_columns)[None, :]
    exists = element < elements
    is_tap = tap <= before

    row = element // channels
    channel = element % channels
    slot = tl.load(slots + row, exists, 0).to(tl.int64)
    place = state + slot * state_stride + channel * before + tap

    newest = load_float32(x + row * stride + channel, exists)
    earlier = load_float32(place, exists & (tap < before))
    window = tl.where(tap == before, newest, earlier)

    factors = load_float32(weight + channel * (before + 1) + tap, exists & is_tap)
    products = tl.where(is_tap, window * factors, 0.0)
    total = tl.sum(products, 1, keep_dims=True)
    total = _finished(total, bias, channel, exists, has_bias, silu)
    tl.store(out + row * out_stride + channel, total, exists)

    # A thread shifts elements that other threads read: every thread must have read the state.
    tl.debug_barrier()
    tl.store(place - 1, window, exists & (tap > 0) & is_tap)


@replaces(definitions.causal_conv1d)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    initial_states: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    # The checks of the definition, so errors are the same on every device.
    definitions.expect_convolution(x, weight, query_start_loc, initial_states, bias, activation)
    y = x.new_empty(x.shape)
    final = initial_states.new_empty(initial_states.shape)
    tokens, channels = x.shape
    sequences = initial_states.shape[0]

    if not (sequences and channels):
        return y, final

    tile = Tile(TOKENS, power_of_two(channels, CHANNELS), 4)
    rows = as_rows(x, channels)
    blocks = blocks_at_most(tokens, sequences, TOKENS)
    programs = blocks * triton.cdiv(channels, tile.columns)

    weights = (weight.contiguous(), x if bias is None else bias.contiguous())
    states = (query_start_loc.contiguous(), initial_states.contiguous(), y, final)

    launch(
        causal_conv1d_kernel,
        programs,
        tile,
        rows,
        *weights,
        *states,
        sequences,
        channels,
        rows.stride(0),
        before=weight.shape[1] - 1,
        has_bias=bias is not None,
        silu=activation is not None,
    )
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
    # The window of a channel is one row of the tile.
    taps = power_of_two(width)

    rows = as_rows(x, channels)
    tile = Tile(max(1, 512 // taps), taps, 4)
    programs = triton.cdiv(x.numel(), tile.rows)

    weights = (weight.contiguous(), x if bias is None else bias.contiguous())
    sizes = (x.numel(), channels, rows.stride(0), conv_state.stride(0), out.stride(0))

    launch(
        causal_conv1d_update_kernel,
        programs,
        tile,
        rows,
        conv_state,
        *weights,
        slots.contiguous(),
        out,
        *sizes,
        before=width - 1,
        has_bias=bias is not None,
        silu=activation is not None,
    )
