"""RMSNorm, alone and of a sum.

zentorch takes a matrix. Given another number of dimensions, zentorch writes outside of its result.
"""

from __future__ import annotations

import torch
from opgraft import functional
from torch import Tensor

from opgraft_zentorch.library import DTYPES, OPERATORS, is_plain


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, variance_size: int | None = None
) -> Tensor:
    """Compute ``opgraft.functional.rms_norm``."""
    if weight is None or variance_size is not None or not _taken(x, weight):
        return functional.rms_norm.native(x, weight, eps, variance_size)
    rows = _matrix(x)
    whole = weight.contiguous()
    out: Tensor = OPERATORS.zentorch_rms_norm.default(rows, whole, eps)
    return out.reshape(x.shape)


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``opgraft.functional.fused_add_rms_norm`` in float32.

    In bfloat16 zentorch rounds the sum before the norm, and the definition does not.
    """
    native = functional.fused_add_rms_norm.native
    if weight is None or variance_size is not None or not _taken(x, weight):
        return native(x, residual, weight, eps, variance_size)
    # The definition says what is wrong with another residual.
    if residual.shape != x.shape or not is_plain(residual, torch.float32):
        return native(x, residual, weight, eps, variance_size)
    # The operator writes the norm to its first argument, and the sum to the third.
    normed = _matrix(x).clone()
    total = _matrix(residual).clone()
    whole = weight.contiguous()
    OPERATORS.zentorch_add_rms_norm_.default(normed, whole, total, eps)
    shape = x.shape
    return normed.reshape(shape), total.reshape(shape)


def _taken(x: Tensor, weight: Tensor) -> bool:
    """Return True if the operator takes the rows and the weight."""
    dtype = x.dtype
    if dtype not in DTYPES or not is_plain(x, dtype):
        return False
    if not x.dim():
        return False
    # Without numbers, there is nothing to compute.
    if not x.numel():
        return False
    # The definition says what is wrong with another weight.
    if weight.shape != x.shape[-1:]:
        return False
    return is_plain(weight, dtype)


def _matrix(x: Tensor) -> Tensor:
    # The operator reads rows with gaps as if the gaps were numbers.
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    return rows.contiguous()
