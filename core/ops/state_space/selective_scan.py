"""Selective state spaces of Mamba (Gu and Dao, arXiv:2312.00752): the scan of prompts, and the step of one token."""

from __future__ import annotations

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import values_are_known
from opgraft.ops.fakes import nothing
from opgraft.ops.precision import compute_dtype
from opgraft.ops.state_space.causal_conv import expect_slots
from opgraft.ops.state_space.sequences import Places, expect_sequences, expect_shape, places
from torch import Tensor
from torch.nn import functional as F

__all__ = ["selective_scan", "selective_state_update"]

CHUNK = 16
"""Tokens that are scanned one after another, in all chunks at once; chunks are combined by doubling."""
CHUNK_OF_GRAPHS = 4
"""As many where a graph is made, in which each place of a chunk has operations of its own."""
LARGEST_NUMBER_OF_CHUNKS = 2**16
"""The bound of doublings where the number of tokens is a symbol."""


def _scanned(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # the letters of the paper
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    query_start_loc: Tensor,
    initial_states: Tensor,
    *others: object,
    **settings: object,
) -> tuple[Tensor, Tensor]:
    """Make two contiguous tensors, like ``x`` and like ``initial_states``; a fake rule."""
    return x.new_empty(x.shape), initial_states.new_empty(initial_states.shape)


@register_functional("selective_scan", _scanned)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    query_start_loc: Tensor,
    initial_states: Tensor,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scan the tokens of sequences by a selective state space: Mamba's prompts, or parts of them (arXiv:2312.00752).

    ``h[t] = exp(dt[t] · A) · h[t - 1] + dt[t] · B[t] · x[t]`` and ``y[t] = (C[t] · h[t] + D · x[t]) · silu(z[t])``,
    from the initial state of each sequence. Parts of a prompt, each from the state that the former ended in, give what
    the whole gives. It is computed in float32 (float64 for float64 input), chunks of tokens at once.

    Args:
        x: ``[tokens, channels]``, the tokens of all sequences one after another.
        dt: step sizes, like ``x``.
        A: ``[channels, state]``, negative as a rule.
        B: ``[tokens, state]``.
        C: ``[tokens, state]``.
        query_start_loc: where sequences begin and end: integers ``[sequences + 1]``, ascending from 0 to ``tokens``.
        initial_states: ``[sequences, channels, state]``.
        D: weight of the input itself, ``[channels]``.
        z: gate, like ``x``.
        dt_bias: added to ``dt``, ``[channels]``.
        dt_softplus: the step size is ``softplus(dt + dt_bias)``.

    Returns:
        ``y``, like ``x``, and the final states, like ``initial_states``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or ``query_start_loc`` does not ascend from 0 to the
            number of tokens.
    """
    expect_channels(x, dt, A, B, C, query_start_loc, initial_states, D, z, dt_bias)
    dtype = compute_dtype(x.dtype)
    step, given_x = step_sizes(dt.to(dtype), dt_bias, dt_softplus), x.to(dtype)
    inputs = (step, step * given_x, B.to(dtype), C.to(dtype))
    where, known = places(x.shape[0], query_start_loc), values_are_known(query_start_loc)
    y, final = _scan(inputs, A.to(dtype), where, initial_states.to(dtype), known)
    return gated(y, given_x, D, z).to(x.dtype), final.to(initial_states.dtype)


def expect_channels(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    query_start_loc: Tensor,
    initial_states: Tensor,
    D: Tensor | None,  # noqa: N803
    z: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """Raise ``ValueError`` unless the arguments of ``selective_scan`` fit each other."""
    op = "selective_scan"
    if A.dim() != 2:
        raise ValueError(f"{op}: A has shape {tuple(A.shape)}, expected [channels, state]")
    expect_sequences(op, x, query_start_loc, initial_states)
    tokens, (channels, size) = x.shape[0], A.shape
    for name, given, shape in (
        ("x", x, (tokens, channels)),
        ("dt", dt, (tokens, channels)),
        ("A", A, (channels, size)),
        ("B", B, (tokens, size)),
        ("C", C, (tokens, size)),
        ("initial_states", initial_states, (initial_states.shape[0], channels, size)),
        ("D", D, (channels,)),
        ("z", z, (tokens, channels)),
        ("dt_bias", dt_bias, (channels,)),
    ):
        expect_shape(op, name, given, shape, x)


def gated(y: Tensor, x: Tensor, weight: Tensor | None, z: Tensor | None) -> Tensor:
    """Return ``(y + weight · x) · silu(z)``, in the dtype of ``y``, without what is not given."""
    if weight is not None:
        y = y + weight.to(y.dtype) * x
    return y if z is None else y * F.silu(z.to(y.dtype))


def step_sizes(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    """Return ``dt`` with its bias, made positive if that is asked for."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt


