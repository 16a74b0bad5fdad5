"""The calls by which mixers of PLaMo 2 convolve and scan, in the code that its checkpoints bring (arXiv:2509.04897).

The order of arguments is that code's own: states come first, weights of convolutions have a dimension more, and the
scan is given the gate. A function here returns ``None`` for a call that its op was not made for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from opgraft.grafting.scan_calls import CHUNK, bounds, convolved_step, rows, scanned_step
from opgraft.grafting.scan_forms import Arguments, Form, Options, Random
from opgraft.ops import CausalConv1d, CausalConv1dUpdate, MambaChunkScan, SelectiveStateUpdate
from torch import Tensor


def _convolved(
    op: Any, conv_state: Tensor | None, weight: Tensor, x: Tensor, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    if seq_idx is not None:
        return None
    batch, channels, tokens = x.shape
    before = x.new_zeros(batch, channels, weight.shape[2] - 1) if conv_state is None else conv_state
    x = x.to(before.dtype)
    y, last = op(rows(x), weight[:, 0].to(x.dtype), bounds(x, batch, tokens), before)
    return y.view(batch, tokens, channels).mT, None if conv_state is None else last


def _convolved_step(
    op: Any,
    conv_state: Tensor,
    weight: Tensor,
    xBC: Tensor,  # noqa: N803  # the letters of the paper
) -> tuple[Tensor, Tensor] | None:
    y = convolved_step(
        op, xBC.to(conv_state.dtype), conv_state, weight[:, 0].to(conv_state.dtype), None, "silu"
    )
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
    """Scan from ``ssm_state``, which functions of some devices write to and others do not: ``writes`` says which."""
    if not dt_softplus or seq_idx is not None:
        return None
    batch, tokens, heads, size = x.shape
    before = (
        x.new_zeros(batch, heads, size, B.shape[-1], dtype=torch.float32)
        if ssm_state is None
        else ssm_state
    )
    by_token = (each.flatten(0, 1) for each in (B, C))
    where = bounds(x, batch, tokens)
    y, last = op(
        x.flatten(0, 1), dt.flatten(0, 1), A, *by_token, where, before, D, z.flatten(0, 1), dt_bias
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
    """Scan one token, of which ``dt``, ``A``, ``D`` and ``dt_bias`` have one number for each head."""
    size, states = x.shape[-1], B.shape[-1]
    step, weight, bias = (each[..., None].expand(*each.shape, size) for each in (dt, D, dt_bias))
    decay = A[:, None, None].expand(-1, size, states)
    y = scanned_step(op, ssm_state, x, step, decay, B, C, weight, bias, dt_softplus, z)
    return None if y is None else y[:, None]


def _for_convolution(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    state = random.tokens(batch, 6, 3) if options["state"] else None
    return [state, random.tokens(6, 1, 4), random.tokens(batch, tokens, 6).mT, None], {}


def _for_step_of_convolution(
    random: Random, options: Options, batch: int, tokens: int
) -> Arguments:
    return [random.tokens(batch, 6, 3), random.tokens(6, 1, 4), random.tokens(batch, 6, 1)], {}


HEADS, GROUPS, SIZE, STATES = 4, 2, 5, 3


def _for_scan(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x, z = (random.tokens(batch, tokens, HEADS, SIZE) for _ in range(2))
    b, c = (random.tokens(batch, tokens, GROUPS, STATES) for _ in range(2))
    args = [x, random.tokens(batch, tokens, HEADS), -random.weights(HEADS).exp(), b, c]
    weights = {
        "D": random.weights(HEADS),
        "z": z,
        "dt_bias": random.weights(HEADS),
        "dt_softplus": True,
    }
    state = random.weights(batch, HEADS, SIZE, STATES) if options["state"] else None
    final = {"return_final_states": options["final"], "seq_idx": None, "ssm_state": state}
    return args, {"chunk_size": 16, **weights, **final}


def _for_step(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x, z = (random.tokens(batch, HEADS, SIZE) for _ in range(2))
    b, c = (random.tokens(batch, GROUPS, STATES) for _ in range(2))
    args = [
        random.weights(batch, HEADS, SIZE, STATES),
        x,
        random.tokens(batch, HEADS),
        -random.weights(HEADS).exp(),
    ]
    weights = {
        "D": random.weights(HEADS),
        "z": z,
        "dt_bias": random.weights(HEADS),
        "dt_softplus": True,
    }
    return [*args, b, c], weights


def _silu(options: Options) -> dict[str, Any]:
    return {"activation": "silu"}


def _softplus(options: Options) -> dict[str, Any]:
    return {"dt_softplus": True}


def _chunks(options: Options) -> dict[str, Any]:
    return {"chunk_size": CHUNK, "dt_softplus": True}


FORMS = (
    Form(
        "causal_conv1d",
        "causal_conv1d",
        CausalConv1d,
        _silu,
        _convolved,
        _for_convolution,
        {"state": (False, True)},
        (),
    ),
    Form(
        "causal_conv1d_update",
        "conv1d_update",
        CausalConv1dUpdate,
        _silu,
        _convolved_step,
        _for_step_of_convolution,
        {},
        (),
    ),
    Form(
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
        Form(
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
