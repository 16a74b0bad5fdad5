"""Drawing tokens: from the whole vocabulary, and from what top-k, min-p and top-p keep of it.

All is done row by row, and what a row gives is the same whatever stands in the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from opgraft.engine.sampling.greatest_values import BLOCK, blocks_of, likeliest
from opgraft.engine.sampling.nucleus import within_nucleus
from opgraft.engine.sampling.random_numbers import first_to_arrive
from torch import Tensor

CANDIDATES = (64, 2048)
"""Numbers of likeliest tokens among which those that the filters keep are looked for, before the whole vocabulary."""


@dataclass(frozen=True)
class Filters:
    """Filters of some rows, each ``[n, 1]``.

    Attributes:
        top_k: int64; the vocabulary's size or more for all tokens.
        top_p: float64; infinite for all tokens.
        min_p: float64, the logarithm of the share; ``-inf`` for all tokens.
        whole: rows whose nucleus is a share of all tokens, for lack of top-k and min-p, bool.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    whole: Tensor

    @classmethod
    def of(
        cls,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        device: torch.device,
    ) -> Filters:
        """Make the filters of rows from their values as ``SamplingParams`` has them."""
        most = torch.iinfo(torch.int64).max
        k = torch.tensor([min(value, most) or most for value in top_k], device=device)
        p = torch.tensor(
            [value if value < 1 else float("inf") for value in top_p],
            dtype=torch.float64,
            device=device,
        )
        # As precise as the logits it is compared with.
        share = torch.tensor(min_p, dtype=torch.float64, device=device).log().float().double()
        whole = torch.tensor(
            [not (one or other) for one, other in zip(top_k, min_p, strict=True)], device=device
        )
        return cls(k.unsqueeze(1), p.unsqueeze(1), share.unsqueeze(1), whole.unsqueeze(1))

    def take(self, rows: Tensor | slice) -> Filters:
        """Return the filters of some of the rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.whole[rows])


def draw(scaled: Tensor, keys: Tensor) -> Tensor:
    """Draw a token of each row from the distribution over the whole vocabulary.

    First a block of the vocabulary is drawn and then a token of it, which takes a number for each block, not for each
    token. Logits that differ by rounding nearly always give the same token.

    Args:
        scaled: ``[n, vocabulary]`` float32, logits over temperature, less the greatest of the row.
        keys: ``[n, 1]`` int64, of ``random_numbers.noise_key``.

    Returns:
        Tokens ``[n]``, int64.
    """
    return _draw_by(scaled.exp(), keys)


def _draw_by(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw by weights ``[n, vocabulary]`` that need not add up to 1."""
    mass = blocks_of(weights, 0.0)
    block = _draw_block(_totals(mass), keys)
    ids = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inner = mass[torch.arange(len(mass), device=mass.device), block.squeeze(1)].double()
    return ids.gather(1, first_to_arrive(inner, keys, ids).unsqueeze(1)).squeeze(1)


