"""The nucleus of a flat distribution, of many tokens, without sorting them all."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKETS = 1024
"""Ranges of logits; the last holds all that are less than ``exp(-BUCKETS / PER_UNIT)`` times as likely as the best."""

PER_UNIT = 32
"""Ranges by which a logit 1 lower is further: small enough that few tokens share the one in which the nucleus ends."""


def within_nucleus(scaled: Tensor, mass: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the mass with 0 for the tokens that min-p and then top-p take out; both are written to.

    The probabilities are added up by range of logits. The nucleus ends in one of the ranges, and only the tokens of
    that one are sorted.

    Args:
        scaled: ``[n, vocabulary]`` float32, less the greatest of the row.
        mass: ``exp(scaled)``.
        top_p, min_p: ``[n, 1]`` as in ``Filters``.
    """
    least = min_p.float()
    if bool(least.isfinite().any()):
        mass *= scaled >= least
    range_of = (scaled * -PER_UNIT).clamp_(max=BUCKETS - 1).long()
    # float32 to here: a copy of all rows in float64 would take longer than the rest
    reached = (
        mass.new_zeros(len(scaled), BUCKETS).scatter_add_(1, range_of, mass).double().cumsum(-1)
    )
    wanted = torch.minimum(top_p, torch.ones_like(top_p)) * reached[:, -1:]
    end = torch.searchsorted(reached, wanted)
    values, ids = _descending(scaled, range_of == end, least)
    before = torch.where(end > 0, reached.gather(1, (end - 1).clamp(min=0)), 0.0)
    sums_inside = before + torch.nn.functional.pad(values.double().exp().cumsum(-1)[:, :-1], (1, 0))
    count = (
        (values.isfinite() & ((sums_inside < wanted) | top_p.isinf()))
        .sum(-1, keepdim=True)
        .clamp(min=1)
    )
    limit = values.gather(1, count - 1)
    mass *= scaled.ge_(limit)  # numbers: to make them of truth values takes longer
    _drop_ties(mass, values, ids, limit, count - (values > limit).sum(-1, keepdim=True))
    return mass


def _descending(scaled: Tensor, chosen: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen values of each row, descending, ``-inf`` for those below the least, and their ids."""
    row, id_ = chosen.nonzero(as_tuple=True)
    counts = row.bincount(minlength=len(scaled))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    values = scaled.new_full((len(scaled), int(counts.max())), float("-inf"))
    ids = torch.zeros_like(values, dtype=torch.int64)
    found = scaled[row, id_]
    values[row, place] = found.where(found >= least[row, 0], float("-inf"))
    ids[row, place] = id_
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _drop_ties(mass: Tensor, values: Tensor, ids: Tensor, limit: Tensor, ties: Tensor) -> None:
    """Keep as many of the tokens with just the logit of the limit as there shall be, the lowest ids first."""
    ids, order = ids.sort(dim=-1)
    level = values.gather(1, order) == limit
    rows, places = (level & (level.cumsum(-1) > ties)).nonzero(as_tuple=True)
    mass[rows, ids[rows, places]] = 0.0
