"""Specs of quantized linear layers. References read each code where the documentation puts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from opgraft.ops.linear.quantized import functional
from opgraft.ops.linear.quantized.modules import FP8Linear, Int8DynamicLinear, QuantizedLinear
from opgraft.ops.linear.quantized.storage import TILE
from opgraft.ops.quantization.spec import nearest
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, with_parameters
from torch import Tensor, nn

OUT_FEATURES = 5
BLOCK_SHAPE = (2, 16)


def group_size_of(size: int) -> int:
    """Return a group size for a row of ``size`` inputs."""
    return next(group for group in (32, 16, 3, 1) if size % group == 0)


def scale_of(x: Tensor, largest: Tensor, limit: float) -> Tensor:
    """Return ``largest / limit`` in the precision of the definition: float64 for float64 input."""
    if _is_float32(x):
        return (largest.float() / limit).double()
    return largest / limit


def quotients(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale`` in the precision of the definition.

    The last bit of a quotient may decide between two codes.
    """
    if _is_float32(x):
        return (x.float() / scale.float()).double()
    return x / scale


def _is_float32(x: Tensor) -> bool:
    """Return True if the values, in float64 for the reference, are values of float32."""
    return torch.equal(x.float().double(), x)


def _codes(draw: Draw, bits: int, *shape: int) -> Tensor:
    """Draw bytes of codes: one code of 8 bits, or two of 4."""
    if bits == 8:
        return draw.integers(-127, 128, shape).to(torch.int8)
    return draw.integers(0, 256, shape).to(torch.uint8)


def _scales(draw: Draw, bits: int, size: int, *shape: int) -> Tensor:
    """Draw scales for weights up to about ``1 / sqrt(size)``."""
    return (draw(*shape).abs() + 0.5) / (2**bits * size**0.5)


def _offsets(draw: Draw, size: int, *shape: int) -> Tensor:
    """Draw offsets, a quarter of the weights."""
    return draw(*shape) / (4 * size**0.5)


