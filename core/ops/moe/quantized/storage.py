"""The storage of quantized weights of experts, and the plain weight that one expert's codes stand for.

Of codes ``[experts, out, …]`` and scales ``[experts, out, groups]`` their dtypes tell the format:

- ``int8`` and ``uint8`` beside floating-point scales are those of ``opgraft.ops.linear.quantized.storage``: 8 bits, or
  4 bits packed, with a scale and perhaps an offset for each group of inputs.
- 8-bit floating point, ``[experts, out, in]``: a number is ``code · scale`` of its group of inputs.
- ``uint8`` beside scales in ``float8_e8m0fnu`` is MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 inputs share a
  power of two. A byte has two numbers in ``e2m1``, that of the lower bits first; a row has
  ``16 · ceil(in / 32)`` bytes, the last block filled up.
"""

from __future__ import annotations

import torch
from opgraft.ops.linear.quantized.storage import dequantize, packed_size
from opgraft.ops.quantization.fp4 import MX_GROUP, fp4_numbers
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def is_mxfp4(scales: Tensor) -> bool:
    """Tell whether scales are those of MXFP4."""
    return scales.dtype == torch.float8_e8m0fnu


def storage_shapes(weight: Tensor, scales: Tensor, in_features: int) -> tuple[int, int | None]:
    """Return the expected last dimension of codes of so many inputs, and of scales; ``None`` for any divisor."""
    if is_mxfp4(scales):
        blocks = -(-in_features // MX_GROUP)
        return blocks * MX_GROUP // 2, blocks
    return (packed_size(in_features) if weight.dtype == torch.uint8 else in_features), None


def dequantize_expert(
    weight: Tensor, scales: Tensor, offsets: Tensor | None, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Return the plain weight ``[out, in_features]`` of one expert, computed in ``dtype``."""
    if is_mxfp4(scales):
        scaled = fp4_numbers(weight, dtype).reshape(*scales.shape, MX_GROUP) * scales.to(
            dtype
        ).unsqueeze(-1)
        return scaled.flatten(1)[:, :in_features]
    if weight.dtype in FP8:
        groups = weight.to(dtype).reshape(*scales.shape, in_features // scales.shape[1])
        return (groups * scales.to(dtype).unsqueeze(-1)).flatten(1)
    return dequantize(weight, scales, offsets, in_features, dtype)
