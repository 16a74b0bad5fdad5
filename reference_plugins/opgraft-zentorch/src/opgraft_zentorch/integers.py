"""Linear layers on 8-bit integers, with inputs quantized row by row."""

from __future__ import annotations

import torch
from opgraft import functional
from torch import Tensor

from opgraft_zentorch.library import DTYPES, OPERATORS, is_plain
from opgraft_zentorch.weights import PackedWeights, are_taken

_WEIGHTS = PackedWeights(OPERATORS.zentorch_weight_prepack_for_dynamic_qlinear.default)


def int8_dynamic_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``opgraft.functional.int8_dynamic_linear``.

    A row with an infinity or a NaN must become NaN. zentorch makes numbers of such a row, so the
    native definition runs.
    """
    packed = None
    if are_taken(x, weight, torch.int8) and _follow(x, weight, scales, bias):
        packed = _WEIGHTS.of(x, weight)
    if packed is None or not x.isfinite().all():
        return functional.int8_dynamic_linear.native(x, weight, scales, bias)
    if bias is not None:
        bias = bias.contiguous()
    out: Tensor = OPERATORS.zentorch_dynamic_qlinear.default(
        x.contiguous(),
        packed,
        # The operator multiplies in the dtype of the scales.
        scales.float().flatten(),
        bias,
        is_weight_prepacked=True,
    )
    return out


def _follow(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> bool:
    """Return True if the shapes go together. If not, the definition says what is wrong."""
    if x.dtype not in DTYPES or not is_plain(x, x.dtype):
        return False
    rows, columns = weight.shape
    if x.shape[-1] != columns:
        return False
    if scales.shape not in ((rows,), (rows, 1)):
        return False
    if not is_plain(scales, scales.dtype):
        return False
    if bias is None:
        return True
    # The operator reads as many numbers as there are rows.
    if bias.shape != (rows,):
        return False
    return is_plain(bias, x.dtype)
