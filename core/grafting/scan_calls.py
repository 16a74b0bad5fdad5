"""Convolutions and scans of mixers, each as a call of an op with the same results and writes.

Names and order of the arguments are those of the packages ``causal-conv1d`` and ``mamba-ssm``. A
function of this module returns ``None`` if the op was not made for a call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from opgraft.grafting.scan_forms import Arguments, Options, Random, ScanForm
from opgraft.ops import (
    CausalConv1d,
    CausalConv1dUpdate,
    MambaChunkScan,
    SelectiveScan,
    SelectiveStateUpdate,
)
from opgraft.ops.state_space.causal_conv import ACTIVATIONS
from opgraft.ops.state_space.selective_scan import step_sizes
from torch import Tensor

CHUNK = 128
"""Tokens of a chunk: a native scan is faster with 128 than with 256."""

IMPLEMENTATIONS = frozenset(("use_mambapy", "use_associative_scan"))
"""Arguments for a choice among ways to compute the same result."""

_SEQUENCES = ("cu_seqlens", "seq_idx")


def _has_several_sequences(others: Mapping[str, Any]) -> bool:
    """Return True if a row holds several sequences.

    Functions of models refuse such rows, or keep the sequences apart in a way of their own.
    Functions ignore every other argument without a name of its own.
    """
    return any(others.get(name) is not None for name in _SEQUENCES)


def rows(x: Tensor) -> Tensor:
    """View ``[batch, channels, tokens]`` as ``[batch · tokens, channels]``."""
    return x.mT.reshape(-1, x.shape[1])


def bounds(x: Tensor, batch: int, tokens: int) -> Tensor:
    """Return the first row of each sequence, and the number of rows, on the device of ``x``."""
    return torch.arange(batch + 1, device=x.device) * tokens


def slots(x: Tensor) -> Tensor:
    """Return the slots of states in the order of the rows of ``x``."""
    return torch.arange(x.shape[0], device=x.device)


def _convolved(
    op: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    **others: Any,
) -> Tensor | None:
    if activation != op.activation or _has_several_sequences(others):
        return None
    batch, channels, tokens = hidden_states.shape
    # A call starts from an empty state, and nobody sees the last one.
    before = weight.shape[1] - 1
    states = hidden_states.new_zeros(batch, channels, before)
    where = bounds(hidden_states, batch, tokens)
    y, _ = op(rows(hidden_states), weight, where, states, bias)
    convolved: Tensor = y.view(batch, tokens, channels)
    return convolved.mT


def convolved_step(
    op: Any,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    **others: Any,
) -> Tensor | None:
    """Convolve one token. The state may have one input more than the convolution looks back to."""
    more = conv_state.shape[-1] - weight.shape[1] + 1
    if hidden_states.shape[-1] != 1 or more not in (0, 1):
        return None
    if activation != op.activation or _has_several_sequences(others):
        return None

    x = hidden_states[..., 0]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if more:
        # The op shifts the rest of the state, and the first input belongs to the function.
        conv_state[..., 0] = conv_state[..., 1]

    op(x, conv_state[..., more:], weight, slots(x), out, bias)
    return out[..., None]


def _scanned(
    op: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # the letters of the paper
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor] | None:
    if not delta_softplus or _has_several_sequences(others):
        return None

    batch, channels, tokens = hidden_states.shape
    x = rows(hidden_states)
    dtype = torch.promote_types(x.dtype, A.dtype)
    states = A.new_zeros(batch, channels, A.shape[1], dtype=dtype)
    where = bounds(x, batch, tokens)
    gate = None if z is None else rows(z)
    y, final = op(
        x,
        rows(dt),
        A,
        rows(B),
        rows(C),
        where,
        states,
        D,
        gate,
        delta_bias,
    )
    # The functions of models promote, and the op returns the dtype of its input.
    dtypes = [each.dtype for each in (hidden_states, D, z) if each is not None]
    promoted = functools.reduce(torch.promote_types, dtypes)
    y = y.to(promoted).view(batch, tokens, channels).mT
    return (y, final) if return_last_state else y


def scanned_step(
    op: Any,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """Scan one token, of channels ``[batch, channels]`` or heads ``[batch, heads, head_size]``."""
    if not dt_softplus or _has_several_sequences(others):
        return None

    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    where = slots(state)
    if hidden_states.dim() == 3:
        op(state, hidden_states, dt, A, B, C, where, out, D, z, dt_bias)
        return out

    # Channels are one head of the op.
    op(
        state[:, None],
        hidden_states[:, None],
        dt[:, None],
        A[None],
        B[:, None],
        C[:, None],
        where,
        out[:, None],
        None if D is None else D[None],
        None if z is None else z[:, None],
        None if dt_bias is None else dt_bias[None],
    )
    return out


def _scanned_chunks(
    op: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Scan in float32, the dtype for the norm that follows. The op has a chunk size of its own."""
    if _has_several_sequences(others):
        return None

    batch, tokens, heads, size = hidden_states.shape
    x = hidden_states.float().flatten(0, 1)
    steps = step_sizes(dt.float(), dt_bias, dt_softplus)
    # The op has no limits of its own.
    steps = steps.clamp(*dt_limit).flatten(0, 1)
    before = initial_states
    if before is None:
        before = x.new_zeros(batch, heads, size, B.shape[-1])

    where = bounds(x, batch, tokens)
    y, final = op(
        x,
        steps,
        A,
        B.flatten(0, 1),
        C.flatten(0, 1),
        where,
        before.float(),
        D,
    )
    y = y.view(hidden_states.shape)
    return (y, final) if return_final_states else y


