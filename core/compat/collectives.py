"""Collectives of torch that were renamed, where older names warn, and what only private names tell of its groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather into one tensor; ``all_gather_into_tensor`` until torch 2.12."""

reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Reduce and scatter one tensor; ``reduce_scatter_tensor`` until torch 2.12."""


def time_limit(process_group: dist.ProcessGroup) -> float:
    """Return after how many seconds a collective fails that not every rank has joined; torch's own default if unknown.

    Only the backend of a group has it, and only by a private name.
    """
    try:
        return float(
            process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        )
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout.total_seconds()
