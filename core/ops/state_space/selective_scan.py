"""Selective state spaces of Mamba: the scan of prompts, and the step of one token.

The source of the maths is Gu and Dao, arXiv:2312.00752.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import values_are_known
from opgraft.ops.fakes import nothing
from opgraft.ops.precision import compute_dtype
from opgraft.ops.state_space.causal_conv import expect_slots
from opgraft.ops.state_space.sequences import TokenPlaces, expect_sequences, expect_shape, places
from torch import Tensor
from torch.nn import functional as F

__all__ = ["selective_scan", "selective_state_update"]

CHUNK = 16
"""Tokens that are scanned one after another, in all chunks at once. Doubling joins the chunks."""

CHUNK_OF_GRAPHS = 4
"""Tokens of a chunk in a traced graph, where each place of a chunk adds operations to the graph."""

LARGEST_NUMBER_OF_CHUNKS = 2**16
"""The bound of doublings if the number of tokens is a symbol."""


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
    """Make two contiguous tensors, like ``x`` and like ``initial_states``, as a fake rule."""
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
    """Scan the tokens of sequences by Mamba's selective state space (arXiv:2312.00752).

    From the initial state of each sequence, the states and outputs are ``h[t] = exp(dt[t] · A) ·
    h[t - 1] + dt[t] · B[t] · x[t]`` and ``y[t] = (C[t] · h[t] + D · x[t]) · silu(z[t])``. A call
    may have whole prompts or parts of prompts. A part that starts from the final state of the part
    before gives the same results as the whole prompt. The computation is in float32, or float64 for
    float64 input, in chunks of tokens.

    Args:
        x: ``[tokens, channels]``, the tokens of all sequences one after another.
        dt: step sizes, like ``x``.
        A: ``[channels, state]``, negative as a rule.
        B: ``[tokens, state]``.
        C: ``[tokens, state]``.
        query_start_loc: the bounds of sequences: integers ``[sequences + 1]``, ascending from 0 to
            ``tokens``.
        initial_states: ``[sequences, channels, state]``.
        D: weight of the input itself, ``[channels]``.
        z: gate, like ``x``.
        dt_bias: added to ``dt``, ``[channels]``.
        dt_softplus: the step size is ``softplus(dt + dt_bias)``.

    Returns:
        ``y``, like ``x``, and the final states, like ``initial_states``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or ``query_start_loc`` does not
            ascend from 0 to the number of tokens.
    """
    expect_channels(x, dt, A, B, C, query_start_loc, initial_states, D, z, dt_bias)
    dtype = compute_dtype(x.dtype)
    step = step_sizes(dt.to(dtype), dt_bias, dt_softplus)
    given_x = x.to(dtype)
    inputs = (step, step * given_x, B.to(dtype), C.to(dtype))

    where = places(x.shape[0], query_start_loc)
    known = values_are_known(query_start_loc)
    y, final = _scan(inputs, A.to(dtype), where, initial_states.to(dtype), known)
    y = gated(y, given_x, D, z)
    return y.to(x.dtype), final.to(initial_states.dtype)


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

    tokens = x.shape[0]
    channels, size = A.shape
    by_token = (tokens, channels)
    state = (initial_states.shape[0], channels, size)
    for name, given, shape in (
        ("x", x, by_token),
        ("dt", dt, by_token),
        ("A", A, (channels, size)),
        ("B", B, (tokens, size)),
        ("C", C, (tokens, size)),
        ("initial_states", initial_states, state),
        ("D", D, (channels,)),
        ("z", z, by_token),
        ("dt_bias", dt_bias, (channels,)),
    ):
        expect_shape(op, name, given, shape, x)


def gated(y: Tensor, x: Tensor, weight: Tensor | None, z: Tensor | None) -> Tensor:
    """Return ``(y + weight · x) · silu(z)`` in the dtype of ``y``.

    A missing weight or gate is left out.
    """
    if weight is not None:
        y = y + weight.to(y.dtype) * x
    if z is None:
        return y
    return y * F.silu(z.to(y.dtype))


def step_sizes(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    """Return ``dt`` plus the bias, and the softplus of the sum if ``dt_softplus``."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    return F.softplus(dt) if dt_softplus else dt