def _int8(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    scales = _scales(draw, 8, size, OUT_FEATURES, 1)
    return {
        "x": draw(*lead, size),
        "weight": _codes(draw, 8, OUT_FEATURES, size),
        "scales": scales,
        "bias": draw(OUT_FEATURES),
    }


def _grouped(bits: int, *, offsets: bool) -> Arguments:
    """Return draws of codes in rows, with a scale for each group."""

    def scales(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        groups = size // group_size_of(size)
        return _scales(draw, bits, size, OUT_FEATURES, groups)

    def shifts(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        groups = size // group_size_of(size)
        return _offsets(draw, size, OUT_FEATURES, groups)

    def weight(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        width = size if bits == 8 else 64 * math.ceil(size / 128)
        return _codes(draw, bits, OUT_FEATURES, width)

    arguments: Arguments = {"weight": weight, "scales": scales}
    if offsets:
        arguments["offsets"] = shifts
    return arguments


def _tiled(bits: int) -> Arguments:
    """Return draws of one tile of outputs, for four bits with offsets."""

    def scales(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        groups = size // group_size_of(size)
        return _scales(draw, bits, size, 1, groups, TILE)

    def offsets(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        groups = size // group_size_of(size)
        return _offsets(draw, size, 1, groups, TILE)

    def weight(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        across = math.ceil(size / TILE)
        return _codes(draw, bits, 1, across, TILE * TILE * bits // 8)

    def bias(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        return draw(TILE)

    arguments: Arguments = {"weight": weight, "scales": scales, "bias": bias}
    if bits == 4:
        arguments["offsets"] = offsets
    return arguments


def _codes_of_tiles(weight: Tensor, size: int) -> Tensor:
    """Return the codes ``[TILE, size]`` of one tile of outputs, read one by one."""
    inputs = torch.arange(size)
    outputs = torch.arange(TILE)[:, None]
    block = inputs // TILE
    within = inputs % TILE
    if weight.dtype == torch.int8:
        return weight[0, block, within // 4 * 128 + outputs * 4 + within % 4]

    bytes_of_codes = weight[0, block, within // 8 * 128 + outputs * 4 + within % 4]
    shift = within % 8 // 4 * 4
    return (bytes_of_codes >> shift) & 15


def _codes_of_weight(weight: Tensor, size: int) -> Tensor:
    """Return the four-bit codes ``[rows, size]``, read one by one."""
    inputs = torch.arange(size)
    block = inputs // 128
    within = inputs % 128
    word = within % 32
    nibble = within // 32

    bytes_of_codes = weight[:, block * 64 + word * 2 + nibble // 2]
    shift = nibble % 2 * 4
    return (bytes_of_codes >> shift) & 15


def _reference_quantized(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    size = x.shape[-1]
    if weight.dim() == 3:
        codes = _codes_of_tiles(weight, size)
        scales = scales[0].T
        offsets = None if offsets is None else offsets[0].T
    elif weight.dtype == torch.int8:
        codes = weight
    else:
        codes = _codes_of_weight(weight, size)

    plain = codes.double()
    if offsets is None and weight.dtype == torch.uint8:
        plain = plain - 8

    groups = torch.arange(size) // (size // scales.shape[1])
    plain = plain * scales[:, groups]
    if offsets is not None:
        plain = plain + offsets[:, groups]

    y = torch.einsum("...i,oi->...o", x, plain)
    return y if bias is None else y + bias


def _reference_int8_dynamic(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    scale = scale_of(x, x.abs().amax(-1, keepdim=True), 127.0)
    codes = torch.round(quotients(x, scale))
    sums = torch.einsum("...i,oi->...o", codes, weight.double())
    y = sums * scale * scales.reshape(-1)
    return y if bias is None else y + bias


def _fp8_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    codes = (draw(OUT_FEATURES, size) * 100).clamp(-448, 448)
    scale = _fp8_scales(draw, size, OUT_FEATURES, 1)
    return {
        "x": draw(*lead, size),
        "weight": codes.to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "bias": draw(OUT_FEATURES),
    }


def _block_scales(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    height, width = BLOCK_SHAPE
    down = math.ceil(OUT_FEATURES / height)
    across = math.ceil(size / width)
    return _fp8_scales(draw, size, down, across)


def _fp8_scales(draw: Draw, size: int, *shape: int) -> Tensor:
    """Draw scales for codes of about 100. The weights become about ``1 / sqrt(size)``."""
    return (draw(*shape).float().abs() + 0.5) / (200 * size**0.5)


def _reference_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
) -> Tensor:
    size = x.shape[-1]

    # The block of one scale: given, one row, or the whole weight.
    one_row = (1, size)
    whole = (OUT_FEATURES, size)
    height, width = block_shape or (one_row if weight_scale.numel() > 1 else whole)

    plain = weight.double() * _scale_of_each(weight_scale, height, width, size)
    parts = [_rounded_to_fp8(part, input_scale) for part in torch.split(x, width, -1)]
    y = torch.einsum("...i,oi->...o", torch.cat(parts, -1), plain)
    return y if bias is None else y + bias


def _scale_of_each(weight_scale: Tensor, height: int, width: int, size: int) -> Tensor:
    """Return the scale of each weight, ``[OUT_FEATURES, size]``, from scales of blocks."""
    down = math.ceil(OUT_FEATURES / height)
    across = math.ceil(size / width)
    scales = weight_scale.reshape(down, across)

    row_blocks = torch.arange(OUT_FEATURES) // height
    column_blocks = torch.arange(size) // width
    return scales[row_blocks][:, column_blocks]


def _rounded_to_fp8(part: Tensor, input_scale: Tensor | None) -> Tensor:
    """Return the numbers of a part of each row after quantization."""
    if input_scale is None:
        largest = part.abs().amax(-1, keepdim=True).clamp(min=1 / 512)
        scale = (largest / 448).float().double()
    else:
        scale = input_scale.reshape(1)

    # Torch rounds float64 to float32 on the way to 8 bits.
    divided = quotients(part, scale).float().double()
    codes = nearest(divided, torch.float8_e4m3fn)
    return codes.double() * scale


def _quantized_op(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    in_features = x.shape[-1]
    op = QuantizedLinear(
        in_features,
        OUT_FEATURES,
        bias is not None,
        bits=8 if weight.dtype == torch.int8 else 4,
        group_size=in_features // scales.shape[1],
        offsets=offsets is not None,
    )
    return with_parameters(op, weight=weight, scales=scales, offsets=offsets, bias=bias), (x,)


def _int8_dynamic_op(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = Int8DynamicLinear(x.shape[-1], OUT_FEATURES, bias is not None)
    return with_parameters(op, weight=weight, scales=scales, bias=bias), (x,)


def _fp8_op(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = FP8Linear(
        x.shape[-1],
        OUT_FEATURES,
        bias is not None,
        static=input_scale is not None,
        block_shape=block_shape,
    )
    tensors = {
        "weight": weight,
        "weight_scale": weight_scale,
        "input_scale": input_scale,
        "bias": bias,
    }
    return with_parameters(op, **tensors), (x,)


def _linear_flops(x: Tensor, weight: Tensor, **others: Any) -> int:
    # A tile has several rows.
    rows_of_entry = TILE if weight.dim() == 3 else 1
    return 2 * x.numel() * weight.shape[0] * rows_of_entry


COMMON: dict[str, Any] = {"flops": _linear_flops, "sizes": (1, 48, 769), "tolerances": HALF_NORM}
ROUNDED_TWICE = {torch.float16: (2e-2, 1e-2), torch.bfloat16: (2e-2, 1.6e-2)}
"""Tolerances in half types if both factors are rounded before the product."""

SPECS = (
    OpSpec(
        functional.quantized_linear,
        _int8,
        _reference_quantized,
        module=_quantized_op,
        variants={
            "8 bits": {},
            "8 bits, no bias": {"bias": None},
            "8 bits, groups": _grouped(8, offsets=False),
            "8 bits, groups, offsets": _grouped(8, offsets=True),
            "4 bits": _grouped(4, offsets=False),
            "4 bits, offsets": _grouped(4, offsets=True),
            "8 bits, tiles": _tiled(8),
            "4 bits, tiles, offsets": _tiled(4),
        },
        **COMMON,
    ),
    OpSpec(
        functional.int8_dynamic_linear,
        _int8,
        _reference_int8_dynamic,
        module=_int8_dynamic_op,
        variants={"": {}, "no bias": {"bias": None}},
        differentiable=False,
        **COMMON,
    ),
    OpSpec(
        functional.fp8_linear,
        _fp8_inputs,
        _reference_fp8,
        module=_fp8_op,
        variants={
            "channels": {},
            "no bias": {"bias": None},
            "tensor": {"weight_scale": lambda draw, lead, size: torch.full((1,), 0.01 / size**0.5)},
            "static": {"input_scale": lambda draw, lead, size: torch.tensor([0.01])},
            "blocks": {"weight_scale": _block_scales, "block_shape": BLOCK_SHAPE},
        },
        differentiable=False,
        **{**COMMON, "tolerances": ROUNDED_TWICE},
    ),
)
