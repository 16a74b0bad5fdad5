"""The scan of Mamba-2, state space duality (Dao and Gu, arXiv:2405.21060): products of matrices, a chunk at a time."""

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
    """Make two contiguous tensors, like ``x`` and like ``initial_states``; a fake rule."""
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
    """Scan the tokens of sequences by Mamba-2's state space: prompts, or parts of them (arXiv:2405.21060).

    By head, ``h[t] = exp(dt[t] · A) · h[t - 1] + dt[t] · x[t] ⊗ B[t]`` and ``y[t] = (h[t] · C[t] + D · x[t]) ·
    silu(z[t])``, from the initial state of each sequence. Parts of a prompt, each from the state that the former ended
    in, give what the whole gives. It is computed in float32 (float64 for float64 input), within a chunk as attention is
    and from chunk to chunk by their states.

    Args:
        x: ``[tokens, heads, head_size]``, the tokens of all sequences one after another.
        dt: step sizes, ``[tokens, heads]``.
        A: ``[heads]``, not positive.
        B: ``[tokens, groups, state]``; each group serves ``heads / groups`` heads.
        C: as ``B``.
        query_start_loc: where sequences begin and end: integers ``[sequences + 1]``, ascending from 0 to ``tokens``.
        initial_states: ``[sequences, heads, head_size, state]``.
        chunk_size: tokens of a chunk; the result is the same for any.
        D: weight of the input itself, ``[heads]``.
        z: gate, like ``x``.
        dt_bias: added to ``dt``, ``[heads]``.
        dt_softplus: the step size is ``softplus(dt + dt_bias)``.

    Returns:
        ``y``, like ``x``, and the final states, like ``initial_states``.

    Raises:
        ValueError: a shape, a dtype, a device or the size of chunks does not fit, or ``query_start_loc`` does not
            ascend from 0 to the number of tokens.
    """
    expect_heads(x, dt, A, B, C, query_start_loc, initial_states, chunk_size, D, z, dt_bias)
    dtype, per_group = compute_dtype(x.dtype), x.shape[1] // B.shape[1]
    step, given_x = step_sizes(dt.to(dtype), dt_bias, dt_softplus), x.to(dtype)
    inputs = (given_x * step[..., None], step * A.to(dtype), B.to(dtype), C.to(dtype))
    y, final = _scan(
        _Chunks(x.shape[0], query_start_loc, chunk_size),
        inputs,
        initial_states.to(dtype),
        per_group,
    )
    return gated(y, given_x, None if D is None else D[:, None], z).to(x.dtype), final.to(
        initial_states.dtype
    )


