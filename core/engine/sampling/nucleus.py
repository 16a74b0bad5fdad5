"""The nucleus of a flat distribution, of many tokens, without sorting them all."""

from __future__ import annotations

import torch
from opgraft.engine.sampling.blocks import likeliest
from torch import Tensor

BUCKETS = 1024
"""Ranges of logits; the last holds all that are less than ``exp(-BUCKETS / PER_UNIT)`` times as likely as the best."""

PER_UNIT = 32
"""Ranges by which a logit 1 lower is further: small enough that few tokens share the one in which the nucleus ends."""


def within_nucleus(scaled: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the logits with those that min-p and then top-p take out as ``-inf``.

    The probabilities are added up by range of logits. The nucleus ends in one of the ranges, and only the tokens of
    that one are sorted.

    Args:
        scaled: ``[n, vocabulary]`` float32, less the greatest of the row.
        top_p, min_p: ``[n, 1]`` as in ``Filters``.
    """
    rows = len(scaled)
    least = min_p.float()
    range_of = (scaled * -PER_UNIT).clamp_(max=BUCKETS - 1).long()
    first = torch.arange(rows, device=scaled.device).unsqueeze(1) * BUCKETS
    mass = torch.where(scaled >= least, scaled.exp(), 0.0).double()
    sums = torch.bincount((range_of + first).flatten(), weights=mass.flatten(), minlength=rows * BUCKETS)
    reached = sums.view(rows, BUCKETS).cumsum(-1)
    wanted = torch.minimum(top_p, torch.ones_like(top_p)) * reached[:, -1:]
    end = torch.searchsorted(reached, wanted)
    inside = scaled.where((range_of == end) & (scaled >= least), float("-inf"))
    values, ids = likeliest(inside, int(inside.isfinite().sum(-1).max()))
    before = torch.where(end > 0, reached.gather(1, (end - 1).clamp(min=0)), 0.0)
    sums_inside = before + torch.nn.functional.pad(values.double().exp().cumsum(-1)[:, :-1], (1, 0))
    count = (values.isfinite() & ((sums_inside < wanted) | top_p.isinf())).sum(-1, keepdim=True).clamp(min=1)
    limit = values.gather(1, count - 1)
    kept = scaled.masked_fill(scaled < limit, float("-inf"))
    _drop_ties(kept, values, ids, limit, count - (values > limit).sum(-1, keepdim=True))
    return kept


def _drop_ties(kept: Tensor, values: Tensor, ids: Tensor, limit: Tensor, ties: Tensor) -> None:
    """Keep as many of the tokens with just the logit of the limit as there shall be, the lowest ids first."""
    ids, order = ids.sort(dim=-1)
    level = values.gather(1, order) == limit
    rows, places = (level & (level.cumsum(-1) > ties)).nonzero(as_tuple=True)
    kept[rows, ids[rows, places]] = float("-inf")
