"""Linear layers with quantized weights.

``quantized_linear`` stores weights in few bits and multiplies in the dtype of ``x``; ``int8_dynamic_linear`` and
``fp8_linear`` quantize ``x`` too, and have no gradients. ``opgraft.ops.linear.quantized.storage`` says how codes lie in
memory.
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
"""The largest magnitude that int8 quantizes to; -128 is not used, so that quantization is symmetric."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The lower bound of computed int8 scales, which keeps rows of zeros from a division by zero."""

FP8_WEIGHTS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def _mapped(x: Tensor, weight: Tensor, *others: object, **settings: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _mapped_by_codes(
    x: Tensor, weight: Tensor, scales: Tensor, *others: object, **settings: object
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] * (TILE if weight.dim() == 3 else 1)))


@register_functional("quantized_linear", _mapped_by_codes)
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` with ``W = code · scale + offset`` per group of inputs of an output row, as in GPTQ
    (Frantar et al., arXiv:2210.17323) and AWQ (Lin et al., arXiv:2306.00978).

    The dtype of the weight tells its bits, the shape of the scales its groups. This definition computes ``W`` in
    float32 (float64 for float64 input) and rounds it to the dtype of ``x``; a kernel need not round it. Gradients reach
    everything but the codes.

    Args:
        x: ``[..., in_features]`` in any floating-point dtype.
        weight: 8 bits as ``int8``, ``[out_features, in_features]``; 4 bits as ``uint8``,
            ``[out_features, 64 · ceil(in_features / 128)]``, as ``pack_int4`` packs them. Either may lie in tiles of
            32 outputs, ``[out_features / 32, ceil(in_features / 32), 1024 or 512]``, as ``in_tiles`` lays them.
        scales: ``[out_features, groups]`` in any floating-point dtype; ``groups`` divides ``in_features``. Beside
            tiles ``[out_features / 32, groups, 32]``.
        offsets: as the scales. Without them, 4-bit codes stand for ``(code - 8) · scale``.
        bias: ``[out_features]`` in the dtype of ``x``.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit.
    """
    if weight.dim() == 3 and x.dim():
        expect_tiles("quantized_linear", weight, scales, offsets, x.shape[-1])
        weight, scales, offsets = out_of_tiles(weight, scales, offsets, x.shape[-1])
    _expect_input("quantized_linear", x, weight, bias)
    expect_storage("quantized_linear", weight, scales, offsets, x.shape[-1], x.device)
    plain = dequantize(weight, scales, offsets, x.shape[-1], compute_dtype(x.dtype))
    return F.linear(x, plain.to(x.dtype), bias)


@register_functional("int8_dynamic_linear", _mapped, differentiable=False)
def int8_dynamic_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` on 8-bit integers, with ``x`` quantized row by row (Dettmers et al., arXiv:2208.07339,
    section 2.1, without its outliers).

    A row's scale is ``max(|x|) / 127``, its codes are ``round(x / scale)``, ties to even; the sum of products of codes
    is scaled by row and output channel in float32 (float64 for float64 input) and rounded once, after adding the bias.
    This definition sums in that precision: in float32 exactly as integers do while sums stay below 2^24. A row with an
    infinity or a NaN becomes NaN. No gradients.

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
    _expect_input("int8_dynamic_linear", x, weight, bias)
    if weight.dtype != torch.int8:
        raise ValueError(f"int8_dynamic_linear: weight is {weight.dtype}, expected torch.int8")
    columns = scales.reshape(-1, 1) if scales.dim() == 1 else scales
    expect_storage("int8_dynamic_linear", weight, columns, None, x.shape[-1], x.device)
    if columns.shape[1] != 1:
        raise ValueError(
            f"int8_dynamic_linear: scales have shape {tuple(scales.shape)}, expected one for each channel"
        )
    rows = x.detach().to(compute_dtype(x.dtype))
    largest = (
        rows.abs().amax(-1, keepdim=True) if x.shape[-1] else rows.new_zeros((*x.shape[:-1], 1))
    )
    scale = (largest / INT8_MAX).clamp(min=SMALLEST_SCALE)
    codes = (rows / scale).round()
    sums = F.linear(codes, weight.to(rows.dtype))
    return _scaled(sums, scale * columns[:, 0].detach().to(rows.dtype), bias, x)


