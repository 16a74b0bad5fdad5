"""Sequences without padding, one after another.

Arithmetic on indices finds every place, so the host never waits for a length.
"""

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


class TokenPlaces(NamedTuple):
    """The places of tokens in their sequences.

    Attributes:
        sequence: the number of each token's sequence, int64 ``[tokens]``.
        position: the place of each token in the sequence, int64 ``[tokens]``.
        lengths: tokens of each sequence, int64 ``[sequences]``.
    """

    sequence: Tensor
    position: Tensor
    lengths: Tensor


def places(tokens: int, query_start_loc: Tensor) -> TokenPlaces:
    """Return the places of so many tokens, in sequences with the bounds ``query_start_loc``."""
    bounds = query_start_loc.long()
    numbers = torch.arange(tokens, device=bounds.device)
    # To the right: an empty sequence has the same bound as the next one, and no token.
    sequence = torch.searchsorted(bounds, numbers, right=True) - 1
    return TokenPlaces(sequence, numbers - bounds[sequence], bounds.diff())


def expect_sequences(op: str, x: Tensor, query_start_loc: Tensor, initial_states: Tensor) -> None:
    """Raise ``ValueError`` unless the bounds fit the tokens of ``x`` and the number of states."""
    expect_floating(op, "x", x)
    expect_floating(op, "initial_states", initial_states)
    expect_integers(op, "query_start_loc", query_start_loc)
    expect_same_device(op, "query_start_loc", query_start_loc, "x", x)
    expect_same_device(op, "initial_states", initial_states, "x", x)
    expect_ascending(op, "query_start_loc", query_start_loc, x.shape[0])

    sequences = query_start_loc.shape[0] - 1
    if initial_states.shape[0] != sequences:
        raise ValueError(
            f"{op}: initial_states are of {initial_states.shape[0]} sequences, expected "
            f"{sequences} as query_start_loc has"
        )


def expect_shape(
    op: str, argument: str, x: Tensor | None, shape: tuple[int, ...], device_of: Tensor
) -> None:
    """Raise ``ValueError`` unless a tensor has this shape, a floating-point dtype and the device.

    None passes: the argument was not given.
    """
    if x is None:
        return
    expect_floating(op, argument, x)
    expect_same_device(op, argument, x, "x", device_of)
    if x.shape != shape:
        raise ValueError(f"{op}: {argument} has shape {tuple(x.shape)}, expected {tuple(shape)}")
