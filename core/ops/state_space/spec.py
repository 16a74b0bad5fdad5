"""Specs of state spaces. The references compute the recurrences of the papers token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from opgraft.ops import state_space as ops
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, of_transformers, with_parameters
from opgraft.ops.state_space import causal_conv, chunk_scan, gating, selective_scan
from torch import Tensor

WIDTH = 4
STATE = 3
HEADS = 4
GROUPS = 2
SPARE_SLOTS = 5
# Sums of many products, so float32 has a wider tolerance than elementwise ops.
HALF = {torch.float32: (1e-5, 1e-5), **HALF_NORM}


def _bounds(draw: Draw, tokens: int) -> Tensor:
    """Draw the bounds of four sequences; the third is always empty."""
    # Empty sequences must keep their states.
    first = torch.tensor([0])
    last = torch.tensor([tokens])
    within = draw.integers(0, tokens + 1, (2,)).sort().values
    bounds = torch.cat([first, within, within[-1:], last])
    return bounds.to(torch.int32)


def _spans(bounds: Tensor) -> Iterator[tuple[int, int]]:
    return pairwise(bounds.tolist())


def _slots(draw: Draw, count: int) -> Tensor:
    # Spare slots show kernels that write to a slot of nobody.
    shuffled = torch.randperm(count + SPARE_SLOTS, generator=draw.generator)
    return shuffled[:count]


def _conv_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {
        "x": draw(math.prod(lead), size),
        "weight": draw(size, WIDTH),
        "query_start_loc": _bounds(draw, math.prod(lead)),
        "initial_states": draw(4, size, WIDTH - 1),
        "bias": draw(size),
        "activation": "silu",
    }


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    return y / (1 + torch.exp(-y))


def _conv(
    x: Tensor,
    weight: Tensor,
    query_start_loc: Tensor,
    initial_states: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    before = weight.shape[1] - 1
    rows = torch.zeros_like(x)
    final = initial_states.clone()
    for number, (start, end) in enumerate(_spans(query_start_loc)):
        line = torch.cat([initial_states[number], x[start:end].T], 1)
        for token in range(end - start):
            window = line[:, token : token + before + 1]
            rows[start + token] = (window * weight).sum(1)
        final[number] = line[:, line.shape[1] - before :]

    if bias is not None:
        rows = rows + bias
    return _activated(rows, activation), final


def _conv_step_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    count = math.prod(lead)
    return {
        "x": draw(count, size),
        "conv_state": draw(count + SPARE_SLOTS, size, WIDTH - 1),
        "weight": draw(size, WIDTH),
        "slots": _slots(draw, count),
        "out": draw(count, size),
        "bias": draw(size),
        "activation": "silu",
    }


def _conv_step(
    x: Tensor, conv_state: Tensor, weight: Tensor, slots: Tensor, out: Tensor, **others: Any
) -> tuple[Tensor, Tensor]:
    # Nothing of out is read: the form writes all of it.
    bounds = torch.arange(x.shape[0] + 1)
    y, final = _conv(x, weight, bounds, conv_state[slots], **others)
    state = conv_state.clone()
    state[slots] = final
    return state, y


def _scan_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    tokens = math.prod(lead)
    return {
        "x": draw(tokens, size),
        "dt": draw(tokens, size),
        # Negative, or states would grow without bound.
        "A": -draw(size, STATE).exp(),
        "B": draw(tokens, STATE),
        "C": draw(tokens, STATE),
        "query_start_loc": _bounds(draw, tokens),
        "initial_states": draw(4, size, STATE),
        "D": draw(size),
        "z": draw(tokens, size),
        "dt_bias": draw(size),
        "dt_softplus": True,
    }


def _head_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    tokens = math.prod(lead)
    return {
        "x": draw(tokens, HEADS, size),
        "dt": draw(tokens, HEADS),
        "A": -draw(HEADS).exp(),
        "B": draw(tokens, GROUPS, STATE),
        "C": draw(tokens, GROUPS, STATE),
        "query_start_loc": _bounds(draw, tokens),
        "initial_states": draw(4, HEADS, size, STATE),
        "chunk_size": 4,
        "D": draw(HEADS),
        "z": draw(tokens, HEADS, size),
        "dt_bias": draw(HEADS),
        "dt_softplus": True,
    }


def _step_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    count = math.prod(lead)
    return {
        "state": draw(count + SPARE_SLOTS, HEADS, size, STATE),
        "x": draw(count, HEADS, size),
        "dt": draw(count, HEADS, size),
        "A": -draw(HEADS, size, STATE).exp(),
        "B": draw(count, GROUPS, STATE),
        "C": draw(count, GROUPS, STATE),
        "slots": _slots(draw, count),
        "out": draw(count, HEADS, size),
        "D": draw(HEADS, size),
        "z": draw(count, HEADS, size),
        "dt_bias": draw(HEADS, size),
        "dt_softplus": True,
    }


def _expanded_decay(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw one number per head, expanded over elements and states, as in Mamba-2."""
    # Kernels know such numbers by their strides, and read each number once.
    numbers = -draw(HEADS).exp()
    return numbers[:, None, None].expand(HEADS, size, STATE)


