"""Keys and values in 8 bits: a row of codes for each token and head, and behind it the scale of the row.

A row is ``head_size`` codes and four bytes, the float32 ``scale``, so that an element is ``code · scale``. Each row has
a scale of its own, ``max(|x|) / largest code``: a token is written once and for all, whatever comes after it. Rows of
``torch.int8`` hold whole numbers from -127 to 127, rows of ``torch.uint8`` the bits of fp8 e4m3 (Micikevicius et al.,
arXiv:2209.05433). What is not finite makes its whole row NaN.
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
"""The dtypes of rows with scales, and the largest number that a code stands for."""


def row_size(head_size: int, dtype: torch.dtype | None) -> int:
    """Return the elements of a row of a cache of ``dtype``; of the model's own dtype if not given."""
    return head_size + SCALE_BYTES if dtype in LARGEST_CODES else head_size


def quantize_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x``, ``[..., head_size]``, as rows ``[..., head_size + 4]`` of ``dtype``, rounded to nearest even."""
    x = x.to(torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    scale = (largest / LARGEST_CODES[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale.masked_fill(~largest.isfinite(), math.nan)
    quotients = (x / scale).nan_to_num(0.0)
    codes = (
        quotients.round().to(dtype)
        if dtype == torch.int8
        else quotients.to(torch.float8_e4m3fn).view(dtype)
    )
    return torch.cat((codes, scale.view(dtype)), dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows ``[..., head_size + 4]`` as ``[..., head_size]`` in ``dtype``."""
    codes, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    numbers = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    exact = compute_dtype(dtype)
    # As bytes at any offset are no float32.
    scale = scale.clone(memory_format=torch.contiguous_format)
    return (numbers.to(exact) * scale.view(torch.float32).to(exact)).to(dtype)
