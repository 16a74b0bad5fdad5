"""Causal depthwise convolutions over tokens, which remember the last inputs of a sequence (arXiv:2312.00752)."""

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
    """Make two contiguous tensors, like ``x`` and like ``initial_states``; a fake rule."""
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
    """Convolve each channel over the tokens of sequences so far: prompts, or parts of them (arXiv:2312.00752).

    ``y[t] = act(bias + Σ over k of weight[:, k] · x[t - (width - 1) + k])``, where inputs before the first token of a
    sequence are its initial state. Parts of a prompt, each from the state that the former ended in, give what the whole
    gives. It is computed in float32 (float64 for float64 input).

    Args:
        x: ``[tokens, channels]``, the tokens of all sequences one after another.
        weight: ``[channels, width]``.
        query_start_loc: where sequences begin and end: integers ``[sequences + 1]``, ascending from 0 to ``tokens``.
        initial_states: the last inputs before, oldest first: ``[sequences, channels, width - 1]``.
        bias: ``[channels]``.
        activation: ``"silu"``, also called ``"swish"``, or none.

    Returns:
        ``y``, like ``x``, and the final states, like ``initial_states``.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or ``query_start_loc`` does not ascend
            from 0 to the number of tokens.
    """
    expect_convolution(x, weight, query_start_loc, initial_states, bias, activation)
    channels, width = weight.shape
    before, dtype = width - 1, compute_dtype(x.dtype)
    sequence, position, lengths = places(x.shape[0], query_start_loc)
    # Each sequence behind its state, all of them in one row: what is read across their borders is left out again.
    starts = query_start_loc[:-1].long() + torch.arange(len(lengths), device=x.device) * before
    rows = starts[sequence] + before + position
    ahead = torch.arange(before, device=x.device)
    line = x.new_zeros(x.shape[0] + len(lengths) * before, channels, dtype=dtype)
    line = line.index_copy(
        0, (starts[:, None] + ahead).flatten(), initial_states.mT.reshape(-1, channels).to(dtype)
    )
    line = line.index_copy(0, rows, x.to(dtype))
    y = _weighted([line[rows - before + k] for k in range(width)], weight, bias, activation)
    final = line[(starts + lengths)[:, None] + ahead].mT
    return y.to(x.dtype), final.to(initial_states.dtype).clone(
        memory_format=torch.contiguous_format
    )


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
    """Convolve one more token of each of some sequences, and shift it into their states (arXiv:2312.00752).

    Args:
        x: the tokens, ``[sequences, channels]``.
        conv_state: the last inputs by slot, oldest first: ``[slots, channels, width - 1]``; written to.
        weight: ``[channels, width]``.
        slots: of each sequence, integers ``[sequences]``, no two the same.
        out: where the result of ``causal_conv1d`` goes, like ``x``.
        bias: ``[channels]``.
        activation: ``"silu"``, also called ``"swish"``, or none.

    Raises:
        ValueError: a shape, a dtype, a device or the activation does not fit, or a slot is none.
    """
    expect_step(x, conv_state, weight, slots, out, bias, activation)
    dtype = compute_dtype(x.dtype)
    window = torch.cat([conv_state[slots].to(dtype), x[..., None].to(dtype)], -1)
    out.copy_(_weighted(list(window.unbind(-1)), weight, bias, activation))
    conv_state[slots] = window[..., 1:].to(conv_state.dtype)


def _weighted(
    inputs: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Add up inputs ``[tokens, channels]``, the oldest first, by the columns of ``weight``."""
    weight = weight.to(inputs[0].dtype)
    total = inputs[0] * weight[:, 0]
    for x, column in zip(inputs[1:], weight.unbind(1)[1:], strict=True):
        total = torch.addcmul(total, x, column)
    if bias is not None:
        total = total + bias.to(total.dtype)
    return total if activation is None else F.silu(total)


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
    expect_shape(
        op, "initial_states", initial_states, (initial_states.shape[0], channels, width - 1), x
    )


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
    expect_shape(
        op, "conv_state", conv_state, (conv_state.shape[0], weight.shape[0], weight.shape[1] - 1), x
    )
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
    expect_shape(op, "x", x, (x.shape[0] if x.dim() else 0, weight.shape[0]), x)
    expect_shape(op, "weight", weight, tuple(weight.shape), x)
    expect_shape(op, "bias", bias, (weight.shape[0],), x)
