"""Weights in zentorch's own layout."""

from __future__ import annotations

from typing import Any

import torch
from opgraft.kernels import WeightCache, watched
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from opgraft_zentorch.library import is_plain

LEAST_ROWS = 16
"""A weight that is not frozen is packed in each call with at least this many rows."""


def are_taken(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return True if nobody looks on, and the weight is a plain matrix of a dtype."""
    # A compiler cannot see whether a weight is frozen.
    if is_dynamo_compiling():
        return False
    if watched():
        return False
    # A subclass of Tensor may compute by itself.
    if type(x) is not Tensor:
        return False
    if type(weight) not in (nn.Parameter, Tensor):
        return False
    if weight.dim() != 2 or not is_plain(weight, dtype):
        return False
    # zentorch prints an error if there is nothing to multiply.
    return bool(x.numel() and weight.numel())


class PackedWeights:
    """Packs weights for one operator.

    Args:
        operator: takes a contiguous weight, and returns the weight in the operator's layout.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._copies = WeightCache()

    def of(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """Return the packed weight; None for few rows of a weight that is not frozen."""
        copied = self._copies.copy_of(weight, self._pack)
        if copied is not None:
            return copied
        # There is no copy of a weight that is not frozen: its owner may write to the weight.
        fewest = LEAST_ROWS * weight.shape[1]
        if x.numel() < fewest:
            return None
        return self._pack(weight.detach())

    def _pack(self, weight: Tensor) -> Tensor:
        # The operator reads a weight with gaps as if the gaps were numbers.
        packed: Tensor = self._operator(weight.contiguous())
        return packed
