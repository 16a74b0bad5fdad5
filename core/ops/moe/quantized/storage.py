"""The storage of quantized experts, and the plain weight of one expert.

Codes have the shape ``[experts, out, …]``, scales ``[experts, out, groups]``. The dtypes of both
decide the format:

- ``int8`` or ``uint8`` with floating-point scales: the 8 bits or the packed 4 bits of
  ``opgraft.ops.linear.quantized.storage``. Each group of inputs has a scale and perhaps an offset.
- 8-bit floating point, ``[experts, out, in]``: a number is ``code · scale`` of its group of inputs.
- ``uint8`` with scales in ``float8_e8m0fnu``: MXFP4 (OCP Microscaling Formats 1.0). Blocks of 32
  inputs share a power of two. A byte holds two numbers in ``e2m1``, the first in the lower bits. A
  row has ``16 · ceil(in / 32)`` bytes, the last block filled up.
"""

from __future__ import annotations

import torch
from opgraft.ops.linear.quantized.storage import dequantize, packed_size
from opgraft.ops.quantization.fp4 import MX_GROUP, fp4_numbers
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def is_mxfp4(scales: Tensor) -> bool:
    """Return True for scales of MXFP4."""
    return scales.dtype == torch.float8_e8m0fnu


def storage_shapes(weight: Tensor, scales: Tensor, in_features: int) -> tuple[int, int | None]:
    """Return the expected last dimensions of codes and scales.

    The second is ``None`` if any divisor of ``in_features`` fits.
    """
    if is_mxfp4(scales):
        blocks = -(-in_features // MX_GROUP)
        return blocks * MX_GROUP // 2, blocks
    if weight.dtype == torch.uint8:
        return packed_size(in_features), None
    return in_features, None


def dequantize_expert(
    weight: Tensor, scales: Tensor, offsets: Tensor | None, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Return the plain weight ``[out, in_features]`` of one expert, computed in ``dtype``."""
    if is_mxfp4(scales):
        blocks = fp4_numbers(weight, dtype).reshape(*scales.shape, MX_GROUP)
        scaled = blocks * scales.to(dtype).unsqueeze(-1)
        return scaled.flatten(1)[:, :in_features]
    if weight.dtype in FP8:
        group = in_features // scales.shape[1]
        groups = weight.to(dtype).reshape(*scales.shape, group)
        scaled = groups * scales.to(dtype).unsqueeze(-1)
        return scaled.flatten(1)
    return dequantize(weight, scales, offsets, in_features, dtype)
