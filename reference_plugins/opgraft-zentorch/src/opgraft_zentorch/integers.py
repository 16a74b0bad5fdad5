"""Linear layers on 8-bit integers, with inputs quantized row by row."""

from __future__ import annotations

import torch
from opgraft import functional
from opgraft.kernels import WeightCache, watched
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from opgraft_zentorch.library import DTYPES, OPERATORS, is_plain
from opgraft_zentorch.linear import LEAST_ROWS

_COPIES = WeightCache()


def int8_dynamic_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``opgraft.functional.int8_dynamic_linear``.

    A row with an infinity or a NaN must become NaN. zentorch makes numbers of such a row, so the
    native definition runs.
    """
    packed = None
    if _taken(x, weight) and _follow(x, weight, scales, bias):
        packed = _packed(x, weight)
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


def _taken(x: Tensor, weight: Tensor) -> bool:
    """Return True if inputs and codes have the right dtypes, and nobody looks on."""
    if is_dynamo_compiling() or watched():
        return False
    # A subclass of Tensor may compute by itself.
    if type(x) is not Tensor:
        return False
    if type(weight) not in (nn.Parameter, Tensor):
        return False
    if x.dtype not in DTYPES or not is_plain(x, x.dtype):
        return False
    if weight.dim() != 2 or not is_plain(weight, torch.int8):
        return False
    return bool(x.numel() and weight.numel())


def _follow(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> bool:
    """Return True if the shapes go together. If not, the definition says what is wrong."""
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


def _packed(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return the codes in zentorch's layout; None for few rows of a weight that is not frozen."""
    copied = _COPIES.copy_of(weight, _pack)
    if copied is not None:
        return copied
    fewest = LEAST_ROWS * weight.shape[1]
    if x.numel() < fewest:
        return None
    return _pack(weight.detach())


def _pack(weight: Tensor) -> Tensor:
    whole = weight.contiguous()
    packed: Tensor = OPERATORS.zentorch_weight_prepack_for_dynamic_qlinear.default(whole)
    return packed
