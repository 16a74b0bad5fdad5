"""The nucleus of a flat distribution with many tokens, without sorting all of them."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKETS = 1024
"""Ranges of logits.

The last range holds every token that is less than ``exp(-BUCKETS / PER_UNIT)`` times as likely as
the likeliest.
"""

PER_UNIT = 32
"""Ranges per unit of a logit: so many that few tokens lie in the range at the nucleus's end."""


def within_nucleus(scaled: Tensor, mass: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the mass with 0 for the tokens that min-p, and then top-p, take out.

    Probabilities are added up by range of logits. The nucleus ends in one of the ranges, and only
    the tokens of this range are sorted.

    Args:
        scaled: ``[n, vocabulary]`` float32, less the greatest of the row. Overwritten.
        mass: ``exp(scaled)``. Overwritten, and returned.
        top_p, min_p: ``[n, 1]`` as in ``Filters``.
    """
    least = min_p.float()
    if bool(least.isfinite().any()):
        mass *= scaled >= least
    range_of = (scaled * -PER_UNIT).clamp_(max=BUCKETS - 1).long()
    # float32 up to here: a copy of all rows in float64 would take longer than the rest.
    by_range = mass.new_zeros(len(scaled), BUCKETS).scatter_add_(1, range_of, mass)
    reached = by_range.double().cumsum(-1)
    wanted = torch.minimum(top_p, torch.ones_like(top_p)) * reached[:, -1:]
    end = torch.searchsorted(reached, wanted)
    values, ids = _descending(scaled, range_of == end, least)
    likelier = _mass_of_likelier(values, reached, end)
    is_kept = values.isfinite() & ((likelier < wanted) | top_p.isinf())
    # The likeliest token stays, also if top_p is smaller than its probability.
    count = is_kept.sum(-1, keepdim=True).clamp(min=1)
    _keep_likeliest(scaled, mass, values, ids, count)
    return mass


def _mass_of_likelier(values: Tensor, reached: Tensor, end: Tensor) -> Tensor:
    # For each token in the range ``end``, with the logits ``values``.
    last = (end - 1).clamp(min=0)
    previous = reached.gather(1, last)
    before = torch.where(end > 0, previous, 0.0)
    masses = values.double().exp()
    sums = masses.cumsum(-1)
    shifted = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    return before + shifted


def _keep_likeliest(
    scaled: Tensor, mass: Tensor, values: Tensor, ids: Tensor, count: Tensor
) -> None:
    """Set the mass to 0 below the last kept token. ``count`` tokens of the range are kept."""
    limit = values.gather(1, count - 1)
    # Comparing in place gives numbers. Truth values would have to be converted.
    mass *= scaled.ge_(limit)
    above = (values > limit).sum(-1, keepdim=True)
    _drop_ties(mass, values, ids, limit, count - above)


def _descending(scaled: Tensor, chosen: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen values of each row, descending, and their ids.

    Values below the least become ``-inf``.
    """
    row, id_ = chosen.nonzero(as_tuple=True)
    counts = row.bincount(minlength=len(scaled))
    first_of_row = counts.cumsum(0) - counts
    place = torch.arange(len(row), device=row.device) - first_of_row[row]
    values = scaled.new_full((len(scaled), int(counts.max())), float("-inf"))
    ids = torch.zeros_like(values, dtype=torch.int64)
    found = scaled[row, id_]
    values[row, place] = found.where(found >= least[row, 0], float("-inf"))
    ids[row, place] = id_
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _drop_ties(mass: Tensor, values: Tensor, ids: Tensor, limit: Tensor, ties: Tensor) -> None:
    """Keep ``ties`` of the tokens with just the logit of the limit, those with the lowest ids."""
    ids, order = ids.sort(dim=-1)
    level = values.gather(1, order) == limit
    is_surplus = level & (level.cumsum(-1) > ties)
    rows, places = is_surplus.nonzero(as_tuple=True)
    mass[rows, ids[rows, places]] = 0.0
