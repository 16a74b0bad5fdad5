"""Drawing tokens: from the whole vocabulary, or from the tokens that min-p, top-k and top-p keep.

Each row gives the same token with any other rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from opgraft.engine.sampling.greatest_values import BLOCK, blocks_of, greatest_values
from opgraft.engine.sampling.nucleus import within_nucleus
from opgraft.engine.sampling.random_numbers import first_to_arrive
from torch import Tensor

CANDIDATES = (64, 2048)
"""Numbers of likeliest tokens to filter first.

If the filters keep more tokens, the next number is tried, and the whole vocabulary in the end.
"""


@dataclass(frozen=True)
class Filters:
    """Filters of some rows, each ``[n, 1]``.

    Attributes:
        top_k: int64; at least the vocabulary's size for all tokens.
        top_p: float64; infinite for all tokens.
        min_p: float64, the logarithm of the share; ``-inf`` for all tokens.
        whole: bool; True for rows without top-k and min-p. Their nucleus is a share of all tokens.
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
        """Make the filters of rows from the values of ``SamplingParams``."""
        most = torch.iinfo(torch.int64).max
        counts = [min(value, most) or most for value in top_k]
        shares = [value if value < 1 else float("inf") for value in top_p]
        unlimited = [not (k or p) for k, p in zip(top_k, min_p, strict=True)]
        k = torch.tensor(counts, device=device)
        p = torch.tensor(shares, dtype=torch.float64, device=device)
        # Rounded to float32, because logits are compared with these numbers.
        exact = torch.tensor(min_p, dtype=torch.float64, device=device).log()
        share = exact.float().double()
        whole = torch.tensor(unlimited, device=device)
        columns = (each.unsqueeze(1) for each in (k, p, share, whole))
        return cls(*columns)

    def take(self, rows: Tensor | slice) -> Filters:
        """Return the filters of some of the rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.whole[rows])


def draw(scaled: Tensor, keys: Tensor) -> Tensor:
    """Draw a token of each row from the distribution over the whole vocabulary.

    First a block of the vocabulary is drawn, then a token of the block. This takes a random number
    per block, not per token. If logits differ by rounding only, the token is nearly always the
    same.

    Args:
        scaled: ``[n, vocabulary]`` float32, logits divided by the temperature, less the greatest of
            the row.
        keys: ``[n, 1]`` int64, from ``random_numbers.noise_key``.

    Returns:
        Tokens ``[n]``, int64.
    """
    return _draw_by(scaled.exp(), keys)


def _draw_by(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw by weights ``[n, vocabulary]``. The sum of a row need not be 1."""
    mass = blocks_of(weights, 0.0)
    block = _draw_block(_totals(mass), keys)
    ids = block * BLOCK + torch.arange(BLOCK, device=block.device)
    rows = torch.arange(len(mass), device=mass.device)
    inner = mass[rows, block.squeeze(1)].double()
    return _draw_id(inner, ids, keys)


