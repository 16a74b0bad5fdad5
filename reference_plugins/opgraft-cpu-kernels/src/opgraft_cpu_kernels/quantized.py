"""Linear layers with quantized weights: on few rows over the codes as they are, on many over plain numbers, made of
some rows of the weight at a time; and on 8-bit integers throughout.

Codes in tiles are multiplied as bytes, with inputs that are integers of as many bytes as their dtype needs.

For groups whose size is no multiple of 16 (32 with 4 bits and in tiles), save one group for all inputs, the native
definition runs. It does for tiles on a path that multiplies no bytes, too.
"""

from __future__ import annotations

import torch
from opgraft import functional
from opgraft.kernels import TILE
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.library import path_or_none

LANES = {torch.int8: 16, torch.uint8: 32}
"""Inputs that kernels take to be of one group, by the dtype of the weight."""

TILED = ("amx", "avx512_bf16")
"""The paths that take codes in tiles."""


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the form of that name, with weights in float32 on few rows."""
    named = {"x": x, "weight": weight, "scales": scales, "offsets": offsets, "bias": bias}
    if _takes("quantized_linear", named) and in_lanes(x.shape[-1], weight, scales):
        try:
            return _quantized_linear(x, weight, scales, offsets, bias)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return functional.quantized_linear.native(x, weight, scales, offsets, bias)


def int8_dynamic_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute the form of that name, with sums in 32-bit integers."""
    if (
        _takes("int8_dynamic_linear", {"x": x, "weight": weight, "scales": scales, "bias": bias})
        and x.shape[-1]
    ):
        try:
            return _int8_dynamic_linear(x, weight, scales, bias)  # type: ignore[no-any-return]
        except REFUSED:
            pass
    return functional.int8_dynamic_linear.native(x, weight, scales, bias)


def _takes(name: str, tensors: dict[str, Tensor | None]) -> bool:
    """Tell whether the kernel may be called: compiled code cannot catch what it raises, so there all is asked."""
    x, scales = tensors["x"], tensors["scales"]
    if (
        x is None
        or scales is None
        or x.dtype not in DTYPES
        or scales.dtype not in DTYPES
        or not x.is_cpu
    ):
        return False
    return bool(x.dim()) and not (is_dynamo_compiling() and refusal(name, tensors))


def in_lanes(inputs: int, weight: Tensor, scales: Tensor) -> bool:
    """Tell whether so many inputs make groups that the kernel can take."""
    tiled = weight.dim() == 3
    if tiled and path_or_none() not in TILED:
        return False
    groups = scales.shape[1] if scales.dim() == weight.dim() else 0
    lanes = TILE if tiled else LANES.get(weight.dtype, 0)
    return groups == 1 or (groups > 0 and lanes > 0 and inputs % (lanes * groups) == 0)


_quantized_linear = op("quantized_linear")
_int8_dynamic_linear = op("int8_dynamic_linear")
