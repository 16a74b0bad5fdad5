"""Linear layers with quantized weights.

With few rows the kernel reads the codes as they lie in memory. With many rows it turns some rows
of the weight at a time into plain numbers. ``int8_dynamic_linear`` multiplies 8-bit integers.

Codes in tiles are multiplied as bytes. The inputs become integers of as many bytes as their dtype
needs.

The native definition runs in two cases:

- if the inputs of a group are no multiple of 16, or of 32 for codes of 4 bits and in tiles. One
  group for all inputs may have any size;
- if codes lie in tiles, and the path in force multiplies no bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from opgraft import functional
from opgraft.kernels import TILE
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opgraft_cpu_kernels.arguments import refusal
from opgraft_cpu_kernels.kernels import DTYPES, REFUSED, op
from opgraft_cpu_kernels.library import path_or_none

LANES = {torch.int8: 16, torch.uint8: 32}
"""Dtype of the codes → the number of inputs that the kernels read by one scale."""

TILED = ("amx", "avx512_bf16")
"""The paths that multiply bytes, and so take codes in tiles."""


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``opgraft.functional.quantized_linear``. With few rows, weights become float32."""
    named = {"x": x, "weight": weight, "scales": scales, "offsets": offsets, "bias": bias}
    if _takes("quantized_linear", named) and in_lanes(x.shape[-1], weight, scales):
        try:
            return _quantized_linear(x, weight, scales, offsets, bias)
        except REFUSED:
            pass
    return functional.quantized_linear.native(x, weight, scales, offsets, bias)


def int8_dynamic_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``opgraft.functional.int8_dynamic_linear``, with sums in 32-bit integers."""
    named = {"x": x, "weight": weight, "scales": scales, "bias": bias}
    if _takes("int8_dynamic_linear", named) and x.shape[-1]:
        try:
            return _int8_dynamic_linear(x, weight, scales, bias)
        except REFUSED:
            pass
    return functional.int8_dynamic_linear.native(x, weight, scales, bias)


def _takes(name: str, tensors: dict[str, Tensor | None]) -> bool:
    """Return True if the kernel may be called with these tensors, of which some may be None."""
    x = tensors["x"]
    scales = tensors["scales"]
    if x is None or scales is None:
        return False
    if x.dtype not in DTYPES or scales.dtype not in DTYPES:
        return False
    if not x.is_cpu or not x.dim():
        return False
    # Compiled code cannot catch the error of an op. So it asks for all arguments beforehand.
    return not (is_dynamo_compiling() and refusal(name, tensors))


def in_lanes(inputs: int, weight: Tensor, scales: Tensor) -> bool:
    """Return True if the kernel can take the groups of a weight.

    Args:
        inputs: the number of inputs of the layer.
        weight: codes, ``[outputs, ...]``, or ``[tiles, ..., ...]``.
        scales: of as many dimensions, the groups in the second one.
    """
    tiled = weight.dim() == 3
    if tiled and path_or_none() not in TILED:
        return False
    groups = scales.shape[1] if scales.dim() == weight.dim() else 0
    if groups == 1:
        return True
    lanes = TILE if tiled else LANES.get(weight.dtype, 0)
    return groups > 0 and lanes > 0 and inputs % (lanes * groups) == 0


_quantized_linear: Callable[..., Tensor] = op("quantized_linear")
_int8_dynamic_linear: Callable[..., Tensor] = op("int8_dynamic_linear")
