"""``vllm.distributed.utils``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.ops.linear import sharding


def divide(numerator: int, denominator: int) -> int:
    """Divide evenly.

    Raises:
        LayerError: there is a remainder.
    """
    return sharding.divide(numerator, denominator, "a size")


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Cut a tensor into equal parts of its last dimension, views if they need not be contiguous."""
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else parts
