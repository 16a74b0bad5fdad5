"""Keys and values in 8 bits: a row of codes for each token and head, with the scale behind it.

A row is ``head_size`` codes and the four bytes of a float32 ``scale``. An element is
``code · scale``. Each row has its own scale, ``max(|x|) / largest code``, so later tokens never
change a row. Rows of ``torch.int8`` hold whole numbers from -127 to 127. Rows of ``torch.uint8``
hold the bits of fp8 e4m3 (Micikevicius et al., arXiv:2209.05433). An element that is not finite
makes the whole row NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from opgraft.ops.precision import compute_dtype
from torch import Tensor

SCALE_BYTES = 4
"""Bytes of the scale of a row."""

LARGEST_CODES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.int8: 127.0, torch.uint8: 448.0}
)
"""The dtypes of rows with scales, each with the largest number of a code."""


def row_size(head_size: int, dtype: torch.dtype | None) -> int:
    """Return the elements of a row in a cache of ``dtype``; ``None`` is the model's own dtype."""
    return head_size + SCALE_BYTES if dtype in LARGEST_CODES else head_size


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x``, ``[..., head_size]``, as rows ``[..., head_size + 4]`` of ``dtype``.

    Codes are rounded to nearest even.
    """
    x = x.to(torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    # A row of zeros has the scale zero otherwise.
    smallest = torch.finfo(torch.float32).tiny
    scale = (largest / LARGEST_CODES[dtype]).clamp(min=smallest)
    scale = scale.masked_fill(~largest.isfinite(), math.nan)

    quotients = (x / scale).nan_to_num(0.0)
    if dtype == torch.int8:
        codes = quotients.round().to(dtype)
    else:
        numbers = quotients.to(torch.float8_e4m3fn)
        codes = numbers.view(dtype)
    return torch.cat((codes, scale.view(dtype)), dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows ``[..., head_size + 4]`` as ``[..., head_size]`` in ``dtype``."""
    codes = rows[..., :-SCALE_BYTES]
    scale = rows[..., -SCALE_BYTES:]
    numbers = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    exact = compute_dtype(dtype)

    # Torch views bytes as float32 only if they are contiguous.
    scale = scale.clone(memory_format=torch.contiguous_format)
    product = numbers.to(exact) * scale.view(torch.float32).to(exact)
    return product.to(dtype)
