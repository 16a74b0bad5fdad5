"""Quantisation to 8-bit floating point (Micikevicius et al., arXiv:2209.05433).

``x`` is read as a matrix, ``[tokens, hidden]`` with all leading dimensions as tokens, and cut into groups of
``group_shape``, rows by columns, of which -1 is the whole extent; the last group of a row or column may be smaller.
Each group has a scale: ``q = round(clip(x / scale, ±FP8_MAX))``, so that ``q · scale`` is about ``x``. Quotients are
computed in float32 (float64 for float64 input) and rounded to the nearest, ties to even.

A NaN becomes NaN, and does not count where a scale is computed. An infinity saturates where the scale is given or
bounded; else it makes the scale of its group infinite, itself NaN and the rest of the group zeros. No gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_choice, expect_floating, expect_same_device
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["quant_fp8_dynamic", "quant_fp8_static"]

FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 224.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}
"""The largest magnitude that is quantised to, by dtype; e4m3fnuz reaches 240, of which checkpoints use half of 448."""


class _RowsAndColumns(NamedTuple):
    row: int
    col: int


class GroupShape(_RowsAndColumns):
    """The extent of a group that shares a scale: ``row`` tokens by ``col`` elements, -1 for the whole extent."""

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def is_per_tensor(self) -> bool:
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        return self == (1, -1)

    def is_per_channel(self) -> bool:
        return self == (-1, 1)

    def is_per_group(self) -> bool:
        """Tell whether groups are parts of one row."""
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


def smallest_scale(dtype: torch.dtype) -> float:
    """Return the lower bound of computed scales, which keeps groups of zeros from a division by zero."""
    return 1.0 / (FP8_MAX[dtype] * 512.0)


def expect_group_shape(op: str, group_shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless the group shape is two numbers, each positive or -1."""
    if len(group_shape) != 2 or any(extent != -1 and extent < 1 for extent in group_shape):
        raise ValueError(
            f"{op}: group_shape is {tuple(group_shape)}, expected (rows, columns), each positive or -1"
        )


