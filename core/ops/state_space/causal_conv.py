"""Causal depthwise convolutions over tokens, with the last inputs of a sequence as the state.

The source of the maths is arXiv:2312.00752.
"""

from __future__ import annotations

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_choice, expect_in_range, expect_integers, expect_same_device
from opgraft.ops.fakes import nothing
from opgraft.ops.precision import compute_dtype
from opgraft.ops.state_space.sequences import expect_sequences, expect_shape, places
from torch import Tensor
from torch.nn import functional as F

__all__ = ["causal_conv1d", "causal_conv1d_update"]

ACTIVATIONS = (None, "silu", "swish")


def _convolved(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    initial_states: Tensor,
    *others: object,
    **settings: object,
) -> tuple[Tensor, Tensor]:
    """Make two contiguous tensors, like ``x`` and like ``initial_states``, as a fake rule."""
    return x.new_empty(x.shape), initial_states.new_empty(initial_states.shape)


@register_functional("causal_conv1d", _convolved)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    initial_states: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each channel over the tokens of sequences (arXiv:2312.00752).

    The output is ``y[t] = act(bias + Σ over k of weight[:, k] · x[t - (width - 1) + k])``. Inputs
    before the first token of a sequence come from the initial state. A call may have whole prompts
    or parts of prompts. A part that starts from the final state of the part before gives the same
    results as the whole prompt. The computation is in float32, or float64 for float64 input.

    Args:
        x: ``[tokens, channels]``, the tokens of all sequences one after another.
        weight: ``[channels, width]``.
        query_start_loc: the bounds of sequences: integers ``[sequences + 1]``, ascending from 0 to
            ``tokens``.
        initial_states: the inputs before each sequence, oldest first: ``[sequences, channels,
            width - 1]``.
        bias: ``[channels]``.
        activation: ``"silu"``, also called ``"swish"``, or none.

    Returns:
        ``y``, like ``x``, and the final states, like ``initial_states``.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or
            ``query_start_loc`` does not ascend from 0 to the number of tokens.
    """
    expect_convolution(x, weight, query_start_loc, initial_states, bias, activation)
    width = weight.shape[1]
    before = width - 1

    sequence, position, lengths = places(x.shape[0], query_start_loc)
    numbers = torch.arange(len(lengths), device=x.device)

    # The initial state of sequence i lies behind i other states and the tokens of i sequences.
    starts = query_start_loc[:-1].long() + numbers * before
    ahead = starts[:, None] + torch.arange(before, device=x.device)
    rows = starts[sequence] + before + position
    line = _states_and_inputs(x, initial_states, ahead, rows)

    inputs = [line[rows - before + tap] for tap in range(width)]
    y = _weighted_sum(inputs, weight, bias, activation)

    # The last inputs begin as far behind the first ones as the sequence is long.
    last = ahead + lengths[:, None]
    final = line[last].mT.to(initial_states.dtype)
    # The clone has the layout that the fake rule promises.
    return y.to(x.dtype), final.clone(memory_format=torch.contiguous_format)


def _states_and_inputs(x: Tensor, initial_states: Tensor, ahead: Tensor, rows: Tensor) -> Tensor:
    """Return one row of inputs, ``[tokens + sequences · (width - 1), channels]``.

    Each sequence lies behind its initial state, so a tap needs no look at the bounds of sequences.

    Args:
        x: the tokens.
        initial_states: ``[sequences, channels, width - 1]``.
        ahead: the places of the initial states, ``[sequences, width - 1]``.
        rows: the places of the tokens.
    """
    sequences, channels, before = initial_states.shape
    dtype = compute_dtype(x.dtype)
    states = initial_states.mT.reshape(-1, channels).to(dtype)

    length = x.shape[0] + sequences * before
    line = x.new_zeros(length, channels, dtype=dtype)
    line = line.index_copy(0, ahead.flatten(), states)
    return line.index_copy(0, rows, x.to(dtype))


@register_functional("causal_conv1d_update", nothing, mutates=("conv_state", "out"))
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    slots: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Convolve one more token of each sequence, and shift it into the state (arXiv:2312.00752).

    Args:
        x: the tokens, ``[sequences, channels]``.
        conv_state: the last inputs by slot, oldest first: ``[slots, channels, width - 1]``; written
            to.
        weight: ``[channels, width]``.
        slots: the slot of each sequence, integers ``[sequences]``, all different.
        out: the output, like ``x``; written to.
        bias: ``[channels]``.
        activation: ``"silu"``, also called ``"swish"``, or none.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or a slot does not
            exist.
    """
    expect_step(x, conv_state, weight, slots, out, bias, activation)
    dtype = compute_dtype(x.dtype)

    earlier = conv_state[slots].to(dtype)
    newest = x[..., None].to(dtype)
    window = torch.cat([earlier, newest], -1)
    inputs = list(window.unbind(-1))

    out.copy_(_weighted_sum(inputs, weight, bias, activation))
    conv_state[slots] = window[..., 1:].to(conv_state.dtype)


def _weighted_sum(
    inputs: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return the activated sum of inputs ``[tokens, channels]`` times the columns of ``weight``.

    The oldest inputs come first.
    """
    # Prompts and steps add up in this one order.
    weight = weight.to(inputs[0].dtype)
    total = inputs[0] * weight[:, 0]
    later = zip(inputs[1:], weight.unbind(1)[1:], strict=True)
    for x, column in later:
        total = torch.addcmul(total, x, column)

    if bias is not None:
        total = total + bias.to(total.dtype)
    if activation is None:
        return total
    return F.silu(total)


def expect_convolution(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    initial_states: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> None:
    """Raise ``ValueError`` unless the arguments of ``causal_conv1d`` fit each other."""
    op = "causal_conv1d"
    expect_sequences(op, x, query_start_loc, initial_states)
    _expect_channels(op, x, weight, bias, activation)

    channels, width = weight.shape
    shape = (initial_states.shape[0], channels, width - 1)
    expect_shape(op, "initial_states", initial_states, shape, x)


def expect_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    slots: Tensor,
    out: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> None:
    """Raise ``ValueError`` unless the arguments of ``causal_conv1d_update`` fit each other."""
    op = "causal_conv1d_update"
    _expect_channels(op, x, weight, bias, activation)
    expect_slots(op, x, conv_state, slots)

    channels, width = weight.shape
    shape = (conv_state.shape[0], channels, width - 1)
    expect_shape(op, "conv_state", conv_state, shape, x)
    expect_shape(op, "out", out, tuple(x.shape), x)


def expect_slots(op: str, x: Tensor, state: Tensor, slots: Tensor) -> None:
    """Raise ``ValueError`` unless each row of ``x`` has a slot of ``state``."""
    expect_integers(op, "slots", slots)
    expect_same_device(op, "slots", slots, "x", x)
    if slots.shape != x.shape[:1]:
        raise ValueError(
            f"{op}: slots has shape {tuple(slots.shape)}, expected {tuple(x.shape[:1])}"
        )
    expect_in_range(op, "slots", slots, state.shape[0])


def _expect_channels(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> None:
    expect_choice(op, "activation", activation, ACTIVATIONS)
    if weight.dim() != 2 or not weight.shape[1]:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected [channels, width]"
        )

    channels = weight.shape[0]
    # A tensor without dimensions is refused by its shape.
    tokens = x.shape[0] if x.dim() else 0
    expect_shape(op, "x", x, (tokens, channels), x)
    expect_shape(op, "weight", weight, tuple(weight.shape), x)
    expect_shape(op, "bias", bias, (channels,), x)
