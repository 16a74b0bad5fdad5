"""Linear layers with quantized weights.

``quantized_linear`` stores weights in few bits and multiplies in the dtype of ``x``.
``int8_dynamic_linear`` and ``fp8_linear`` quantize ``x`` too, and have no gradients.
``opgraft.ops.linear.quantized.storage`` describes the layout of codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    expect_floating,
    expect_last_dim,
    expect_same_device,
    expect_same_dtype,
)
from opgraft.ops.linear.quantized.storage import (
    TILE,
    dequantize,
    expect_storage,
    expect_tiles,
    out_of_tiles,
)
from opgraft.ops.precision import compute_dtype
from opgraft.ops.quantization.functional import quant_fp8_dynamic, quant_fp8_static
from torch import Tensor
from torch.nn import functional as F

__all__ = ["quantized_linear", "int8_dynamic_linear", "fp8_linear"]

INT8_MAX = 127
"""The largest magnitude of an int8 code. Without -128, quantization is symmetric."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The lower bound of computed int8 scales, against a division by zero in a row of zeros."""

FP8_WEIGHTS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def _mapped(x: Tensor, weight: Tensor, *others: object, **settings: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _mapped_by_codes(
    x: Tensor, weight: Tensor, scales: Tensor, *others: object, **settings: object
) -> Tensor:
    rows_of_entry = TILE if weight.dim() == 3 else 1
    return x.new_empty((*x.shape[:-1], weight.shape[0] * rows_of_entry))


@register_functional("quantized_linear", _mapped_by_codes)
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` with ``W = code · scale + offset`` per group of inputs of a row.

    Checkpoints of GPTQ (Frantar et al., arXiv:2210.17323) and AWQ (Lin et al., arXiv:2306.00978)
    hold such weights. The dtype of the weight decides the number of bits, the shape of the scales
    the groups. This definition computes ``W`` in float32 (float64 for float64 input), then rounds
    to the dtype of ``x``; a kernel need not round. Gradients reach all arguments but the codes.

    Args:
        x: ``[..., in_features]`` in any floating-point dtype.
        weight: 8 bits in ``int8``, ``[out_features, in_features]``; or 4 bits in ``uint8``,
            ``[out_features, 64 · ceil(in_features / 128)]``, from ``pack_int4``. Either may lie in
            tiles of 32 outputs, ``[out_features / 32, ceil(in_features / 32), 1024 or 512]``, from
            ``in_tiles``.
        scales: ``[out_features, groups]`` in any floating-point dtype; ``groups`` divides
            ``in_features``. With tiles ``[out_features / 32, groups, 32]``.
        offsets: like the scales. Without offsets, 4-bit codes mean ``(code - 8) · scale``.
        bias: ``[out_features]`` in the dtype of ``x``.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit.
    """
    op = "quantized_linear"
    # A number without dimensions is refused below.
    if weight.dim() == 3 and x.dim():
        expect_tiles(op, weight, scales, offsets, x.shape[-1])
        weight, scales, offsets = out_of_tiles(weight, scales, offsets, x.shape[-1])

    _expect_input(op, x, weight, bias)
    in_features = x.shape[-1]

    expect_storage(op, weight, scales, offsets, in_features, x.device)
    plain = dequantize(weight, scales, offsets, in_features, compute_dtype(x.dtype))
    return F.linear(x, plain.to(x.dtype), bias)


@register_functional("int8_dynamic_linear", _mapped, differentiable=False)
def int8_dynamic_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` on 8-bit integers, with ``x`` quantized row by row.

    The method is from Dettmers et al. (arXiv:2208.07339, section 2.1), without outliers. The scale
    of a row of ``x`` is ``max(|x|) / 127``, the codes are ``round(x / scale)``, ties to even. The
    sum of products of codes is scaled by row and output channel, and the bias is added, in float32
    (float64 for float64 input). The result is rounded once.

    This definition sums in the same precision: float32 is as exact as integers for sums below 2^24.
    A row with an infinity or a NaN becomes NaN. There are no gradients.

    Args:
        x: ``[..., in_features]`` in any floating-point dtype.
        weight: ``[out_features, in_features]`` in ``int8``.
        scales: ``[out_features]`` or ``[out_features, 1]`` in any floating-point dtype.
        bias: ``[out_features]`` in the dtype of ``x``.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit.
    """
    op = "int8_dynamic_linear"
    _expect_input(op, x, weight, bias)
    if weight.dtype != torch.int8:
        raise ValueError(f"{op}: weight is {weight.dtype}, expected torch.int8")

    in_features = x.shape[-1]
    by_channel = scales.reshape(-1, 1) if scales.dim() == 1 else scales
    expect_storage(op, weight, by_channel, None, in_features, x.device)
    if by_channel.shape[1] != 1:
        raise ValueError(
            f"{op}: scales have shape {tuple(scales.shape)}, expected one for each channel"
        )

    rows = x.detach().to(compute_dtype(x.dtype))

    # amax refuses rows without elements.
    empty = (*x.shape[:-1], 1)
    largest = rows.abs().amax(-1, keepdim=True) if in_features else rows.new_zeros(empty)
    row_scales = (largest / INT8_MAX).clamp(min=SMALLEST_SCALE)

    codes = (rows / row_scales).round()
    sums = F.linear(codes, weight.to(rows.dtype))
    y = sums * (row_scales * by_channel[:, 0].detach().to(rows.dtype))

    if bias is not None:
        y = y + bias.detach().to(y.dtype)
    return y.to(x.dtype)


@register_functional("fp8_linear", _mapped, differentiable=False)
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` with ``W`` in 8-bit floating point, and ``x`` quantized likewise.

    The method is from Micikevicius et al. (arXiv:2209.05433), blocks are from DeepSeek-V3
    (arXiv:2412.19437). This definition multiplies codes by scales, rounds both factors to the dtype
    of ``x``, and multiplies the matrices in this dtype. A kernel may multiply the 8-bit numbers.
    There are no gradients.

    Args:
        x: ``[..., in_features]`` in any floating-point dtype.
        weight: ``[out_features, in_features]`` in an 8-bit floating-point dtype.
        weight_scale: one number; ``[out_features]`` or ``[out_features, 1]``; or a number for each
            block.
        input_scale: one divisor of ``x``. Without ``input_scale``, each row is quantized by the
            largest magnitude; with ``block_shape``, each block of a row.
        bias: ``[out_features]`` in the dtype of ``x``.
        block_shape: rows and columns of the blocks of the weight.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or both ``input_scale`` and
            ``block_shape`` are given.
    """
    op = "fp8_linear"
    _expect_input(op, x, weight, bias)
    if weight.dtype not in FP8_WEIGHTS:
        raise ValueError(f"{op}: weight is {weight.dtype}, expected one of {FP8_WEIGHTS}")

    expect_last_dim(op, "x", x, weight.shape[1])
    expect_same_device(op, "weight_scale", weight_scale, "x", x)

    rounded = _rounded_to_fp8(x, input_scale, block_shape, weight.dtype)
    scales = expand_weight_scale(op, weight_scale, weight, block_shape)
    dtype = compute_dtype(x.dtype)
    plain = weight.detach().to(dtype) * scales.detach().to(dtype)

    if bias is not None:
        bias = bias.detach()
    return F.linear(rounded.to(x.dtype), plain.to(x.dtype), bias)


def expand_weight_scale(
    op: str, scale: Tensor, weight: Tensor, block_shape: Sequence[int] | None
) -> Tensor:
    """Return the scale of an fp8 weight in a shape for broadcasting over the weight.

    Raises:
        ValueError: the number of scales does not fit the blocks or channels of the weight.
    """
    rows, columns = weight.shape
    if block_shape is None:
        if scale.numel() == 1:
            return scale.reshape(1, 1)
        if tuple(scale.shape) in ((rows,), (rows, 1)):
            return scale.reshape(rows, 1)
        raise ValueError(
            f"{op}: weight_scale has shape {tuple(scale.shape)}, expected one number or [{rows}]"
        )
    if len(block_shape) != 2 or min(block_shape) < 1:
        raise ValueError(
            f"{op}: block_shape is {tuple(block_shape)}, expected two positive numbers"
        )

    height, width = block_shape
    expected = (-(-rows // height), -(-columns // width))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{op}: weight_scale has shape {tuple(scale.shape)}, expected {expected}, one for each "
            "block"
        )

    # The last block down or across may be smaller.
    by_row = scale.repeat_interleave(height, 0)[:rows]
    return by_row.repeat_interleave(width, 1)[:, :columns]


def _rounded_to_fp8(
    x: Tensor, input_scale: Tensor | None, block_shape: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """Return ``x`` rounded to fp8 numbers times scales, in float32 (float64 for float64 input)."""
    computed = compute_dtype(x.dtype)
    if input_scale is not None:
        if block_shape is not None:
            raise ValueError(
                "fp8_linear: input_scale is given with block_shape, expected one of them at most"
            )
        codes = quant_fp8_static.native(x, input_scale.reshape(-1), (-1, -1), dtype)
        return codes.to(computed) * input_scale.detach().reshape(1).to(computed)

    width = -1 if block_shape is None else block_shape[1]
    codes, scales = quant_fp8_dynamic.native(x, (1, width), dtype=dtype)
    if width != -1:
        scales = scales.repeat_interleave(width, -1)[..., : x.shape[-1]]
    return codes.to(computed) * scales.to(computed)


def _expect_input(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ``ValueError`` unless ``x`` has rows, and weight and bias fit ``x`` and each other."""
    expect_floating(op, "x", x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected [..., in_features]")
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}, expected two dimensions")

    expect_same_device(op, "weight", weight, "x", x)
    if bias is None:
        return
    if bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: bias has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}"
        )
    expect_same_dtype(op, "bias", bias, "x", x)
    expect_same_device(op, "bias", bias, "x", x)