def expect_dynamic_group_shape(op: str, group_shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless scales can be computed for groups of that shape."""
    expect_group_shape(op, group_shape)
    if tuple(group_shape) not in ((-1, -1), (-1, 1)) and group_shape[0] != 1:
        raise ValueError(
            f"{op}: group_shape is {tuple(group_shape)}, expected (-1, -1), (1, -1), (-1, 1) or (1, columns) where "
            "scales are computed"
        )


def expect_scale_ub(op: str, scale_ub: Tensor | None, group_shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless the bound is one number for scales per token, or not given."""
    if scale_ub is None:
        return
    if tuple(group_shape) != (1, -1):
        raise ValueError(
            f"{op}: scale_ub is given, expected it with computed scales of group_shape (1, -1) only"
        )
    if scale_ub.numel() != 1:
        raise ValueError(f"{op}: scale_ub has shape {tuple(scale_ub.shape)}, expected one element")


def scale_shape(shape: Sequence[int], group_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of that shape.

    ``[1]`` per tensor, ``[..., 1]`` per token and ``[..., groups]`` for parts of rows with the leading dimensions of
    ``x``, ``[1, hidden]`` per channel, ``[row groups, column groups]`` else.
    """
    (down, _), (across, _) = _cut(shape, group_shape)
    if group_shape[0] == 1:
        return (*shape[:-1], across)
    return (1,) if tuple(group_shape) == (-1, -1) else (down, across)


def _fake_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(scale_shape(x.shape, group_shape), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale


@register_functional("quant_fp8", _fake_static, differentiable=False)
def quant_fp8_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    """Quantise ``x`` to fp8 with scales that are given (arXiv:2209.05433).

    Args:
        x: ``[..., hidden]`` in float32, bfloat16, float16 or float64.
        scale: one positive number per group: ``[1]`` or ``[]`` for the tensor, ``[..., 1]`` per token, ``[1, hidden]``
            per channel, ``[..., groups]`` for parts of rows, ``[row groups, column groups]`` for blocks. Leading
            dimensions may be flattened, and dimensions of one left out.
        group_shape: rows and columns of a group, -1 for the whole extent.
        dtype: an fp8 dtype.

    Returns:
        ``[..., hidden]`` in ``dtype``.

    Raises:
        ValueError: a dtype that is not supported, or scales whose number, shape or device does not fit.
    """
    _expect_input("quant_fp8_static", x, dtype)
    expect_group_shape("quant_fp8_static", group_shape)
    expect_same_device("quant_fp8_static", "scale", scale, "x", x)
    (down, height), (across, width) = _cut(x.shape, group_shape)
    _expect_scale(scale, scale_shape(x.shape, group_shape), (down, across))
    matrix = _matrix(x)
    scales = scale.detach().reshape(down, across).to(matrix.dtype)
    if down > 1 and height > 1:
        scales = scales.repeat_interleave(height, 0)[: matrix.shape[0]]
    if across > 1 and width > 1:
        scales = scales.repeat_interleave(width, 1)[:, : matrix.shape[1]]
    return _rounded(matrix / scales, x, dtype)


@register_functional("quant_fp8", _fake_dynamic, differentiable=False)
def quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to fp8, each group by its largest magnitude: ``scale = max(amax / FP8_MAX, 1 / (512 · FP8_MAX))``
    (arXiv:2209.05433).

    Args:
        x: ``[..., hidden]`` in float32, bfloat16, float16 or float64.
        group_shape: ``(-1, -1)`` for one scale, ``(1, -1)`` per token, ``(-1, 1)`` per channel, ``(1, G)`` per ``G``
            elements of a token.
        scale_ub: one number on the device of ``x`` that ``amax`` is at most, for scales per token.
        use_ue8m0: round scales up to powers of two (Rouhani et al., arXiv:2310.10537), after applying the lower bound.
        dtype: an fp8 dtype.

    Returns:
        ``[..., hidden]`` in ``dtype``, and the scales in float32: ``[1]``, ``[..., 1]``, ``[1, hidden]`` or
        ``[..., ceil(hidden / G)]``.

    Raises:
        ValueError: a dtype or group shape that is not supported, or ``scale_ub`` for other scales than per token.
    """
    _expect_input("quant_fp8_dynamic", x, dtype)
    expect_dynamic_group_shape("quant_fp8_dynamic", group_shape)
    expect_scale_ub("quant_fp8_dynamic", scale_ub, group_shape)
    blocks = _blocks(x, group_shape)
    largest = blocks.abs().nan_to_num(0.0, posinf=math.inf).amax((1, 3))
    if scale_ub is not None:
        expect_same_device("quant_fp8_dynamic", "scale_ub", scale_ub, "x", x)
        largest = torch.minimum(largest, scale_ub.detach().reshape(1, 1).to(largest.dtype))
    scale = (largest / FP8_MAX[dtype]).to(torch.float32).clamp(min=smallest_scale(dtype))
    if use_ue8m0:
        scale = _power_of_two_above(scale)
    quotients = (blocks / scale[:, None, :, None].to(blocks.dtype)).flatten(2).flatten(0, 1)
    quotients = quotients[: math.prod(x.shape[:-1]), : x.shape[-1]]
    return _rounded(quotients, x, dtype), scale.reshape(scale_shape(x.shape, group_shape))


def _expect_input(op: str, x: Tensor, dtype: torch.dtype) -> None:
    expect_choice(op, "dtype", dtype, tuple(FP8_MAX))
    expect_floating(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected [..., hidden]")


def _expect_scale(scale: Tensor, kept: tuple[int, ...], flat: tuple[int, int]) -> None:
    given = tuple(scale.shape)
    without_ones = tuple(extent for extent in flat if extent != 1)
    if given != kept and given != flat and given != without_ones:
        expected = " or ".join(dict.fromkeys((str(kept), str(flat))))
        raise ValueError(f"quant_fp8_static: scale has shape {given}, expected {expected}")


def _cut(
    shape: Sequence[int], group_shape: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return number and extent of the groups down and across the matrix."""
    return _groups(math.prod(shape[:-1]), group_shape[0]), _groups(shape[-1], group_shape[1])


def _groups(extent: int, size: int) -> tuple[int, int]:
    return (1, max(extent, 1)) if size == -1 else (-(-extent // size), size)


def _matrix(x: Tensor) -> Tensor:
    """Return ``x`` as ``[tokens, hidden]``, in the precision to compute in."""
    return x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1]).to(compute_dtype(x.dtype))


def _blocks(x: Tensor, group_shape: Sequence[int]) -> Tensor:
    """Return ``x`` as ``[row groups, rows, column groups, columns]``, filled up with zeros."""
    matrix = _matrix(x)
    (down, height), (across, width) = _cut(x.shape, group_shape)
    missing = (0, across * width - matrix.shape[1], 0, down * height - matrix.shape[0])
    return (F.pad(matrix, missing) if any(missing) else matrix).reshape(down, height, across, width)


def _rounded(quotients: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = FP8_MAX[dtype]
    return quotients.clamp(-limit, limit).reshape(x.shape).to(dtype)


def _power_of_two_above(scale: Tensor) -> Tensor:
    # On the bits of the number: a logarithm that is off by one unit would halve or double the scale.
    bits = (scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return bits.view(torch.float32)
