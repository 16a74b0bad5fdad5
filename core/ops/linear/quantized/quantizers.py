"""Quantizing plain weights, to the codes and scales that the ops of this family take. Weights are read a few million
numbers at a time, so that quantizing one takes little more memory than its result."""

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
"""Numbers of a weight that are read at once."""

SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
"""Parts of the range of a group that are tried for four bits: cutting off extremes can round all others less."""

INT4_MAX = 15
"""The largest four-bit code."""


def quantize_int8(weight: Tensor, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a weight to 8 bits, ``code · scale``, by the largest magnitude of each group; to nearest, ties to even.

    Args:
        weight: ``[out_features, in_features]`` in any floating-point dtype.
        group_size: inputs that share a scale; all of a row by default.

    Returns:
        Codes ``[out_features, in_features]`` in ``int8``, and scales ``[out_features, groups]`` in float32.

    Raises:
        ValueError: the dtype or the shape does not fit, or ``in_features`` cannot be cut into groups of that size.
    """
    codes, scales = _by_rows("quantize_int8", weight, group_size, _int8)
    return codes, scales


def quantize_int4(
    weight: Tensor, group_size: int | None = None, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a weight to 4 bits, ``code · scale + offset``, in the range of each group that loses least.

    Of ``SHRINKS`` of the range from the smallest to the largest number the one is taken that has the smallest sum of
    squared errors. Scales and offsets are rounded to the dtype of the weight before codes are.

    Args:
        weight: ``[out_features, in_features]`` in any floating-point dtype.
        group_size: inputs that share a scale and an offset; all of a row by default.
        symmetric: have no offsets: ``(code - 8) · scale``.

    Returns:
        Packed codes ``[out_features, 64 · ceil(in_features / 128)]`` in ``uint8``, scales and offsets (``None`` where
        symmetric) ``[out_features, groups]`` in the dtype of the weight.

    Raises:
        ValueError: the dtype or the shape does not fit, or ``in_features`` cannot be cut into groups of that size.
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
        group_shape: output rows and inputs that share a scale, -1 for all: ``(1, -1)`` per channel, ``(-1, -1)`` per
            tensor, ``(128, 128)`` for blocks.
        dtype: an fp8 dtype.

    Returns:
        Codes ``[out_features, in_features]`` in ``dtype``, and scales in float32: ``[1]`` per tensor, else
        ``[row groups, column groups]``.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    _expect_matrix("quantize_fp8", weight)
    expect_choice("quantize_fp8", "dtype", dtype, tuple(FP8_MAX))
    (rows, columns), (height, width) = weight.shape, group_shape
    height, width = rows if height == -1 else height, columns if width == -1 else width
    largest = F.pad(weight.detach().abs().float(), (0, -columns % width, 0, -rows % height))
    down, across = -(-rows // height), -(-columns // width)
    largest = largest.reshape(down, height, across, width).amax((1, 3))
    scales = (largest / FP8_MAX[dtype]).clamp(min=smallest_scale(dtype))
    codes = quant_fp8_static.native(weight, scales, tuple(group_shape), dtype)
    return codes, scales.reshape(1) if tuple(group_shape) == (-1, -1) else scales


def _by_rows(
    op: str,
    weight: Tensor,
    group_size: int | None,
    quantize: Callable[[Tensor], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """Quantize some rows after the other, each as ``[rows, groups, group_size]``."""
    _expect_matrix(op, weight)
    columns = weight.shape[1]
    size = columns if group_size is None else group_size
    if size < 1 or columns % size:
        raise ValueError(
            f"{op}: group_size is {size}, which {columns} inputs cannot be cut into; take a divisor"
        )
    some = max(1, AT_ONCE // columns)
    parts = torch.split(weight.detach(), some)
    made = [quantize(part.reshape(part.shape[0], columns // size, size)) for part in parts]
    return tuple(torch.cat(tensors) for tensors in zip(*made, strict=True))


def _int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    values = groups.float()
    scales = (values.abs().amax(-1) / INT8_MAX).clamp(min=SMALLEST_SCALE)
    codes = (values / scales[..., None]).round().to(torch.int8)
    return codes.flatten(1), scales


def _int4_symmetric(groups: Tensor) -> tuple[Tensor, Tensor]:
    bound = groups.float().abs().amax(-1) / (MIDDLE - 0.5)
    codes, scales, _ = _least_loss(groups, bound, lambda scale: scale * -MIDDLE)
    return codes, scales


def _int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.float().aminmax(dim=-1)
    middle = (low + high) / 2
    return _least_loss(
        groups, (high - low) / INT4_MAX, lambda scale: middle - scale * (INT4_MAX / 2)
    )


def _least_loss(
    groups: Tensor, widest: Tensor, offset_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, scales and offsets of the shrunken range that has the least squared error, by group."""
    values, best = groups.float(), torch.full_like(widest, torch.inf)
    codes, scales, offsets = (
        torch.zeros_like(values),
        torch.zeros_like(widest),
        torch.zeros_like(widest),
    )
    for shrink in SHRINKS:
        scale = (widest * shrink).clamp(min=torch.finfo(groups.dtype).tiny).to(groups.dtype).float()
        offset = offset_of(scale).to(groups.dtype).float()
        found = ((values - offset[..., None]) / scale[..., None]).round().clamp(0, INT4_MAX)
        loss = (found * scale[..., None] + offset[..., None] - values).square().sum(-1)
        better = loss < best
        best = torch.where(better, loss, best)
        codes = torch.where(better[..., None], found, codes)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, offset, offsets)
    return pack_int4(codes.flatten(1)), scales.to(groups.dtype), offsets.to(groups.dtype)


def _expect_matrix(op: str, weight: Tensor) -> None:
    expect_floating(op, "weight", weight)
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected [out_features, in_features]"
        )
