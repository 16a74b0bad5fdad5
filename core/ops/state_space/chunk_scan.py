"""The scan of Mamba-2 by products of matrices, a chunk of tokens at a time.

The source of the maths is state space duality (Dao and Gu, arXiv:2405.21060).
"""

from __future__ import annotations

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_positive, expect_size, values_are_known
from opgraft.ops.precision import compute_dtype
from opgraft.ops.state_space.selective_scan import gated, states_after, step_sizes
from opgraft.ops.state_space.sequences import expect_sequences, expect_shape, places
from torch import Tensor

__all__ = ["mamba_chunk_scan"]


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


@register_functional("mamba_chunk_scan", _scanned)
def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    query_start_loc: Tensor,
    initial_states: Tensor,
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scan the tokens of sequences by Mamba-2's state space (arXiv:2405.21060).

    Per head, from the initial state of each sequence, the states and outputs are ``h[t] = exp(dt[t]
    · A) · h[t - 1] + dt[t] · x[t] ⊗ B[t]`` and ``y[t] = (h[t] · C[t] + D · x[t]) · silu(z[t])``. A
    call may have whole prompts or parts of prompts. A part that starts from the final state of the
    part before gives the same results as the whole prompt. The computation is in float32, or
    float64 for float64 input. Tokens of one chunk are computed as in attention, and states connect
    the chunks.

    Args:
        x: ``[tokens, heads, head_size]``, the tokens of all sequences one after another.
        dt: step sizes, ``[tokens, heads]``.
        A: ``[heads]``, not positive.
        B: ``[tokens, groups, state]``; each group serves ``heads / groups`` heads.
        C: as ``B``.
        query_start_loc: the bounds of sequences: integers ``[sequences + 1]``, ascending from 0 to
            ``tokens``.
        initial_states: ``[sequences, heads, head_size, state]``.
        chunk_size: tokens of a chunk; the result does not depend on the size.
        D: weight of the input itself, ``[heads]``.
        z: gate, like ``x``.
        dt_bias: added to ``dt``, ``[heads]``.
        dt_softplus: the step size is ``softplus(dt + dt_bias)``.

    Returns:
        ``y``, like ``x``, and the final states, like ``initial_states``.

    Raises:
        ValueError: a shape, a dtype, a device or the size of chunks does not fit, or
            ``query_start_loc`` does not ascend from 0 to the number of tokens.
    """
    expect_heads(x, dt, A, B, C, query_start_loc, initial_states, chunk_size, D, z, dt_bias)

    dtype = compute_dtype(x.dtype)
    per_group = x.shape[1] // B.shape[1]
    step = step_sizes(dt.to(dtype), dt_bias, dt_softplus)
    given_x = x.to(dtype)

    weighted = given_x * step[..., None]
    log_decay = step * A.to(dtype)

    inputs = (weighted, log_decay, B.to(dtype), C.to(dtype))
    chunks = _Chunks(x.shape[0], query_start_loc, chunk_size)
    y, final = _scan(chunks, inputs, initial_states.to(dtype), per_group)

    weight = None if D is None else D[:, None]
    y = gated(y, given_x, weight, z)
    return y.to(x.dtype), final.to(initial_states.dtype)


class _Chunks:
    """Chunks with tokens of one sequence each; as many as the sequences could need at most.

    Attributes:
        rows: the place of each token in the row of all chunks, int64 ``[tokens]``.
        sequence: the sequence of each chunk; a spare chunk has the number of sequences.
        is_first: True for the first chunk of a sequence.
        lengths: tokens of each sequence.
        last: the last chunk of each sequence.
        known: False if the number of chunks is a symbol.
    """

    def __init__(self, tokens: int, query_start_loc: Tensor, size: int) -> None:
        sequence, position, self.lengths = places(tokens, query_start_loc)
        sequences = query_start_loc.shape[0] - 1
        self.known = values_are_known(query_start_loc)

        # A short prompt needs no chunk longer than itself. A symbol cannot be compared.
        if self.known:
            size = min(size, max(tokens, 1))
        self.size = size
        # Each sequence may leave its last chunk partly empty.
        self.count = tokens // size + sequences

        # Numbers of chunks: the first of a sequence follows the last of the sequence before.
        chunks = (self.lengths + size - 1) // size
        ends = chunks.cumsum(0)
        firsts = torch.cat([ends.new_zeros(1), ends])
        self.rows = firsts[sequence] * size + position

        numbers = torch.arange(self.count, device=ends.device)
        self.sequence = torch.searchsorted(ends, numbers, right=True)
        self.is_first = firsts[self.sequence] == numbers
        # An empty sequence at the start has no last chunk; 0 is a place that may be read.
        self.last = (ends - 1).clamp(min=0)

    def fill(self, x: Tensor) -> Tensor:
        """Return ``[tokens, ...]`` as ``[chunks, size, ...]``, with zeros for missing tokens."""
        shape = (self.count, self.size)
        zeros = x.new_zeros(self.count * self.size, *x.shape[1:])
        filled = zeros.index_copy(0, self.rows, x)
        return filled.unflatten(0, shape)  # type: ignore[no-untyped-call]


def _scan(
    chunks: _Chunks, inputs: tuple[Tensor, Tensor, Tensor, Tensor], initial: Tensor, per_group: int
) -> tuple[Tensor, Tensor]:
    """Return ``h · C`` for each token, and the last states."""
    # Missing tokens are zeros in all four: they add nothing, and leave a state as it is.
    weighted, log_decay, b, c = (chunks.fill(each) for each in inputs)
    between = _between(log_decay.mT)
    carried, final = _states(chunks, weighted, log_decay, between, b, initial, per_group)

    by_group = carried.unflatten(1, (-1, per_group))  # type: ignore[no-untyped-call]
    from_before = torch.einsum("nlgk,ngrpk->nlgrp", c, by_group).flatten(2, 3)
    within = _within(weighted, between, b, c, per_group)

    left = log_decay.cumsum(1).exp()
    y = within + from_before * left[..., None]
    return y.flatten(0, 1)[chunks.rows], final


def _between(log_decay: Tensor) -> Tensor:
    """Return the share ``[..., l, m]`` of the state after place ``m`` that is left after ``l``.

    The share is 0 if ``l`` is before ``m``. ``log_decay`` is ``[..., places]``.
    """
    size = log_decay.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    each_pair = log_decay[..., :, None].expand(*log_decay.shape, size)
    # Each pair has a sum of its own: a difference of two long sums would lose small steps.
    summed = each_pair.masked_fill(~earlier, 0.0).cumsum(-2)
    # The exponential of minus infinity is zero, with a gradient of zero.
    return summed.masked_fill(earlier.T, -torch.inf).exp()


def _within(weighted: Tensor, between: Tensor, b: Tensor, c: Tensor, per_group: int) -> Tensor:
    """Return the outputs from tokens of the same chunk, ``[chunks, size, heads, head_size]``."""
    by_group = torch.einsum("nlgk,nmgk->nglm", c, b)
    scores = by_group.repeat_interleave(per_group, 1)
    by_head = (scores * between) @ weighted.transpose(1, 2)
    return by_head.transpose(1, 2)


def _states(
    chunks: _Chunks,
    weighted: Tensor,
    log_decay: Tensor,
    between: Tensor,
    b: Tensor,
    initial: Tensor,
    per_group: int,
) -> tuple[Tensor, Tensor]:
    """Return the first state of each chunk, and the last state of each sequence.

    First states are ``[chunks, heads, head_size, state]``. A sequence without tokens keeps its
    initial state.
    """
    decay = log_decay.sum(1).exp()[..., None, None]
    until_end = between[..., -1, :].mT
    decayed = weighted * until_end[..., None]
    grouped = decayed.unflatten(2, (-1, per_group))  # type: ignore[no-untyped-call]
    own = torch.einsum("nlgrp,nlgk->ngrpk", grouped, b).flatten(1, 2)

    zeros = initial.new_zeros(1, *initial.shape[1:])
    # Spare chunks have the number of sequences as their sequence: they begin with zeros.
    given = torch.cat([initial, zeros])[chunks.sequence]
    first = chunks.is_first[:, None, None, None]
    own = torch.where(first, own + decay * given, own)
    after = states_after(decay, own, chunks.is_first, chunks.known)

    before = torch.cat([zeros, after])[:-1]
    carried = torch.where(first, given, before)
    last = torch.cat([after, zeros])[chunks.last]
    has_tokens = (chunks.lengths > 0)[:, None, None, None]
    return carried, torch.where(has_tokens, last, initial)


def expect_heads(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    query_start_loc: Tensor,
    initial_states: Tensor,
    chunk_size: int,
    D: Tensor | None,  # noqa: N803
    z: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """Raise ``ValueError`` unless the arguments of ``mamba_chunk_scan`` fit each other."""
    op = "mamba_chunk_scan"
    expect_size(op, "chunk_size", chunk_size)
    expect_positive(op, "chunk_size", chunk_size)
    if x.dim() != 3 or B.dim() != 3:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)} and B {tuple(B.shape)}, expected "
            "[tokens, heads, head_size] and [tokens, groups, state]"
        )

    expect_sequences(op, x, query_start_loc, initial_states)
    tokens, heads, head_size = x.shape
    _, groups, size = B.shape
    if not groups or heads % groups:
        raise ValueError(f"{op}: B has {groups} groups, expected a divisor of {heads} heads")

    by_group = (tokens, groups, size)
    state = (initial_states.shape[0], heads, head_size, size)
    for name, given, shape in (
        ("dt", dt, (tokens, heads)),
        ("A", A, (heads,)),
        ("B", B, by_group),
        ("C", C, by_group),
        ("initial_states", initial_states, state),
        ("D", D, (heads,)),
        ("z", z, tuple(x.shape)),
        ("dt_bias", dt_bias, (heads,)),
    ):
        expect_shape(op, name, given, shape, x)
