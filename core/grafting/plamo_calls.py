"""Convolutions and scans of PLaMo 2, as the code of the checkpoints calls them (arXiv:2509.04897).

The order of arguments differs from other models: states come first, weights of convolutions have
one dimension more, and the scan receives the gate. A function of this module returns ``None`` if
the op was not made for a call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from opgraft.grafting.scan_calls import (
    CHANNELS,
    CHUNK,
    GROUPS,
    HEADS,
    SIZE,
    STATES,
    WIDTH,
    bounds,
    convolved_step,
    rows,
    scanned_step,
)
from opgraft.grafting.scan_forms import Arguments, Options, Random, ScanForm
from opgraft.ops import CausalConv1d, CausalConv1dUpdate, MambaChunkScan, SelectiveStateUpdate
from torch import Tensor


def _convolved(
    op: Any, conv_state: Tensor | None, weight: Tensor, x: Tensor, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    if seq_idx is not None:
        return None

    batch, channels, tokens = x.shape
    before = conv_state
    if before is None:
        before = x.new_zeros(batch, channels, weight.shape[2] - 1)

    # The code of the checkpoints computes in the dtype of the state.
    x = x.to(before.dtype)
    y, last = op(rows(x), weight[:, 0].to(x.dtype), bounds(x, batch, tokens), before)
    y = y.view(batch, tokens, channels).mT
    return y, None if conv_state is None else last


def _convolved_step(
    op: Any,
    conv_state: Tensor,
    weight: Tensor,
    xBC: Tensor,  # noqa: N803  # the letters of the paper
) -> tuple[Tensor, Tensor] | None:
    dtype = conv_state.dtype
    y = convolved_step(op, xBC.to(dtype), conv_state, weight[:, 0].to(dtype), None, "silu")
    return None if y is None else (y, conv_state)


def _scanned(
    op: Any,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor,  # noqa: N803
    z: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    return_final_states: bool,
    seq_idx: Tensor | None,
    ssm_state: Tensor | None,
    writes: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Scan from ``ssm_state``; with ``writes``, the function writes the last states there.

    The functions for some devices write, and the functions for others do not.
    """
    if not dt_softplus or seq_idx is not None:
        return None

    batch, tokens, heads, size = x.shape
    before = ssm_state
    if before is None:
        before = x.new_zeros(batch, heads, size, B.shape[-1], dtype=torch.float32)

    y, last = op(
        x.flatten(0, 1),
        dt.flatten(0, 1),
        A,
        B.flatten(0, 1),
        C.flatten(0, 1),
        bounds(x, batch, tokens),
        before,
        D,
        z.flatten(0, 1),
        dt_bias,
    )
    if writes and ssm_state is not None:
        last = ssm_state.copy_(last)

    y = y.view(x.shape)
    return (y, last) if return_final_states else y


def _scanned_step(
    op: Any,
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    z: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
) -> Tensor | None:
    """Scan one token; ``dt``, ``A``, ``D`` and ``dt_bias`` have one number for each head."""
    size = x.shape[-1]
    y = scanned_step(
        op,
        ssm_state,
        x,
        _for_each_element(dt, size),
        _for_each_element(_for_each_element(A, size), B.shape[-1]),
        B,
        C,
        _for_each_element(D, size),
        _for_each_element(dt_bias, size),
        dt_softplus,
        z,
    )
    return None if y is None else y[:, None]


def _for_each_element(numbers: Tensor, size: int) -> Tensor:
    """Repeat the number of a head for each element of the head, without a copy."""
    return numbers[..., None].expand(*numbers.shape, size)


def _for_convolution(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    state = random.tokens(batch, CHANNELS, WIDTH - 1) if options["state"] else None
    weight = random.tokens(CHANNELS, 1, WIDTH)
    x = random.tokens(batch, tokens, CHANNELS).mT
    return [state, weight, x, None], {}


def _for_step_of_convolution(
    random: Random, options: Options, batch: int, tokens: int
) -> Arguments:
    state = random.tokens(batch, CHANNELS, WIDTH - 1)
    weight = random.tokens(CHANNELS, 1, WIDTH)
    return [state, weight, random.tokens(batch, CHANNELS, 1)], {}


def _weights(random: Random, z: Tensor) -> dict[str, Any]:
    bias = random.weights(HEADS)
    return {"D": random.weights(HEADS), "z": z, "dt_bias": bias, "dt_softplus": True}


def _for_scan(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x = random.tokens(batch, tokens, HEADS, SIZE)
    z = random.tokens(batch, tokens, HEADS, SIZE)
    dt = random.tokens(batch, tokens, HEADS)
    b = random.tokens(batch, tokens, GROUPS, STATES)
    c = random.tokens(batch, tokens, GROUPS, STATES)
    decay = -random.weights(HEADS).exp()
    state = random.weights(batch, HEADS, SIZE, STATES) if options["state"] else None
    return [x, dt, decay, b, c], {
        "chunk_size": 16,
        **_weights(random, z),
        "return_final_states": options["final"],
        "seq_idx": None,
        "ssm_state": state,
    }


def _for_step(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    state = random.weights(batch, HEADS, SIZE, STATES)
    x = random.tokens(batch, HEADS, SIZE)
    z = random.tokens(batch, HEADS, SIZE)
    dt = random.tokens(batch, HEADS)
    b = random.tokens(batch, GROUPS, STATES)
    c = random.tokens(batch, GROUPS, STATES)
    decay = -random.weights(HEADS).exp()
    return [state, x, dt, decay, b, c], _weights(random, z)


def _silu(options: Options) -> dict[str, Any]:
    return {"activation": "silu"}


def _softplus(options: Options) -> dict[str, Any]:
    return {"dt_softplus": True}


def _chunks(options: Options) -> dict[str, Any]:
    return {"chunk_size": CHUNK, "dt_softplus": True}


FORMS = (
    ScanForm(
        "causal_conv1d",
        "causal_conv1d",
        CausalConv1d,
        _silu,
        _convolved,
        _for_convolution,
        {"state": (False, True)},
        (),
    ),
    ScanForm(
        "causal_conv1d_update",
        "conv1d_update",
        CausalConv1dUpdate,
        _silu,
        _convolved_step,
        _for_step_of_convolution,
        {},
        (),
    ),
    ScanForm(
        "selective_state_update",
        "update_state",
        SelectiveStateUpdate,
        _softplus,
        _scanned_step,
        _for_step,
        {},
        (),
    ),
    *(
        ScanForm(
            "mamba_chunk_scan",
            "chunk_scan",
            MambaChunkScan,
            _chunks,
            partial(_scanned, writes=writes),
            _for_scan,
            {"state": (False, True), "final": (False, True)},
            (),
            native_gains=True,
        )
        for writes in (True, False)
    ),
)
