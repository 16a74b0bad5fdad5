"""Sequences that follow one another without padding, by arithmetic on indices: no length is read on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from opgraft.ops.checks import (
    expect_ascending,
    expect_floating,
    expect_integers,
    expect_same_device,
)
from torch import Tensor


class Places(NamedTuple):
    """The places of tokens in their sequences.

    Attributes:
        sequence: of each token, the number of its sequence, int64 ``[tokens]``.
        position: of each token, its place in it, int64 ``[tokens]``.
        lengths: tokens of each sequence, int64 ``[sequences]``.
    """

    sequence: Tensor
    position: Tensor
    lengths: Tensor


def places(tokens: int, query_start_loc: Tensor) -> Places:
    """Return the places of so many tokens, of which ``query_start_loc`` says where sequences begin and end."""
    bounds = query_start_loc.long()
    numbers = torch.arange(tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds, numbers, right=True) - 1
    return Places(sequence, numbers - bounds[sequence], bounds.diff())


def expect_sequences(op: str, x: Tensor, query_start_loc: Tensor, initial_states: Tensor) -> None:
    """Raise ``ValueError`` unless the bounds are those of the tokens of ``x``, with a state for each sequence."""
    expect_floating(op, "x", x)
    expect_floating(op, "initial_states", initial_states)
    expect_integers(op, "query_start_loc", query_start_loc)
    expect_same_device(op, "query_start_loc", query_start_loc, "x", x)
    expect_same_device(op, "initial_states", initial_states, "x", x)
    expect_ascending(op, "query_start_loc", query_start_loc, x.shape[0])
    if initial_states.shape[0] != query_start_loc.shape[0] - 1:
        raise ValueError(
            f"{op}: initial_states are of {initial_states.shape[0]} sequences, expected "
            f"{query_start_loc.shape[0] - 1} as query_start_loc has"
        )


def expect_shape(
    op: str, argument: str, x: Tensor | None, shape: tuple[int, ...], device_of: Tensor
) -> None:
    """Raise ``ValueError`` unless a tensor that is given has that shape, a floating-point dtype and the device."""
    if x is None:
        return
    expect_floating(op, argument, x)
    expect_same_device(op, argument, x, "x", device_of)
    if x.shape != shape:
        raise ValueError(f"{op}: {argument} has shape {tuple(x.shape)}, expected {tuple(shape)}")
