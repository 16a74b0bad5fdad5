"""Reference of rows of codes, by the list of the numbers that codes stand for."""

from __future__ import annotations

import torch
from opgraft.ops.quantization.spec import decoded, nearest
from torch import Tensor


def encoded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode float64 rows by the list of the numbers that codes stand for, their scales behind them."""
    largest = x.abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        scale = (largest / 127).float()
        codes = (x / scale.double()).float().double().round().to(torch.int8)
    else:
        scale = (largest / 448).float()
        codes = nearest(
            (x / scale.double()).float().double().contiguous(), torch.float8_e4m3fn
        ).view(torch.uint8)
    return torch.cat((codes, scale.view(dtype)), -1)


def decoded_rows(rows: Tensor) -> Tensor:
    """Decode rows of codes and scales to float64; others are as they are."""
    if rows.dtype not in (torch.int8, torch.uint8):
        return rows
    codes, scale = rows[..., :-4], rows[..., -4:].contiguous().view(torch.float32).double()
    if rows.dtype == torch.int8:
        return codes.double() * scale
    return torch.where(codes >= 128, -1, 1) * decoded(codes % 128, 3, 7) * scale