CHANNELS, WIDTH, STATES = 6, 4, 3
HEADS, GROUPS, SIZE = 4, 2, 5
"""The sizes of trials."""


def _for_convolution(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x = random.tokens(batch, tokens, CHANNELS).mT
    weight = random.tokens(CHANNELS, WIDTH)
    bias = random.tokens(CHANNELS)
    return [x, weight], {"bias": bias, "activation": options["activation"]}


def _for_step_of_convolution(
    random: Random, options: Options, batch: int, tokens: int
) -> Arguments:
    (_, weight), kwargs = _for_convolution(random, options, batch, 1)
    x = random.tokens(batch, CHANNELS, 1)
    state = random.tokens(batch, CHANNELS, options["state"])
    return [x, state, weight], kwargs


def _for_scan(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x = random.tokens(batch, tokens, CHANNELS).mT
    dt = random.tokens(batch, tokens, CHANNELS).mT
    z = random.tokens(batch, tokens, CHANNELS).mT
    b = random.tokens(batch, tokens, STATES).mT
    c = random.tokens(batch, tokens, STATES).mT
    delta_bias = random.weights(CHANNELS)
    decay = -random.weights(CHANNELS, STATES).exp()
    weight = random.weights(CHANNELS)
    return [x, dt, decay, b, c], {
        "D": weight,
        "z": z,
        "delta_bias": delta_bias,
        "delta_softplus": True,
        "return_last_state": True,
    }


def _for_step(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x = random.tokens(batch, CHANNELS)
    dt = random.tokens(batch, CHANNELS)
    z = random.tokens(batch, CHANNELS)
    b = random.tokens(batch, STATES)
    c = random.tokens(batch, STATES)
    state = random.weights(batch, CHANNELS, STATES)
    decay = -random.weights(CHANNELS, STATES).exp()
    weight = random.weights(CHANNELS)
    bias = random.weights(CHANNELS)
    settings = {"D": weight, "z": z, "dt_bias": bias, "dt_softplus": True}
    return [state, x, dt, decay, b, c], settings


def _for_step_of_heads(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    """Draw ``dt``, ``A``, ``D`` and the bias as one number for each head."""
    x = random.tokens(batch, HEADS, SIZE)
    z = random.tokens(batch, HEADS, SIZE)
    dt = random.tokens(batch, HEADS, 1).expand(-1, -1, SIZE)
    b = random.tokens(batch, GROUPS, STATES)
    c = random.tokens(batch, GROUPS, STATES)
    weight = random.weights(HEADS, 1).expand(-1, SIZE)
    bias = random.weights(HEADS, 1).expand(-1, SIZE)
    rates = random.weights(HEADS, 1, 1).exp()
    decay = -rates.expand(-1, SIZE, STATES)
    state = random.weights(batch, HEADS, SIZE, STATES)
    settings = {"D": weight, "dt_bias": bias, "dt_softplus": True, "z": z}
    return [state, x, dt, decay, b, c], settings


def _for_scan_of_chunks(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x = random.tokens(batch, tokens, HEADS, SIZE)
    dt = random.tokens(batch, tokens, HEADS)
    b = random.tokens(batch, tokens, GROUPS, STATES)
    c = random.tokens(batch, tokens, GROUPS, STATES)
    decay = -random.weights(HEADS).exp()
    weight = random.weights(HEADS)
    bias = random.weights(HEADS)
    return [x, dt, decay, b, c], {
        "chunk_size": 16,
        "D": weight,
        "dt_bias": bias,
        "dt_softplus": True,
        "dt_limit": (0.1, 0.7),
        "initial_states": random.weights(batch, HEADS, SIZE, STATES),
        "return_final_states": True,
    }


def _activation(options: Options) -> dict[str, Any]:
    activation = options.get("activation")
    return {"activation": activation if activation in ACTIVATIONS else None}


def _softplus(options: Options) -> dict[str, Any]:
    return {"dt_softplus": True}


_CONVOLUTION = {"activation": (None, "silu")}

FORMS = (
    ScanForm(
        "causal_conv1d",
        "conv1d_fn",
        CausalConv1d,
        _activation,
        _convolved,
        _for_convolution,
        _CONVOLUTION,
        ("bias",),
    ),
    ScanForm(
        "causal_conv1d_update",
        "conv1d_update",
        CausalConv1dUpdate,
        _activation,
        convolved_step,
        _for_step_of_convolution,
        {**_CONVOLUTION, "state": (WIDTH - 1, WIDTH)},
        ("bias",),
    ),
    ScanForm(
        "selective_scan",
        "selective_scan",
        SelectiveScan,
        _softplus,
        _scanned,
        _for_scan,
        {},
        ("D", "z", "delta_bias", "return_last_state"),
    ),
    *(
        ScanForm(
            "selective_state_update",
            "state_update",
            SelectiveStateUpdate,
            _softplus,
            scanned_step,
            arguments,
            {},
            ("D", "dt_bias", "z"),
        )
        for arguments in (_for_step, _for_step_of_heads)
    ),
    ScanForm(
        "mamba_chunk_scan",
        "chunk_scan",
        MambaChunkScan,
        lambda options: {"chunk_size": CHUNK},
        _scanned_chunks,
        _for_scan_of_chunks,
        {},
        ("D", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states"),
        native_gains=True,
    ),
)