class _Chunks(NamedTuple):
    """The tokens of all sequences, cut into chunks of one length.

    Attributes:
        step: step sizes, ``[chunks, length, channels]``.
        weighted: inputs times step sizes, like ``step``.
        b: ``[chunks, length, state]``.
        c: ``[chunks, length, state]``.
        is_first: True for the first token of a sequence, ``[chunks, length]``.
        sequence: the sequence of each token, int64 ``[chunks, length]``.
    """

    step: Tensor
    weighted: Tensor
    b: Tensor
    c: Tensor
    is_first: Tensor
    sequence: Tensor

    def advance(self, state: Tensor, place: int, a: Tensor, initial: Tensor) -> Tensor:
        """Return the states ``[chunks, channels, state]`` after the tokens at one place.

        Args:
            state: the states before these tokens. A first token ignores this state, and takes the
                initial state of the sequence instead.
            place: the place in every chunk.
            a: ``[channels, state]``.
            initial: ``[sequences, channels, state]``.
        """
        decay = torch.exp(self.step[:, place, :, None] * a)
        # Without sequences there is no initial state to index.
        if len(initial):
            begins = self.is_first[:, place, None, None]
            given = initial[self.sequence[:, place]]
            state = torch.where(begins, given, state)
        entering = self.weighted[:, place, :, None]
        return torch.addcmul(decay * state, entering, self.b[:, place, None, :])


