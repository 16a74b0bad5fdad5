"""Quantisation to 8-bit floating point (Micikevicius et al., arXiv:2209.05433).

``x`` is read as a matrix ``[tokens, hidden]``, with all leading dimensions as tokens, and cut into
groups. ``group_shape`` gives rows and columns of a group, -1 for the whole extent. The last group
of a row or column may be smaller. Each group has a scale:
``q = round(clip(x / scale, ±FP8_MAX))``, so ``q · scale`` is about ``x``. Quotients are computed in
float32 (float64 for float64 input) and rounded to the nearest, ties to even.

A NaN becomes NaN, and does not count for a computed scale. An infinity saturates with a given or
bounded scale. Otherwise an infinity makes the scale of its group infinite, becomes NaN itself, and
the rest of the group becomes zeros. There are no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import expect_choice, expect_floating, expect_same_device
from opgraft.ops.precision import compute_dtype
from torch import Tensor
from torch.nn import functional as F

__all__ = ["quant_fp8_dynamic", "quant_fp8_static"]

# Traced code reads the dictionary: Dynamo refuses a proxy after a change of any dictionary.
_FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 224.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}

FP8_MAX = MappingProxyType(_FP8_MAX)
"""The largest quantised magnitude by dtype.

e4m3fnuz reaches 240, but checkpoints use 224, half of 448.
"""


class _RowsAndColumns(NamedTuple):
    row: int
    col: int


class GroupShape(_RowsAndColumns):
    """The extent of the group of a scale: ``row`` tokens by ``col`` elements, -1 for all."""

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
        """Return True if groups are parts of one row."""
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


def largest_code(dtype: torch.dtype) -> float:
    """Return ``FP8_MAX`` of a dtype. Traced code may call this."""
    return _FP8_MAX[dtype]


def smallest_scale(dtype: torch.dtype) -> float:
    """Return the lower bound of computed scales, against a division by zero in a group of zeros."""
    return 1.0 / (largest_code(dtype) * 512.0)


def expect_group_shape(op: str, group_shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless the group shape is two numbers, each positive or -1."""
    if len(group_shape) != 2 or any(extent != -1 and extent < 1 for extent in group_shape):
        raise ValueError(
            f"{op}: group_shape is {tuple(group_shape)}, expected (rows, columns), each positive "
            "or -1"
        )


