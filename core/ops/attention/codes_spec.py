"""Reference of rows of codes: each code stands for a number in a list."""

from __future__ import annotations

import torch
from opgraft.ops.quantization.spec import decoded, nearest
from torch import Tensor


def encoded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 rows as codes, with the scale of each row behind them."""
    largest = x.abs().amax(-1, keepdim=True)
    largest_code = 127 if dtype == torch.int8 else 448
    scale = (largest / largest_code).float()

    # Kernels divide in float32.
    quotients = (x / scale.double()).float().double()
    if dtype == torch.int8:
        codes = quotients.round().to(torch.int8)
    else:
        codes = nearest(quotients.contiguous(), torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((codes, scale.view(dtype)), -1)


def decoded_rows(rows: Tensor) -> Tensor:
    """Return rows of codes and scales in float64; rows of elements stay as they are."""
    if rows.dtype not in (torch.int8, torch.uint8):
        return rows

    codes = rows[..., :-4]
    scale = rows[..., -4:].contiguous().view(torch.float32).double()
    if rows.dtype == torch.int8:
        return codes.double() * scale

    # The highest of the 8 bits is the sign.
    sign = torch.where(codes >= 128, -1, 1)
    return sign * decoded(codes % 128, 3, 7) * scale
