"""Rows of the ops' benchmark: state spaces against the functions that transformers' Mamba runs without kernels.

Sizes are those of Mamba-130m. The copies move as many bytes as the kernels have to, each tensor once; so their time is
the roofline, of which the rows tell the share that is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from opgraft import functional
from timing import Row, ratio
from torch import Tensor

CHANNELS, STATE, WIDTH = 1536, 16, 4
TOKENS = 2048
SEQUENCES = (1, 16)
DTYPES = (torch.float32, torch.bfloat16)
SCAN_LIMIT, STEP_LIMIT = 0.05, 0.3
ROUNDS = 7


def rows() -> Iterator[Row]:
    """Measure the scan and the convolution of a prompt, and the steps of some sequences."""
    from transformers.models.mamba import modeling_mamba as mamba  # only this needs it

    decay, weight, bias = (
        -torch.rand(CHANNELS, STATE).exp(),
        torch.randn(CHANNELS),
        torch.randn(CHANNELS),
    )
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        x, dt, gate, taps, b, c = prompt(dtype)
        bounds = torch.tensor([0, TOKENS])
        state = torch.zeros(1, CHANNELS, STATE)
        ours = partial(
            functional.selective_scan, x, dt, decay, b, c, bounds, state, weight, gate, bias, True
        )
        columns = (each.T[None] for each in (x, dt))
        given = (*columns, decay, b.T[None], c.T[None], weight, gate.T[None], bias, True, True)
        theirs = partial(mamba.mamba_selective_scan, *given)
        yield from against(
            f"selective scan of {TOKENS} {name}",
            ours,
            theirs,
            SCAN_LIMIT,
            (x, x, dt, gate, b, c),
            1,
        )
        before, taps_bias = torch.zeros(1, CHANNELS, WIDTH - 1, dtype=dtype), bias.to(dtype)
        ours = partial(functional.causal_conv1d, x, taps, bounds, before, taps_bias, "silu")
        theirs = partial(mamba.causal_conv1d_fn, x.T[None], taps, taps_bias, "silu")
        yield from against(f"convolution of {TOKENS} {name}", ours, theirs, None, (x, x), 10)
        for count in SEQUENCES:
            yield from steps(mamba, dtype, count, (decay, weight, bias))


def prompt(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Draw the tokens of a prompt, their step sizes and gates, taps, and B and C."""
    shapes = ((TOKENS, CHANNELS),) * 3 + ((CHANNELS, WIDTH),) + ((TOKENS, STATE),) * 2
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def steps(
    mamba: Any, dtype: torch.dtype, count: int, weights: tuple[Tensor, Tensor, Tensor]
) -> Iterator[Row]:
    """Measure a token more of each of some sequences, each with a state among those of as many more."""
    decay, weight, bias = weights
    name = f"{count} x {str(dtype).removeprefix('torch.')}"
    x, dt, gate = (torch.randn(count, CHANNELS).to(dtype) for _ in range(3))
    b, c, out = (
        torch.randn(count, STATE).to(dtype),
        torch.randn(count, STATE).to(dtype),
        torch.empty_like(x),
    )
    states, slots = torch.zeros(2 * count, 1, CHANNELS, STATE), torch.randperm(2 * count)[:count]
    heads = [each[:, None] for each in (x, dt, b, c, out, gate)]
    given: Any = (
        states,
        *heads[:2],
        decay[None],
        *heads[2:4],
        slots,
        heads[4],
        weight[None],
        heads[5],
        bias[None],
        True,
    )
    ours = partial(functional.selective_state_update, *given)
    own = torch.zeros(count, CHANNELS, STATE)
    theirs = partial(
        mamba.mamba_selective_state_update, own, x, dt, decay, b, c, weight, bias, True, gate
    )
    yield from against(
        f"update of {name}", ours, theirs, STEP_LIMIT, (own, own, x, x, dt, gate, decay), 200
    )
    taps, taps_bias = torch.randn(CHANNELS, WIDTH).to(dtype), bias.to(dtype)
    inputs = torch.zeros(2 * count, CHANNELS, WIDTH - 1, dtype=dtype)
    ours = partial(functional.causal_conv1d_update, x, inputs, taps, slots, out, taps_bias, "silu")
    theirs = partial(
        mamba.causal_conv1d_update, x[..., None], inputs[:count].clone(), taps, taps_bias, "silu"
    )
    moved = (inputs[:count], inputs[:count], taps, x, x)
    yield from against(f"convolution of a step of {name}", ours, theirs, None, moved, 200)


def against(
    label: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    limit: float | None,
    moved: tuple[Tensor, ...],
    number: int,
) -> Iterator[Row]:
    """Measure over what transformers runs, and over a copy of what has to be moved."""
    yield ratio(f"{label} / transformers", limit, ours, theirs, number=number, rounds=ROUNDS)
    count = sum(each.element_size() * prod(each.shape) for each in moved) // 2
    source = torch.ones(count, dtype=torch.uint8)
    copy = partial(torch.empty_like(source).copy_, source)
    row = ratio(
        f"{label} / copy of its bytes", None, ours, copy, number=max(number, 10), rounds=ROUNDS
    )
    yield replace(row, detail=f"{row.detail}; {1 / row.measured:.0%} of the speed of a copy")