def _draw_among_ids(weights: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Draw by weights ``[n, candidates]``, float64, of some ids.

    The result is the same as that of ``_draw_by`` with weights of 0 for all other ids.
    """
    of_block = ids // BLOCK
    num_blocks = int(of_block.max()) + 1
    totals = weights.new_zeros(len(weights), num_blocks).scatter_add_(1, of_block, weights)
    inner = weights.where(of_block == _draw_block(totals, keys), 0.0)
    return _draw_id(inner, ids, keys)


def _draw_id(weights: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    place = first_to_arrive(weights, keys, ids)
    return ids.gather(1, place.unsqueeze(1)).squeeze(1)


def _draw_block(totals: Tensor, keys: Tensor) -> Tensor:
    """Draw blocks ``[n, 1]`` by weights ``[n, blocks]``."""
    # Negative counters, so that no token has the same random number as a block.
    counters = ~torch.arange(totals.shape[1], device=totals.device)
    return first_to_arrive(totals, keys, counters).unsqueeze(1)


def draw_filtered(scaled: Tensor, filters: Filters, keys: Tensor) -> Tensor:
    """Draw a token of each row from the tokens that min-p, top-k and top-p keep, in this order.

    Args:
        scaled, keys: as for ``draw``.
        filters: of these rows.

    Returns:
        Tokens ``[n]``, int64.
    """
    vocabulary = scaled.shape[1]
    # The sum over the vocabulary is computed only for rows with top-p alone.
    mass = None
    total = scaled.new_zeros(len(scaled), dtype=torch.float64)
    has_top_p_alone = filters.whole & filters.top_p.isfinite()
    if bool(has_top_p_alone.any()):
        mass = scaled.exp()
        total = _totals(blocks_of(mass, 0.0)).sum(-1)
    tokens, left = _draw_among(CANDIDATES[0], scaled, filters, total, keys)
    if not len(left):
        return tokens
    has_top_k = filters.top_k[left, 0] < vocabulary
    wide = left[~has_top_k]
    if len(wide):
        tokens[wide] = _draw_wide(scaled, mass, filters, wide, keys)
    _draw_ranked(tokens, left[has_top_k], scaled, filters, total, keys)
    return tokens


def _draw_ranked(
    tokens: Tensor, rows: Tensor, scaled: Tensor, filters: Filters, total: Tensor, keys: Tensor
) -> None:
    """Draw for ``rows`` with top-k that few candidates did not decide; write to ``tokens``."""
    # Sorting the vocabulary takes longest, so more candidates are tried first.
    for size in (CANDIDATES[1], scaled.shape[1]):
        if not len(rows):
            return
        some = filters.take(rows)
        drawn, later = _draw_among(size, scaled[rows], some, total[rows], keys[rows])
        tokens[rows] = drawn
        rows = rows[later]


def _draw_wide(
    scaled: Tensor, mass: Tensor | None, filters: Filters, rows: Tensor, keys: Tensor
) -> Tensor:
    """Draw for rows without top-k that keep many tokens. May write to ``mass``."""
    own = scaled[rows]
    if mass is None:
        weights = own.exp()
    elif len(rows) == len(mass):
        weights = mass
    else:
        weights = mass[rows]
    some = filters.take(rows)
    kept = within_nucleus(own, weights, some.top_p, some.min_p)
    return _draw_by(kept, keys[rows])


def _draw_among(
    size: int, scaled: Tensor, filters: Filters, total: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw among the ``size`` likeliest tokens of each row.

    Returns:
        Tokens, and the numbers of the rows with a wrong token, because filters keep more tokens.
    """
    values, ids = greatest_values(scaled, size)
    values = values.double()
    limit, ties, needed = _limits(values, filters, total)
    last = values[:, -1:]
    # Tokens after the last candidate may be kept, too.
    keep_more = (last >= needed) & ~last.isneginf() & (size < scaled.shape[1])
    wrong_rows = keep_more.squeeze(1).nonzero().squeeze(1)
    return _draw_kept(values, ids, limit, ties, keys), wrong_rows


def _totals(mass: Tensor) -> Tensor:
    """Return the sums ``[n, blocks]`` of blocks in float64, the same for any number of rows."""
    # A block is added up in float32. A copy of all rows in float64 would take longer than the rest.
    return mass.sum(-1).double()


def _limits(values: Tensor, filters: Filters, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the least logit to keep in each row, and the number of tokens with just this logit.

    Args:
        values: ``[n, candidates]`` float64, the greatest of ``scaled``, descending.
        filters: the filters of these rows.
        total: ``[n]``, sum of ``exp(scaled)`` over the vocabulary, for rows with top-p alone.

    Returns:
        Three tensors ``[n, 1]``: the least logit, the number, and a bound. The first two are right
        if all logits down to the bound are among the candidates.
    """
    candidates = values.shape[1]
    place_of_kth = (filters.top_k - 1).clamp(max=candidates - 1)
    kth = values.gather(1, place_of_kth)
    # With more tokens than candidates, top-k keeps all candidates.
    by_top_k = kth.where(filters.top_k <= candidates, float("-inf"))
    least = by_top_k.maximum(filters.min_p)
    kept = values >= least
    reached = (values.exp() * kept).cumsum(-1)
    mass = torch.where(filters.whole, total.unsqueeze(1), reached[:, -1:])
    likelier = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    in_nucleus = kept & (likelier < filters.top_p * mass)
    count = in_nucleus.sum(-1, keepdim=True)
    limit, ties = _last_of_nucleus(values, filters, least, count)
    bound = torch.where(filters.whole, limit, least)
    return limit, ties, bound


def _last_of_nucleus(
    values: Tensor, filters: Filters, least: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the least logit of ``count`` tokens, or ``least`` without top-p, and its ties."""
    has_top_p = filters.top_p.isfinite()
    last = values.gather(1, count - 1)
    limit = torch.where(has_top_p, last, least)
    is_above = values > limit
    above = is_above.sum(-1, keepdim=True)
    ties = torch.where(has_top_p, count - above, values.shape[1])
    return limit, ties


def _draw_kept(values: Tensor, ids: Tensor, limit: Tensor, ties: Tensor, keys: Tensor) -> Tensor:
    """Draw among the candidates above a limit, and the first ``ties`` candidates at the limit.

    The first are those with the lowest ids.
    """
    ids, order = ids.sort(dim=-1)
    values = values.gather(1, order)
    above = values > limit
    level = values == limit
    first = level.cumsum(-1) <= ties
    kept = above | (level & first)
    masses = values.exp() * kept
    return _draw_among_ids(masses, ids, keys)