def _draw_among_ids(weights: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Draw by weights ``[n, candidates]``, float64, of some ids, just as ``_draw_by`` does with 0 for all others."""
    of_block = ids // BLOCK
    totals = weights.new_zeros(len(weights), int(of_block.max()) + 1).scatter_add_(
        1, of_block, weights
    )
    inner = weights.where(of_block == _draw_block(totals, keys), 0.0)
    return ids.gather(1, first_to_arrive(inner, keys, ids).unsqueeze(1)).squeeze(1)


def _draw_block(totals: Tensor, keys: Tensor) -> Tensor:
    """Draw blocks ``[n, 1]`` by their weights ``[n, blocks]``; counters below 0 are those of no token."""
    return first_to_arrive(
        totals, keys, ~torch.arange(totals.shape[1], device=totals.device)
    ).unsqueeze(1)


def draw_filtered(scaled: Tensor, filters: Filters, keys: Tensor) -> Tensor:
    """Draw a token of each row from what min-p, top-k and top-p keep of it, in this order.

    Args:
        scaled, keys: as for ``draw``.
        filters: of these rows.

    Returns:
        Tokens ``[n]``, int64.
    """
    whole = bool((filters.whole & filters.top_p.isfinite()).any())
    mass = scaled.exp() if whole else None
    total = (
        scaled.new_zeros(len(scaled), dtype=torch.float64)
        if mass is None
        else _totals(blocks_of(mass, 0.0)).sum(-1)
    )
    tokens, left = _draw_among(CANDIDATES[0], scaled, filters, total, keys)
    if not len(left):
        return tokens
    by_rank = filters.top_k[left, 0] < scaled.shape[1]
    wide, ranked = left[~by_rank], left[by_rank]
    if len(wide):
        some, theirs = filters.take(wide), scaled[wide]
        weights = theirs.exp() if mass is None else mass if len(wide) == len(mass) else mass[wide]
        tokens[wide] = _draw_by(within_nucleus(theirs, weights, some.top_p, some.min_p), keys[wide])
    for size in (CANDIDATES[1], scaled.shape[1]):
        if len(ranked):
            given = scaled[ranked], filters.take(ranked), total[ranked], keys[ranked]
            tokens[ranked], later = _draw_among(size, *given)
            ranked = ranked[later]
    return tokens


def _draw_among(
    size: int, scaled: Tensor, filters: Filters, total: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw among a number of the likeliest tokens; return tokens, and the rows in which more of them are kept."""
    values, ids = likeliest(scaled, size)
    values = values.double()
    limit, ties, needed = _limits(values, filters, total)
    last = values[:, -1:]
    more = (last >= needed) & ~last.isneginf() & (size < scaled.shape[1])
    return _draw_kept(values, ids, limit, ties, keys), more.squeeze(1).nonzero().squeeze(1)


def _totals(mass: Tensor) -> Tensor:
    """Return the sums ``[n, blocks]`` of blocks in float64, in an order that the number of rows does not change.

    A block is added up in float32: a copy of all rows in float64 would take longer than all that is done with it.
    """
    return mass.sum(-1).double()


def _limits(values: Tensor, filters: Filters, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the least logit that is kept of each row, how many tokens with just that logit are, and what that rests on.

    Args:
        values: ``[n, candidates]`` float64, the greatest of ``scaled``, descending.
        filters: of these rows.
        total: ``[n]``, sum of ``exp(scaled)`` over the vocabulary, of rows that are filtered by top-p alone.

    Returns:
        Each ``[n, 1]``. They are right if all logits from the third on are among the candidates.
    """
    candidates = values.shape[1]
    least = values.gather(1, (filters.top_k - 1).clamp(max=candidates - 1))
    least = least.where(filters.top_k <= candidates, float("-inf")).maximum(filters.min_p)
    kept = values >= least
    reached = (values.exp() * kept).cumsum(-1)
    all_of_it = torch.where(filters.whole, total.unsqueeze(1), reached[:, -1:])
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    count = (kept & (before < filters.top_p * all_of_it)).sum(-1, keepdim=True)
    nucleus = filters.top_p.isfinite()
    limit = torch.where(nucleus, values.gather(1, count - 1), least)
    ties = torch.where(nucleus, count - (values > limit).sum(-1, keepdim=True), candidates)
    return limit, ties, torch.where(filters.whole, limit, least)


def _draw_kept(values: Tensor, ids: Tensor, limit: Tensor, ties: Tensor, keys: Tensor) -> Tensor:
    """Draw among the candidates above a limit and, of those at it, the first in the order of the vocabulary."""
    ids, order = ids.sort(dim=-1)
    values = values.gather(1, order)
    level = values == limit
    kept = (values > limit) | (level & (level.cumsum(-1) <= ties))
    return _draw_among_ids(values.exp() * kept, ids, keys)
