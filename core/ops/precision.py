"""The precision of native definitions."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in for inputs of ``dtype``: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