def _scan(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    A: Tensor,  # noqa: N803
    where: TokenPlaces,
    initial: Tensor,
    known: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``C · h`` for each token, and the last ``h`` of each sequence.

    All sequences are scanned as one row of tokens, because a first token starts from the initial
    state of its sequence. All chunks of the row are scanned at once, twice: from zeros for their
    first states, then from these states for the outputs.
    """
    tokens = inputs[0].shape[0]
    length = min(CHUNK, max(tokens, 1)) if known else CHUNK_OF_GRAPHS
    count = (tokens + length - 1) // length
    if not known:
        # torch makes a graph of its own for one chunk. With a spare chunk
        # there are at least two, if there are tokens.
        count += 1

    by_token = (*inputs, where.position == 0, where.sequence)
    chunks = _Chunks(*(_cut(each, count, length) for each in by_token))
    state = _first_states(chunks, A, initial, known)

    outputs = []
    last = initial.clone()
    ends = where.lengths.cumsum(0) - 1
    chunk_of_end = (ends // length).clamp(min=0)

    # No length is read on the host, so every place looks for the ends of sequences.
    for place in range(length):
        state = chunks.advance(state, place, A, initial)
        output = state @ chunks.c[:, place, :, None]
        outputs.append(output.squeeze(-1))
        ends_here = (ends % length == place) & (where.lengths > 0)
        if count:
            last = torch.where(ends_here[:, None, None], state[chunk_of_end], last)

    by_chunk = torch.stack(outputs, 1)
    return by_chunk.flatten(0, 1)[:tokens], last


def _first_states(
    chunks: _Chunks,
    A: Tensor,  # noqa: N803
    initial: Tensor,
    known: bool,
) -> Tensor:
    """Return the state before each chunk's first token, ``[chunks, channels, state]``."""
    count, length, channels = chunks.step.shape
    zeros = chunks.step.new_zeros(count, channels, A.shape[1])
    own = zeros
    for place in range(length):
        own = chunks.advance(own, place, A, initial)

    # The steps of a chunk decay a state as one step of their sum does.
    total = chunks.step.sum(1)
    decay = torch.exp(total[..., None] * A)
    anew = chunks.is_first.any(1)
    after = states_after(decay, own, anew, known)
    return torch.cat([zeros[:1], after[:-1]])


def _cut(x: Tensor, count: int, length: int) -> Tensor:
    """View ``[tokens, ...]`` as ``[chunks, length, ...]``, with zeros behind the last token."""
    tokens, *others = x.shape
    missing = count * length - tokens
    zeros = x.new_zeros(missing, *others)
    padded = torch.cat([x, zeros])
    return padded.reshape(count, length, *others)


def states_after(decay: Tensor, own: Tensor, anew: Tensor, known: bool) -> Tensor:
    """Return the states after chunks: ``own`` plus ``decay`` times the state before the chunk.

    Doubling needs few steps: after step ``i`` a state covers ``2**i`` chunks.

    Args:
        decay: the decay of a state over each chunk, ``[chunks, ...]``; expands to the shape of
            ``own``.
        own: the state after each chunk alone, scanned from zeros, ``[chunks, ...]``.
        anew: True for chunks that ignore the state before, ``[chunks]``.
        known: False if the number of chunks is a symbol.
    """
    numbers = torch.arange(own.shape[0], device=own.device)
    most = own.shape[0] if known else LARGEST_NUMBER_OF_CHUNKS
    reach = 1
    while reach < most:
        before = (numbers - reach).clamp(min=0)
        continued = ~anew & (numbers >= reach)
        ones = [1] * (own.dim() - 1)
        goes_on = continued.view(-1, *ones)
        # Selects, because a product with a zero decay would make NaN of an infinite state.
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
    """Step a selective state space by one token of each sequence (arXiv:2312.00752, 2405.21060).

    For Mamba the form is a step of ``selective_scan``, with all channels as one head. For Mamba-2
    the form is a step of ``mamba_chunk_scan``: ``dt``, ``A``, ``D`` and ``dt_bias`` are one number
    per head, expanded.

    Args:
        state: by slot, ``[slots, heads, head_size, state]``; written to.
        x: the tokens, ``[sequences, heads, head_size]``.
        dt: step sizes, like ``x``.
        A: ``[heads, head_size, state]``.
        B: ``[sequences, groups, state]``; each group serves ``heads / groups`` heads.
        C: as ``B``.
        slots: the slot of each sequence, integers ``[sequences]``, all different.
        out: the output, like ``x``; written to.
        D: weight of the input itself, ``[heads, head_size]``.
        z: gate, like ``x``.
        dt_bias: added to ``dt``, ``[heads, head_size]``.
        dt_softplus: the step size is ``softplus(dt + dt_bias)``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or a slot does not exist.
    """
    op = "selective_state_update"
    expect_update(op, state, x, dt, A, B, C, slots, out, D, z, dt_bias)

    dtype = compute_dtype(x.dtype)
    per_group = x.shape[1] // B.shape[1]
    step = step_sizes(dt.to(dtype), dt_bias, dt_softplus)
    given_x = x.to(dtype)

    # Each group serves several heads.
    b = B.to(dtype).repeat_interleave(per_group, 1)
    c = C.to(dtype).repeat_interleave(per_group, 1)

    decay = torch.exp(step[..., None] * A.to(dtype))
    decayed = decay * state[slots].to(dtype)
    entering = (step * given_x)[..., None]
    new = torch.addcmul(decayed, entering, b[:, :, None, :])
    y = (new @ c[..., None]).squeeze(-1)

    out.copy_(gated(y, given_x, D, z))
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
            f"{op}: x has shape {tuple(x.shape)}, A {tuple(A.shape)} and B {tuple(B.shape)}, "
            "expected [sequences, heads, head_size], [heads, head_size, state] and "
            "[sequences, groups, state]"
        )

    sequences, heads, head_size = x.shape
    groups = B.shape[1]
    size = A.shape[-1]
    if not groups or heads % groups:
        raise ValueError(f"{op}: B has {groups} groups, expected a divisor of {heads} heads")

    by_token = tuple(x.shape)
    by_group = (sequences, groups, size)
    by_element = (heads, head_size)
    for name, given, shape in (
        ("state", state, (state.shape[0], heads, head_size, size)),
        ("x", x, by_token),
        ("dt", dt, by_token),
        ("A", A, (heads, head_size, size)),
        ("B", B, by_group),
        ("C", C, by_group),
        ("out", out, by_token),
        ("D", D, by_element),
        ("z", z, by_token),
        ("dt_bias", dt_bias, by_element),
    ):
        expect_shape(op, name, given, shape, x)
    expect_slots(op, x, state, slots)
