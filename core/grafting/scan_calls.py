"""The calls by which mixers convolve and scan, each as a call of an op: the same arguments, results and writes.

The names and orders of arguments are those that the packages ``causal-conv1d`` and ``mamba-ssm`` have, which models
follow. A function here returns ``None`` for a call that its op was not made for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from opgraft.grafting.scan_forms import Arguments, Form, Options, Random
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
"""Tokens of a chunk, which a native scan takes 128 of sooner than 256; the result is the same for any number."""

IMPLEMENTATIONS = frozenset(("use_mambapy", "use_associative_scan"))
"""Arguments that choose among ways to compute the same."""

_PACKED = ("cu_seqlens", "seq_idx")


def _is_packed(others: Mapping[str, Any]) -> bool:
    """Tell whether rows hold several sequences, which functions of models refuse, or keep apart in a way of their own.

    What else callers pass on, functions without an argument of that name do not see.
    """
    return any(others.get(name) is not None for name in _PACKED)


def rows(x: Tensor) -> Tensor:
    """View ``[batch, channels, tokens]`` as ``[batch · tokens, channels]``."""
    return x.mT.reshape(-1, x.shape[1])


def bounds(x: Tensor, batch: int, tokens: int) -> Tensor:
    """Return where such rows begin and end, on the device of ``x``."""
    return torch.arange(batch + 1, device=x.device) * tokens


def slots(x: Tensor) -> Tensor:
    """Return the slots of states that lie as the rows of ``x`` do."""
    return torch.arange(x.shape[0], device=x.device)


def _convolved(
    op: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    **others: Any,
) -> Tensor | None:
    if activation != op.activation or _is_packed(others):
        return None
    batch, channels, tokens = hidden_states.shape
    states = hidden_states.new_zeros(batch, channels, weight.shape[1] - 1)
    y, _ = op(rows(hidden_states), weight, bounds(hidden_states, batch, tokens), states, bias)
    return y.view(batch, tokens, channels).mT  # type: ignore[no-any-return]


def convolved_step(
    op: Any,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    **others: Any,
) -> Tensor | None:
    """Convolve one token; the state may have one input more than the convolution looks back to."""
    more = conv_state.shape[-1] - weight.shape[1] + 1
    if (
        hidden_states.shape[-1] != 1
        or more not in (0, 1)
        or activation != op.activation
        or _is_packed(others)
    ):
        return None
    x = hidden_states[..., 0]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if more:
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
    if not delta_softplus or _is_packed(others):
        return None
    batch, channels, tokens = hidden_states.shape
    x = rows(hidden_states)
    states = A.new_zeros(batch, channels, A.shape[1], dtype=torch.promote_types(x.dtype, A.dtype))
    where, gate = bounds(x, batch, tokens), None if z is None else rows(z)
    y, final = op(x, rows(dt), A, rows(B), rows(C), where, states, D, gate, delta_bias)
    dtypes = [each.dtype for each in (hidden_states, D, z) if each is not None]
    y = y.to(functools.reduce(torch.promote_types, dtypes)).view(batch, tokens, channels).mT
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
    """Scan one token, of channels ``[batch, channels]`` or of heads ``[batch, heads, head_size]``."""
    if not dt_softplus or _is_packed(others):
        return None
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    by_token, by_head = (state, hidden_states, dt), (D, z, dt_bias)
    if hidden_states.dim() == 3:
        op(*by_token, A, B, C, slots(state), out, *by_head)
        return out
    one_head = (each[:, None] for each in by_token)
    weight, bias = (None if each is None else each[None] for each in (D, dt_bias))
    gate = None if z is None else z[:, None]
    op(*one_head, A[None], B[:, None], C[:, None], slots(state), out[:, None], weight, gate, bias)
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
    """Scan in float32, which the norm that follows takes; the size of chunks is the op's own."""
    if _is_packed(others):
        return None
    batch, tokens, heads, size = hidden_states.shape
    x = hidden_states.float().flatten(0, 1)
    steps = step_sizes(dt.float(), dt_bias, dt_softplus).clamp(*dt_limit).flatten(0, 1)
    given = (
        x.new_zeros(batch, heads, size, B.shape[-1])
        if initial_states is None
        else initial_states.float()
    )
    y, final = op(x, steps, A, B.flatten(0, 1), C.flatten(0, 1), bounds(x, batch, tokens), given, D)
    y = y.view(hidden_states.shape)
    return (y, final) if return_final_states else y