def _recurrence(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # the letters of the papers
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[heads, head_size]`` and the state after one token of one sequence.

    States are ``[heads, head_size, state]``.
    """
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = torch.logaddexp(dt, torch.zeros_like(dt))

    heads = x.shape[0]
    group = torch.arange(heads) // (heads // B.shape[0])
    decayed = state * torch.exp(dt[..., None] * A)
    state = decayed + (dt * x)[..., None] * B[group][:, None]
    y = (state * C[group][:, None]).sum(-1)

    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * _activated(z, "silu")
    return y, state


def _at(token: int, given: Arguments) -> Arguments:
    """Return the arguments of ``_recurrence`` for one token, from arguments for many tokens."""
    arguments = dict(given)
    for name in ("x", "dt", "B", "C", "z"):
        if given.get(name) is not None:
            arguments[name] = given[name][token]
    return arguments


def _sequences(
    query_start_loc: Tensor, initial_states: Tensor, given: Arguments
) -> tuple[Tensor, Tensor]:
    """Scan the heads of sequences, token by token."""
    y = torch.zeros_like(given["x"])
    final = initial_states.clone()
    for number, (start, end) in enumerate(_spans(query_start_loc)):
        for token in range(start, end):
            y[token], final[number] = _recurrence(final[number], **_at(token, given))
    return y, final


def _heads_scan(
    query_start_loc: Tensor, initial_states: Tensor, chunk_size: int = 1, **given: Any
) -> tuple[Tensor, Tensor]:
    """Scan heads. A head has one ``dt``, ``A``, ``D`` and ``dt_bias`` for all its elements."""
    by_element = {**given, "A": given["A"][:, None, None]}
    for name in ("dt", "D", "dt_bias"):
        if given.get(name) is not None:
            by_element[name] = given[name][..., None]
    return _sequences(query_start_loc, initial_states, by_element)


def _scan(query_start_loc: Tensor, initial_states: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Scan channels, as the elements of one head."""
    one_head = dict(given)
    for name, x in given.items():
        if isinstance(x, Tensor):
            is_weight = name in ("A", "D", "dt_bias")
            one_head[name] = x.unsqueeze(0 if is_weight else 1)

    y, final = _sequences(query_start_loc, initial_states[:, None], one_head)
    return y[:, 0], final[:, 0]


def _step(state: Tensor, slots: Tensor, out: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    new = state.clone()
    y = torch.zeros_like(out)
    for row, slot in enumerate(slots.tolist()):
        y[row], new[slot] = _recurrence(state[slot], **_at(row, given))
    return new, y


def _conv_flops(x: Tensor, weight: Tensor, *others: Any, **settings: Any) -> int:
    return 2 * x.numel() * weight.shape[1]


def _scan_flops(x: Tensor, B: Tensor, **others: Any) -> int:  # noqa: N803
    return 6 * x.numel() * B.shape[-1]


def _gate_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size), "gate": draw(*lead, size), "weight": draw(size)}


def _gated_inputs(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
) -> Tensor:
    y = x * _activated(gate, "silu")
    if weight is None:
        return y

    groups = y.reshape(-1, group_size or y.shape[-1])
    variance = (groups * groups).mean(-1, keepdim=True)
    normalised = groups / (variance + eps) ** 0.5
    return normalised.reshape(x.shape) * weight


def _gated_op(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
) -> tuple[Any, tuple[Tensor, Tensor]]:
    size = x.shape[-1]
    groups = size // (group_size or size)
    norm = ops.Mixer2RMSNormGated(size, groups, weight is not None, eps)
    return with_parameters(norm, weight=weight), (x, gate)


