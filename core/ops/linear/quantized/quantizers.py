"""Quantize plain weights to the codes and scales of this family's ops.

Rows are read a few million numbers at a time, so the memory for copies stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from opgraft.ops.checks import expect_choice, expect_floating
from opgraft.ops.linear.quantized.functional import INT8_MAX, SMALLEST_SCALE
from opgraft.ops.linear.quantized.storage import MIDDLE, pack_int4
from opgraft.ops.quantization.functional import FP8_MAX, quant_fp8_static, smallest_scale
from torch import Tensor
from torch.nn import functional as F

AT_ONCE = 1 << 22
"""Numbers of a weight to read at once."""

SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
"""Parts of a group's range to try for four bits. A smaller range has finer steps."""

INT4_MAX = 15
"""The largest four-bit code."""


def quantize_int8(weight: Tensor, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a weight to 8 bits, ``code · scale``, by the largest magnitude of each group.

    Codes are rounded to the nearest, ties to even.

    Args:
        weight: ``[out_features, in_features]`` in any floating-point dtype.
        group_size: inputs of a scale; all of a row by default.

    Returns:
        Codes ``[out_features, in_features]`` in ``int8``, and scales ``[out_features, groups]`` in
        float32.

    Raises:
        ValueError: the dtype or the shape does not fit, or ``group_size`` does not divide
            ``in_features``.
    """
    codes, scales = _by_rows("quantize_int8", weight, group_size, _int8)
    return codes, scales


def quantize_int4(
    weight: Tensor, group_size: int | None = None, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a weight to 4 bits, ``code · scale + offset``, in the best range of each group.

    Each of ``SHRINKS`` shrinks the range from the smallest to the largest number. The range with
    the smallest sum of squared errors wins. Scales and offsets are rounded to the dtype of the
    weight before codes are computed.

    Args:
        weight: ``[out_features, in_features]`` in any floating-point dtype.
        group_size: inputs of a scale and an offset; all of a row by default.
        symmetric: without offsets: ``(code - 8) · scale``.

    Returns:
        Packed codes ``[out_features, 64 · ceil(in_features / 128)]`` in ``uint8``, then scales and
        offsets ``[out_features, groups]`` in the dtype of the weight. Symmetric: ``None`` for the
        offsets.

    Raises:
        ValueError: the dtype or the shape does not fit, or ``group_size`` does not divide
            ``in_features``.
    """
    if symmetric:
        codes, scales = _by_rows("quantize_int4", weight, group_size, _int4_symmetric)
        return codes, scales, None
    codes, scales, offsets = _by_rows("quantize_int4", weight, group_size, _int4)
    return codes, scales, offsets


def quantize_fp8(
    weight: Tensor, group_shape: Sequence[int] = (1, -1), dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantize a weight to 8-bit floating point, by the largest magnitude of each group.

    Args:
        weight: ``[out_features, in_features]`` in any floating-point dtype.
        group_shape: rows and inputs of a scale, -1 for all: ``(1, -1)`` per channel, ``(-1, -1)``
            per tensor, ``(128, 128)`` for blocks.
        dtype: an fp8 dtype.

    Returns:
        Codes ``[out_features, in_features]`` in ``dtype``, and scales in float32: ``[1]`` per
        tensor, else ``[row groups, column groups]``.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    _expect_matrix("quantize_fp8", weight)
    expect_choice("quantize_fp8", "dtype", dtype, tuple(FP8_MAX))
    rows, columns = weight.shape
    height, width = group_shape

    if height == -1:
        height = rows
    if width == -1:
        width = columns

    # Zeros fill up the last groups, and do not change a largest magnitude.
    missing = (0, -columns % width, 0, -rows % height)
    magnitudes = F.pad(weight.detach().abs().float(), missing)
    down = -(-rows // height)
    across = -(-columns // width)

    largest = magnitudes.reshape(down, height, across, width).amax((1, 3))
    scales = (largest / FP8_MAX[dtype]).clamp(min=smallest_scale(dtype))
    codes = quant_fp8_static.native(weight, scales, tuple(group_shape), dtype)

    if tuple(group_shape) == (-1, -1):
        scales = scales.reshape(1)
    return codes, scales


def _by_rows(
    op: str,
    weight: Tensor,
    group_size: int | None,
    quantize: Callable[[Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Quantize some rows at a time, as ``[rows, groups, group_size]``, and join the results."""
    _expect_matrix(op, weight)
    columns = weight.shape[1]
    size = columns if group_size is None else group_size
    if size < 1 or columns % size:
        raise ValueError(
            f"{op}: group_size is {size}, which {columns} inputs cannot be cut into; take a divisor"
        )

    rows_at_once = max(1, AT_ONCE // columns)
    results = []
    for part in torch.split(weight.detach(), rows_at_once):
        groups = part.reshape(part.shape[0], columns // size, size)
        results.append(quantize(groups))
    return tuple(torch.cat(tensors) for tensors in zip(*results, strict=True))


def _int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    values = groups.float()
    scales = (values.abs().amax(-1) / INT8_MAX).clamp(min=SMALLEST_SCALE)
    codes = (values / scales[..., None]).round().to(torch.int8)
    return codes.flatten(1), scales


def _int4_symmetric(groups: Tensor) -> tuple[Tensor, Tensor]:
    # The codes 0 to 15 reach from -8 to 7 scales, so either end is half a step off.
    widest = groups.float().abs().amax(-1) / (MIDDLE - 0.5)
    codes, scales, _ = _best_range(groups, widest, lambda scale: scale * -MIDDLE)
    return codes, scales


def _int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.float().aminmax(dim=-1)
    middle = (low + high) / 2
    widest = (high - low) / INT4_MAX
    return _best_range(groups, widest, lambda scale: middle - scale * (INT4_MAX / 2))


def _best_range(
    groups: Tensor, widest: Tensor, offset_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, scales and offsets with the least squared error of each group.

    Args:
        groups: ``[rows, groups, group_size]``.
        widest: the scale of the whole range, ``[rows, groups]``.
        offset_of: the offset for a scale.
    """
    dtype = groups.dtype
    values = groups.float()

    least_loss = torch.full_like(widest, torch.inf)
    codes = torch.zeros_like(values)
    scales = torch.zeros_like(widest)
    offsets = torch.zeros_like(widest)
    for shrink in SHRINKS:
        # Rounded first, so that the codes fit the scales in the storage.
        scale = (widest * shrink).clamp(min=torch.finfo(dtype).tiny).to(dtype).float()
        offset = offset_of(scale).to(dtype).float()
        step = scale[..., None]
        shift = offset[..., None]
        found = ((values - shift) / step).round().clamp(0, INT4_MAX)
        loss = (found * step + shift - values).square().sum(-1)
        is_better = loss < least_loss
        least_loss = torch.where(is_better, loss, least_loss)
        codes = torch.where(is_better[..., None], found, codes)
        scales = torch.where(is_better, scale, scales)
        offsets = torch.where(is_better, offset, offsets)
    return pack_int4(codes.flatten(1)), scales.to(dtype), offsets.to(dtype)


def _expect_matrix(op: str, weight: Tensor) -> None:
    expect_floating(op, "weight", weight)
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected [out_features, in_features]"
        )