def _scan(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    A: Tensor,  # noqa: N803
    where: Places,
    initial: Tensor,
    known: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``C · h`` for each token, and the last ``h`` of each sequence.

    A first token forgets what is before it, and takes the initial state of its sequence in as a part of its input. So
    all sequences are one, and all its chunks are scanned at once: first from nothing, for their own last states, of
    which follow the states that they begin with, then from those.
    """
    tokens, channels = inputs[0].shape
    length = min(CHUNK, max(tokens, 1)) if known else CHUNK_OF_GRAPHS
    # A graph for one chunk would be another one.
    count = (tokens + length - 1) // length + (0 if known else 1)
    firsts = where.position == 0
    step, weighted, b, c = (_chunks(each, count, length) for each in inputs)
    forgets = _chunks(firsts, count, length)
    sequence = _chunks(where.sequence, count, length)

    def advanced(state: Tensor, place: int) -> Tensor:
        decayed = torch.exp(step[:, place, :, None] * A)
        first = forgets[:, place, None, None]
        if len(initial):
            state = torch.where(first, initial[sequence[:, place]], state)
        return torch.addcmul(decayed * state, weighted[:, place, :, None], b[:, place, None, :])

    state = step.new_zeros(count, channels, A.shape[1])
    own = state
    for place in range(length):
        own = advanced(own, place)
    decay = torch.exp(step.sum(1)[..., None] * A)
    state = torch.cat([state[:1], states_after(decay, own, forgets.any(1), known)[:-1]])
    found = []
    last, ends = initial.clone(), where.lengths.cumsum(0) - 1
    for place in range(length):
        state = advanced(state, place)
        found.append((state @ c[:, place, :, None]).squeeze(-1))
        here = (ends % length == place) & (where.lengths > 0)
        if count:
            last = torch.where(here[:, None, None], state[(ends // length).clamp(min=0)], last)
    return torch.stack(found, 1).flatten(0, 1)[:tokens], last


def _chunks(x: Tensor, count: int, length: int) -> Tensor:
    """View ``[tokens, ...]`` as ``[chunks, length, ...]``; tokens of zeros fill the last one up."""
    padded = torch.cat([x, x.new_zeros(count * length - x.shape[0], *x.shape[1:])])
    return padded.reshape(count, length, *x.shape[1:])


def states_after(decay: Tensor, own: Tensor, anew: Tensor, known: bool) -> Tensor:
    """Return the state after each chunk, by doubling: ``own``, and ``decay`` times the state before it.

    What is before a chunk that begins ``anew`` is left out, not multiplied by zero, which would make NaN of infinities.

    Args:
        decay: of each chunk, ``[chunks, ...]``, which expands to the shape of ``own``.
        own: the state that a chunk alone leaves, ``[chunks, ...]``.
        anew: tells which chunks begin anew, ``[chunks]``.
        known: tells if the number of chunks is no symbol.
    """
    numbers, reach = torch.arange(own.shape[0], device=own.device), 1
    most = own.shape[0] if known else LARGEST_NUMBER_OF_CHUNKS
    while reach < most:
        before = (numbers - reach).clamp(min=0)
        goes_on = (~anew & (numbers >= reach)).view(-1, *[1] * (own.dim() - 1))
        own = torch.where(goes_on, own + decay * own[before], own)
        decay = torch.where(goes_on, decay * decay[before], decay)
        anew = anew | anew[before]
        reach *= 2
    return own


@register_functional("selective_state_update", nothing, mutates=("state", "out"))
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    slots: Tensor,
    out: Tensor,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> None:
    """Compute one more token of each of some sequences by a selective state space (arXiv:2312.00752, 2405.21060).

    It is a step of ``selective_scan`` for Mamba, as one head of all channels, and of ``mamba_chunk_scan`` for Mamba-2,
    whose ``dt``, ``A``, ``D`` and ``dt_bias`` are one number per head, expanded.

    Args:
        state: by slot, ``[slots, heads, head_size, state]``; written to.
        x: the tokens, ``[sequences, heads, head_size]``.
        dt: step sizes, like ``x``.
        A: ``[heads, head_size, state]``.
        B: ``[sequences, groups, state]``; each group serves ``heads / groups`` heads.
        C: as ``B``.
        slots: of each sequence, integers ``[sequences]``, no two the same.
        out: where the result goes, like ``x``.
        D: weight of the input itself, ``[heads, head_size]``.
        z: gate, like ``x``.
        dt_bias: added to ``dt``, ``[heads, head_size]``.
        dt_softplus: the step size is ``softplus(dt + dt_bias)``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or a slot is none.
    """
    op = "selective_state_update"
    expect_update(op, state, x, dt, A, B, C, slots, out, D, z, dt_bias)
    dtype, per_group = compute_dtype(x.dtype), x.shape[1] // B.shape[1]
    step, given_x = step_sizes(dt.to(dtype), dt_bias, dt_softplus), x.to(dtype)
    b, c = (each.to(dtype).repeat_interleave(per_group, 1) for each in (B, C))
    decayed = torch.exp(step[..., None] * A.to(dtype)) * state[slots].to(dtype)
    new = torch.addcmul(decayed, (step * given_x)[..., None], b[:, :, None, :])
    out.copy_(gated((new @ c[..., None]).squeeze(-1), given_x, D, z))
    state[slots] = new.to(state.dtype)


def expect_update(
    op: str,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    slots: Tensor,
    out: Tensor,
    D: Tensor | None,  # noqa: N803
    z: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """Raise ``ValueError`` unless the arguments of ``selective_state_update`` fit each other."""
    if x.dim() != 3 or A.dim() != 3 or B.dim() != 3:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}, A {tuple(A.shape)} and B {tuple(B.shape)}, expected [sequences, "
            "heads, head_size], [heads, head_size, state] and [sequences, groups, state]"
        )
    sequences, heads, head_size = x.shape
    groups, size = B.shape[1], A.shape[-1]
    if not groups or heads % groups:
        raise ValueError(f"{op}: B has {groups} groups, expected a divisor of {heads} heads")
    for name, given, shape in (
        ("state", state, (state.shape[0], heads, head_size, size)),
        ("x", x, tuple(x.shape)),
        ("dt", dt, tuple(x.shape)),
        ("A", A, (heads, head_size, size)),
        ("B", B, (sequences, groups, size)),
        ("C", C, (sequences, groups, size)),
        ("out", out, tuple(x.shape)),
        ("D", D, (heads, head_size)),
        ("z", z, tuple(x.shape)),
        ("dt_bias", dt_bias, (heads, head_size)),
    ):
        expect_shape(op, name, given, shape, x)
    expect_slots(op, x, state, slots)