def _gated_by_transformers(
    norm: Any,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
) -> Tensor | None:
    if weight is None:
        return None
    theirs = norm(x.shape[-1], group_size or x.shape[-1], eps)
    normalised: Tensor = torch.func.functional_call(theirs, {"weight": weight}, (x, gate))
    return normalised


def _without(cls: Callable[..., Any], *settings: str) -> Callable[..., tuple[Any, Arguments]]:
    """Build a module from the settings among the arguments, and call the module with the rest."""

    def build(**arguments: Any) -> tuple[Any, Arguments]:
        given = [arguments.pop(name) for name in settings if name in arguments]
        return cls(*given), arguments

    return build


PROMPTS: dict[str, Any] = {
    "leads": ((1,), (7,), (2, 3), (2, 1, 3), (0,), (2, 0)),
    "tolerances": HALF,
}

SPECS = (
    OpSpec(
        causal_conv.causal_conv1d,
        _conv_inputs,
        _conv,
        _conv_flops,
        module=_without(ops.CausalConv1d, "activation"),
        variants={"": {}, "no bias": {"bias": None}, "no activation": {"activation": None}},
        sizes=(1, 9, 64),
        # More tokens than a program's tile, and channels beside and at a power of two.
        large=(((83,), 65), ((300,), 32)),
        **PROMPTS,
    ),
    OpSpec(
        causal_conv.causal_conv1d_update,
        _conv_step_inputs,
        _conv_step,
        _conv_flops,
        module=_without(ops.CausalConv1dUpdate, "activation"),
        variants={"": {}, "no bias": {"bias": None}, "no activation": {"activation": None}},
        sizes=(1, 9, 64),
        large=(((83,), 65),),
        **PROMPTS,
        # The step writes to the states.
        differentiable=False,
    ),
    OpSpec(
        selective_scan.selective_scan,
        _scan_inputs,
        _scan,
        _scan_flops,
        module=_without(ops.SelectiveScan, "dt_softplus"),
        variants={
            "": {},
            "plain": {"D": None, "z": None, "dt_bias": None},
            "steps as they are": {
                "dt_softplus": False,
                # A negative step would let states grow.
                "dt": lambda draw, lead, size: draw(math.prod(lead), size).abs(),
                "dt_bias": None,
            },
        },
        sizes=(1, 9, 32),
        # Two or three chunks of a kernel's 64 tokens, the last one not full.
        large=(((83,), 16), ((150,), 8)),
        **PROMPTS,
    ),
    OpSpec(
        chunk_scan.mamba_chunk_scan,
        _head_inputs,
        _heads_scan,
        _scan_flops,
        module=_without(ops.MambaChunkScan, "chunk_size", "dt_softplus"),
        variants={
            "": {},
            "plain": {"D": None, "z": None, "dt_bias": None},
            # One chunk for all tokens: no state passes from chunk to chunk.
            "long chunks": {"chunk_size": 64},
            "steps as they are": {
                "dt_softplus": False,
                # A negative step would let states grow.
                "dt": lambda draw, lead, size: draw(math.prod(lead), HEADS).abs(),
                "dt_bias": None,
            },
        },
        sizes=(1, 9, 32),
        # Two or three chunks of a kernel's 64 tokens, the last one not full.
        large=(((83,), 16), ((150,), 8)),
        **PROMPTS,
    ),
    OpSpec(
        selective_scan.selective_state_update,
        _step_inputs,
        _step,
        _scan_flops,
        module=_without(ops.SelectiveStateUpdate, "dt_softplus"),
        variants={
            "": {},
            "plain": {"D": None, "z": None, "dt_bias": None},
            "a number per head": {"A": _expanded_decay},
        },
        sizes=(1, 9, 64),
        large=(((83,), 16),),
        **PROMPTS,
        # The step writes to the states.
        differentiable=False,
    ),
    OpSpec(
        gating.mixer2_gated_rms_norm,
        _gate_inputs,
        _gated_inputs,
        lambda x, **others: 5 * x.numel(),
        module=_gated_op,
        variants={
            "": {},
            "groups": {"group_size": 1},
            "eps": {"eps": 1e-2},
            "gate only": {"weight": None},
        },
        outside=(
            of_transformers(
                "models.zamba2.modeling_zamba2.Zamba2RMSNormGated", _gated_by_transformers
            ),
        ),
        tolerances=HALF,
    ),
)
