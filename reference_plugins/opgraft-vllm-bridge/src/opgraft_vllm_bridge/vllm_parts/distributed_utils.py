"""``vllm.distributed.utils``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.errors import LayerError


def divide(numerator: int, denominator: int) -> int:
    """Divide evenly.

    Raises:
        LayerError: there is a remainder.
    """
    if numerator % denominator:
        raise LayerError(
            f"{denominator} parts do not divide {numerator}: choose sizes that divide evenly"
        )
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Cut a tensor into equal parts of its last dimension, views if they need not be contiguous."""
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else parts
