"""Equal parts: ``vllm.distributed.utils``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.errors import LayerError


def divide(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator``.

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
    """Return equal parts of a tensor, cut along the last dimension.

    The parts are views, unless ``contiguous_split_chunks`` asks for contiguous tensors.
    """
    size = divide(tensor.shape[-1], num_partitions)
    parts = torch.split(tensor, size, dim=-1)
    if contiguous_split_chunks:
        return [part.contiguous() for part in parts]
    return parts