def expect_dynamic_group_shape(op: str, group_shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless scales can be computed for groups of this shape."""
    expect_group_shape(op, group_shape)
    given = tuple(group_shape)
    if given not in ((-1, -1), (-1, 1)) and given[0] != 1:
        raise ValueError(
            f"{op}: group_shape is {given}, expected (-1, -1), (1, -1), (-1, 1) or (1, columns) "
            "where scales are computed"
        )


def expect_scale_ub(op: str, scale_ub: Tensor | None, group_shape: Sequence[int]) -> None:
    """Raise ``ValueError`` for a bound of other scales than per token, or of several numbers."""
    if scale_ub is None:
        return
    if tuple(group_shape) != (1, -1):
        raise ValueError(
            f"{op}: scale_ub is given, expected it with computed scales of group_shape (1, -1) only"
        )
    if scale_ub.numel() != 1:
        raise ValueError(f"{op}: scale_ub has shape {tuple(scale_ub.shape)}, expected one element")


def scale_shape(shape: Sequence[int], group_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales for a tensor ``[..., hidden]``.

    ``[1]`` per tensor, ``[..., 1]`` per token, ``[..., groups]`` for parts of rows, ``[1, hidden]``
    per channel, otherwise ``[row groups, column groups]``.
    """
    if tuple(group_shape) == (-1, -1):
        return (1,)
    (down, _), (across, _) = _cut(shape, group_shape)
    if group_shape[0] == 1:
        return (*shape[:-1], across)
    return (down, across)


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
    """Quantise ``x`` to fp8 with given scales (arXiv:2209.05433).

    Args:
        x: ``[..., hidden]`` in float32, bfloat16, float16 or float64.
        scale: one positive number per group: ``[1]`` or ``[]`` for the tensor, ``[..., 1]`` per
            token, ``[1, hidden]`` per channel, ``[..., groups]`` for parts of rows,
            ``[row groups, column groups]`` for blocks. Leading dimensions may be flattened, and
            dimensions of one left out.
        group_shape: rows and columns of a group, -1 for the whole extent.
        dtype: an fp8 dtype.

    Returns:
        ``[..., hidden]`` in ``dtype``.

    Raises:
        ValueError: a dtype is not supported, or the shape or device of the scales does not fit.
    """
    _expect_input("quant_fp8_static", x, dtype)
    expect_group_shape("quant_fp8_static", group_shape)
    expect_same_device("quant_fp8_static", "scale", scale, "x", x)

    (down, height), (across, width) = _cut(x.shape, group_shape)
    _expect_scale(scale, scale_shape(x.shape, group_shape), (down, across))

    matrix = _matrix(x)
    tokens, hidden = matrix.shape
    scales = scale.detach().reshape(down, across).to(matrix.dtype)

    # A single scale broadcasts over its extent.
    if down > 1 and height > 1:
        scales = scales.repeat_interleave(height, 0)[:tokens]
    if across > 1 and width > 1:
        scales = scales.repeat_interleave(width, 1)[:, :hidden]
    return _rounded(matrix / scales, x, dtype)


@register_functional("quant_fp8", _fake_dynamic, differentiable=False)
def quant_fp8_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to fp8, each group by its largest magnitude (arXiv:2209.05433).

    The scale of a group is ``max(amax / FP8_MAX, 1 / (512 · FP8_MAX))``.

    Args:
        x: ``[..., hidden]`` in float32, bfloat16, float16 or float64.
        group_shape: ``(-1, -1)`` for one scale, ``(1, -1)`` per token, ``(-1, 1)`` per channel,
            ``(1, G)`` per ``G`` elements of a token.
        scale_ub: an upper bound of ``amax``, one number on the device of ``x``, for scales per
            token.
        use_ue8m0: round scales up to powers of two (Rouhani et al., arXiv:2310.10537), after
            applying the lower bound.
        dtype: an fp8 dtype.

    Returns:
        ``[..., hidden]`` in ``dtype``, and the scales in float32: ``[1]``, ``[..., 1]``,
        ``[1, hidden]`` or ``[..., ceil(hidden / G)]``.

    Raises:
        ValueError: a dtype or group shape is not supported, or ``scale_ub`` is given for other
            scales than per token.
    """
    op = "quant_fp8_dynamic"
    _expect_input(op, x, dtype)
    expect_dynamic_group_shape(op, group_shape)
    expect_scale_ub(op, scale_ub, group_shape)

    blocks = _blocks(x, group_shape)
    largest = blocks.abs().nan_to_num(0.0, posinf=math.inf).amax((1, 3))

    if scale_ub is not None:
        expect_same_device(op, "scale_ub", scale_ub, "x", x)
        bound = scale_ub.detach().reshape(1, 1).to(largest.dtype)
        largest = torch.minimum(largest, bound)

    scale = (largest / largest_code(dtype)).to(torch.float32).clamp(min=smallest_scale(dtype))
    if use_ue8m0:
        scale = _power_of_two_above(scale)

    divisors = scale[:, None, :, None].to(blocks.dtype)
    filled_up = (blocks / divisors).flatten(2).flatten(0, 1)

    tokens = math.prod(x.shape[:-1])
    quotients = filled_up[:tokens, : x.shape[-1]]
    return _rounded(quotients, x, dtype), scale.reshape(scale_shape(x.shape, group_shape))


def _expect_input(op: str, x: Tensor, dtype: torch.dtype) -> None:
    expect_choice(op, "dtype", dtype, tuple(_FP8_MAX))
    expect_floating(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected [..., hidden]")


def _expect_scale(scale: Tensor, full: tuple[int, ...], flat: tuple[int, int]) -> None:
    """Raise ``ValueError`` unless a scale has one of two shapes, or ``flat`` without ones."""
    given = tuple(scale.shape)
    without_ones = tuple(extent for extent in flat if extent != 1)
    if given not in (full, flat, without_ones):
        # A dictionary names equal shapes once.
        expected = " or ".join(dict.fromkeys((str(full), str(flat))))
        raise ValueError(f"quant_fp8_static: scale has shape {given}, expected {expected}")


def _cut(
    shape: Sequence[int], group_shape: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the number and extent of the groups down the matrix, and across."""
    down = _groups(math.prod(shape[:-1]), group_shape[0])
    across = _groups(shape[-1], group_shape[1])
    return down, across


def _groups(extent: int, size: int) -> tuple[int, int]:
    if size == -1:
        return 1, max(extent, 1)
    return -(-extent // size), size


def _matrix(x: Tensor) -> Tensor:
    """Return ``x`` as ``[tokens, hidden]``, in float32 (float64 for float64 input)."""
    tokens = math.prod(x.shape[:-1])
    return x.detach().reshape(tokens, x.shape[-1]).to(compute_dtype(x.dtype))


def _blocks(x: Tensor, group_shape: Sequence[int]) -> Tensor:
    """Return ``x`` as ``[row groups, rows, column groups, columns]``, filled up with zeros."""
    matrix = _matrix(x)
    tokens, hidden = matrix.shape
    (down, height), (across, width) = _cut(x.shape, group_shape)

    missing = (0, across * width - hidden, 0, down * height - tokens)
    if any(missing):
        matrix = F.pad(matrix, missing)
    return matrix.reshape(down, height, across, width)


def _rounded(quotients: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = largest_code(dtype)
    return quotients.clamp(-limit, limit).reshape(x.shape).to(dtype)


def _power_of_two_above(scale: Tensor) -> Tensor:
    # By the bits, as a logarithm with an error of one unit would halve or double the scale.
    bits = (scale.view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return bits.view(torch.float32)
