"""Collectives of torch under their new names, and the time limit of a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather into one tensor; ``all_gather_into_tensor`` until torch 2.12. The old name warns."""

reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""Reduce and scatter one tensor; ``reduce_scatter_tensor`` until torch 2.12. The old name warns."""


def time_limit(process_group: dist.ProcessGroup) -> float:
    """Return the seconds until a collective fails because a rank is missing.

    The default of torch is returned if a group does not tell.
    """
    try:
        # The backend of a group holds the limit, under a private name.
        backend = process_group._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout.total_seconds()


def functional_all_reduce() -> tuple[Any, Any]:
    """Return the operators of torch for a sum, and for waiting."""
    # The public functions are no operators: compilers replace the functions by the operators.
    operators = torch.ops._c10d_functional
    return operators.all_reduce.default, operators.wait_tensor.default


def functional_all_gather() -> tuple[Any, Any]:
    """Return the operators for gathering along dimension 0."""
    operators = torch.ops._c10d_functional
    return operators.all_gather_into_tensor.default, operators.wait_tensor.default