class _Chunks:
    """Chunks of which each has tokens of one sequence only; there are as many as sequences could need at most.

    Attributes:
        rows: place of each token among those of all chunks, int64 ``[tokens]``.
        sequence: of each chunk; that of a spare one is the number of sequences.
        is_first: tells which chunks begin a sequence.
        lengths: tokens of each sequence.
        last: of each sequence, its last chunk.
        known: tells if the number of chunks is no symbol.
    """

    def __init__(self, tokens: int, query_start_loc: Tensor, size: int) -> None:
        sequence, position, self.lengths = places(tokens, query_start_loc)
        sequences, self.known = query_start_loc.shape[0] - 1, values_are_known(query_start_loc)
        if self.known:
            size = min(size, max(tokens, 1))
        self.count, self.size = tokens // size + sequences, size
        ends = ((self.lengths + size - 1) // size).cumsum(0)
        firsts = torch.cat([ends.new_zeros(1), ends])
        self.rows = firsts[sequence] * size + position
        numbers = torch.arange(self.count, device=ends.device)
        self.sequence = torch.searchsorted(ends, numbers, right=True)
        self.is_first = firsts[self.sequence] == numbers
        self.last = (ends - 1).clamp(min=0)

    def fill(self, x: Tensor) -> Tensor:
        """Return ``[tokens, ...]`` as ``[chunks, size, ...]``, with zeros where there are no tokens."""
        empty = x.new_zeros(self.count * self.size, *x.shape[1:])
        return empty.index_copy(0, self.rows, x).unflatten(0, (self.count, self.size))  # type: ignore[no-untyped-call]


def _scan(
    chunks: _Chunks, inputs: tuple[Tensor, Tensor, Tensor, Tensor], initial: Tensor, per_group: int
) -> tuple[Tensor, Tensor]:
    """Return the output of each token without the input's own part, and the last states."""
    weighted, log_decay, b, c = (chunks.fill(each) for each in inputs)
    between = _between(log_decay.mT)
    carried, final = _states(chunks, weighted, log_decay, between, b, initial, per_group)
    by_group = carried.unflatten(1, (-1, per_group))  # type: ignore[no-untyped-call]
    from_before = torch.einsum("nlgk,ngrpk->nlgrp", c, by_group).flatten(2, 3)
    y = (
        _within(weighted, between, b, c, per_group)
        + from_before * log_decay.cumsum(1).exp()[..., None]
    )
    return y.flatten(0, 1)[chunks.rows], final


def _between(log_decay: Tensor) -> Tensor:
    """Return how much of the state after place ``m`` is left after ``l``, ``[..., l, m]``; nothing of a later one.

    The logarithms ``[..., places]`` of what lies between are added up for each pair, as differences of long sums would
    lose what is small beside them.
    """
    size = log_decay.shape[-1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    summed = (
        log_decay[..., :, None].expand(*log_decay.shape, size).masked_fill(~earlier, 0.0).cumsum(-2)
    )
    return summed.masked_fill(earlier.T, -torch.inf).exp()


def _within(weighted: Tensor, between: Tensor, b: Tensor, c: Tensor, per_group: int) -> Tensor:
    """Return what the tokens of each chunk get from those of the same, ``[chunks, size, heads, head_size]``."""
    scores = torch.einsum("nlgk,nmgk->nglm", c, b).repeat_interleave(per_group, 1)
    return ((scores * between) @ weighted.transpose(1, 2)).transpose(1, 2)


def _states(
    chunks: _Chunks,
    weighted: Tensor,
    log_decay: Tensor,
    between: Tensor,
    b: Tensor,
    initial: Tensor,
    per_group: int,
) -> tuple[Tensor, Tensor]:
    """Return the state that each chunk begins with, ``[chunks, heads, head_size, state]``, and the last ones."""
    whole = log_decay.sum(1)
    grouped = (weighted * between[..., -1, :].mT[..., None]).unflatten(2, (-1, per_group))  # type: ignore[no-untyped-call]
    own = torch.einsum("nlgrp,nlgk->ngrpk", grouped, b).flatten(1, 2)
    spare = initial.new_zeros(1, *initial.shape[1:])
    given = torch.cat([initial, spare])[chunks.sequence]
    first = chunks.is_first[:, None, None, None]
    own = torch.where(first, own + whole.exp()[..., None, None] * given, own)
    after = states_after(whole.exp()[..., None, None], own, chunks.is_first, chunks.known)
    carried = torch.where(first, given, torch.cat([spare, after])[:-1])
    some = (chunks.lengths > 0)[:, None, None, None]
    return carried, torch.where(some, torch.cat([after, spare])[chunks.last], initial)


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
            f"{op}: x has shape {tuple(x.shape)} and B {tuple(B.shape)}, expected [tokens, heads, head_size] and "
            "[tokens, groups, state]"
        )
    expect_sequences(op, x, query_start_loc, initial_states)
    (tokens, heads, head_size), (_, groups, size) = x.shape, B.shape
    if not groups or heads % groups:
        raise ValueError(f"{op}: B has {groups} groups, expected a divisor of {heads} heads")
    for name, given, shape in (
        ("dt", dt, (tokens, heads)),
        ("A", A, (heads,)),
        ("B", B, (tokens, groups, size)),
        ("C", C, (tokens, groups, size)),
        ("initial_states", initial_states, (initial_states.shape[0], heads, head_size, size)),
        ("D", D, (heads,)),
        ("z", z, tuple(x.shape)),
        ("dt_bias", dt_bias, (heads,)),
    ):
        expect_shape(op, name, given, shape, x)