def _for_convolution(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x = random.tokens(batch, tokens, 6).mT
    return [x, random.tokens(6, 4)], {"bias": random.tokens(6), "activation": options["activation"]}


def _for_step_of_convolution(
    random: Random, options: Options, batch: int, tokens: int
) -> Arguments:
    (_, weight), kwargs = _for_convolution(random, options, batch, 1)
    return [random.tokens(batch, 6, 1), random.tokens(batch, 6, options["state"]), weight], kwargs


def _for_scan(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x, dt, z = (random.tokens(batch, tokens, 6).mT for _ in range(3))
    b, c = (random.tokens(batch, tokens, 3).mT for _ in range(2))
    settings = {
        "z": z,
        "delta_bias": random.weights(6),
        "delta_softplus": True,
        "return_last_state": True,
    }
    return [x, dt, -random.weights(6, 3).exp(), b, c], {"D": random.weights(6), **settings}


def _for_step(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    x, dt, z = (random.tokens(batch, 6) for _ in range(3))
    b, c = (random.tokens(batch, 3) for _ in range(2))
    args = [random.weights(batch, 6, 3), x, dt, -random.weights(6, 3).exp(), b, c]
    return args, {"D": random.weights(6), "z": z, "dt_bias": random.weights(6), "dt_softplus": True}


def _for_step_of_heads(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    """Draw ``dt``, ``A``, ``D`` and the bias as one number of each head."""
    heads, groups, size, n = 4, 2, 5, 3
    x, z = (random.tokens(batch, heads, size) for _ in range(2))
    dt = random.tokens(batch, heads, 1).expand(-1, -1, size)
    b, c = (random.tokens(batch, groups, n) for _ in range(2))
    d, bias = (random.weights(heads, 1).expand(-1, size) for _ in range(2))
    decay = -random.weights(heads, 1, 1).exp().expand(-1, size, n)
    settings = {"D": d, "dt_bias": bias, "dt_softplus": True, "z": z}
    return [random.weights(batch, heads, size, n), x, dt, decay, b, c], settings


def _for_scan_of_chunks(random: Random, options: Options, batch: int, tokens: int) -> Arguments:
    heads, groups, size, n = 4, 2, 5, 3
    x, dt = random.tokens(batch, tokens, heads, size), random.tokens(batch, tokens, heads)
    b, c = (random.tokens(batch, tokens, groups, n) for _ in range(2))
    args = [x, dt, -random.weights(heads).exp(), b, c]
    weights = {
        "D": random.weights(heads),
        "dt_bias": random.weights(heads),
        "dt_softplus": True,
        "dt_limit": (0.1, 0.7),
    }
    states = random.weights(batch, heads, size, n)
    return args, {
        "chunk_size": 16,
        **weights,
        "initial_states": states,
        "return_final_states": True,
    }


def _activation(options: Options) -> dict[str, Any]:
    activation = options.get("activation")
    return {"activation": activation if activation in ACTIVATIONS else None}


_CONVOLUTION = {"activation": (None, "silu")}

FORMS = (
    Form(
        "causal_conv1d",
        "conv1d_fn",
        CausalConv1d,
        _activation,
        _convolved,
        _for_convolution,
        _CONVOLUTION,
        ("bias",),
    ),
    Form(
        "causal_conv1d_update",
        "conv1d_update",
        CausalConv1dUpdate,
        _activation,
        convolved_step,
        _for_step_of_convolution,
        {**_CONVOLUTION, "state": (3, 4)},
        ("bias",),
    ),
    Form(
        "selective_scan",
        "selective_scan",
        SelectiveScan,
        lambda options: {"dt_softplus": True},
        _scanned,
        _for_scan,
        {},
        ("D", "z", "delta_bias", "return_last_state"),
    ),
    *(
        Form(
            "selective_state_update",
            "state_update",
            SelectiveStateUpdate,
            lambda options: {"dt_softplus": True},
            scanned_step,
            arguments,
            {},
            ("D", "dt_bias", "z"),
        )
        for arguments in (_for_step, _for_step_of_heads)
    ),
    Form(
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
