"""Collectives of torch that were renamed: the older names warn where the newer ones exist."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather into one tensor; ``all_gather_into_tensor`` until torch 2.12."""

reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce and scatter one tensor; ``reduce_scatter_tensor`` until torch 2.12."""