@register_functional("fp8_linear", _mapped, differentiable=False)
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
) -> Tensor:
    """Compute ``x · Wᵀ + bias`` with weights in 8-bit floating point, and ``x`` quantized to the same (Micikevicius et
    al., arXiv:2209.05433; blocks as in DeepSeek-V3, arXiv:2412.19437).

    This definition multiplies both by their scales, rounds the products to the dtype of ``x`` and has torch multiply
    the matrices in that dtype; a kernel may multiply the 8-bit numbers themselves. No gradients.

    Args:
        x: ``[..., in_features]`` in any floating-point dtype.
        weight: ``[out_features, in_features]`` in an 8-bit floating-point dtype.
        weight_scale: one number; ``[out_features]`` or ``[out_features, 1]``; or a number for each block.
        input_scale: one number that ``x`` is divided by. Without it each row is quantized by its largest magnitude,
            with ``block_shape`` each block of a row.
        bias: ``[out_features]`` in the dtype of ``x``.
        block_shape: rows and columns of the blocks of the weight.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or ``input_scale`` is given with ``block_shape``.
    """
    _expect_input("fp8_linear", x, weight, bias)
    if weight.dtype not in FP8_WEIGHTS:
        raise ValueError(f"fp8_linear: weight is {weight.dtype}, expected one of {FP8_WEIGHTS}")
    expect_last_dim("fp8_linear", "x", x, weight.shape[1])
    expect_same_device("fp8_linear", "weight_scale", weight_scale, "x", x)
    rounded = _rounded_to_fp8(x, input_scale, block_shape, weight.dtype)
    scales = expand_weight_scale("fp8_linear", weight_scale, weight, block_shape)
    dtype = compute_dtype(x.dtype)
    plain = weight.detach().to(dtype) * scales.detach().to(dtype)
    return F.linear(rounded.to(x.dtype), plain.to(x.dtype), None if bias is None else bias.detach())


def expand_weight_scale(
    op: str, scale: Tensor, weight: Tensor, block_shape: Sequence[int] | None
) -> Tensor:
    """Return the scale of an fp8 weight in a shape that broadcasts over it.

    Raises:
        ValueError: there are more or fewer scales than the weight has blocks, channels or tensors.
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
            f"{op}: weight_scale has shape {tuple(scale.shape)}, expected {expected}, one for each block"
        )
    return scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def _rounded_to_fp8(
    x: Tensor, input_scale: Tensor | None, block_shape: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """Return ``x`` as fp8 represents it, in the precision to compute in."""
    if input_scale is not None:
        if block_shape is not None:
            raise ValueError(
                "fp8_linear: input_scale is given with block_shape, expected one of them at most"
            )
        codes = quant_fp8_static.native(x, input_scale.reshape(-1), (-1, -1), dtype)
        return codes.to(compute_dtype(x.dtype)) * input_scale.detach().reshape(1).to(
            compute_dtype(x.dtype)
        )
    width = -1 if block_shape is None else block_shape[1]
    codes, scales = quant_fp8_dynamic.native(x, (1, width), dtype=dtype)
    if width != -1:
        scales = scales.repeat_interleave(width, -1)[..., : x.shape[-1]]
    return codes.to(compute_dtype(x.dtype)) * scales.to(compute_dtype(x.dtype))


def _scaled(sums: Tensor, scale: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y = sums * scale
    return (y if bias is None else y + bias.detach().to(y.dtype)).to(x.dtype)


def _expect_input(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ``ValueError`` unless ``x`` has rows, the weight is a matrix beside it, and the bias fits both."""
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
