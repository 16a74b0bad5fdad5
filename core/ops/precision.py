"""The precision that native definitions compute in."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in for inputs of ``dtype``: at least float32, and float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)
