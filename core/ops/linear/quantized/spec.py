"""Specs of linear layers with quantized weights, told number by number from what the storage is documented to hold."""

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
    """Return a size of groups that a row of so many inputs can be cut into."""
    return next(group for group in (32, 16, 3, 1) if size % group == 0)


def scale_of(x: Tensor, largest: Tensor, limit: float) -> Tensor:
    """Divide as the definition does: rounded to float32 unless ``x`` has more digits than float32."""
    return (
        largest / limit
        if not torch.equal(x.float().double(), x)
        else (largest.float() / limit).double()
    )


def quotients(x: Tensor, scale: Tensor) -> Tensor:
    """Divide as the definition does: to which of two codes a number is rounded depends on the last bit."""
    return (
        x / scale
        if not torch.equal(x.float().double(), x)
        else (x.float() / scale.float()).double()
    )


def _weight8(draw: Draw, size: int) -> Tensor:
    return draw.integers(-127, 128, (OUT_FEATURES, size)).to(torch.int8)


def _scales(draw: Draw, groups: int, size: int, bits: int) -> Tensor:
    """Draw scales that make weights at most as large as layers initialise them."""
    return (draw(OUT_FEATURES, groups).abs() + 0.5) / (2**bits * size**0.5)


def _int8(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    scales = _scales(draw, 1, size, 8)
    return {
        "x": draw(*lead, size),
        "weight": _weight8(draw, size),
        "scales": scales,
        "bias": draw(OUT_FEATURES),
    }


def _grouped(bits: int, *, offsets: bool) -> Arguments:
    def scales(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        return _scales(draw, size // group_size_of(size), size, bits)

    def shifts(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        return draw(OUT_FEATURES, size // group_size_of(size)) / (4 * size**0.5)

    def weight(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        if bits == 8:
            return _weight8(draw, size)
        return draw.integers(0, 256, (OUT_FEATURES, 64 * math.ceil(size / 128))).to(torch.uint8)

    return {"weight": weight, "scales": scales, **({"offsets": shifts} if offsets else {})}


def _tiled(bits: int) -> Arguments:
    """Draw a tile of outputs, with offsets where codes have four bits."""

    def scales(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        return (draw(1, size // group_size_of(size), TILE).abs() + 0.5) / (2**bits * size**0.5)

    def offsets(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        return draw(1, size // group_size_of(size), TILE) / (4 * size**0.5)

    def weight(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        shape = 1, math.ceil(size / TILE), TILE * TILE * bits // 8
        if bits == 8:
            return draw.integers(-127, 128, shape).to(torch.int8)
        return draw.integers(0, 256, shape).to(torch.uint8)

    def bias(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
        return draw(TILE)

    return {
        "weight": weight,
        "scales": scales,
        "bias": bias,
        **({"offsets": offsets} if bits == 4 else {}),
    }


def _codes_of_tiles(weight: Tensor, size: int) -> Tensor:
    """Read the codes of the outputs of one tile, from where the documentation says that each lies."""
    inputs, outputs = torch.arange(size), torch.arange(TILE)
    block, within = inputs // TILE, inputs % TILE
    if weight.dtype == torch.int8:
        return weight[0, block, within // 4 * 128 + outputs[:, None] * 4 + within % 4]
    bytes_of_codes = weight[0, block, within // 8 * 128 + outputs[:, None] * 4 + within % 4]
    return (bytes_of_codes >> (within % 8 // 4 * 4)) & 15


def _codes_of_weight(weight: Tensor, size: int) -> Tensor:
    """Read four-bit codes one by one, from where the documentation says that each lies."""
    inputs = torch.arange(size)
    block, within = inputs // 128, inputs % 128
    word, nibble = within % 32, within // 32
    bytes_of_codes = weight[:, block * 64 + word * 2 + nibble // 2]
    return (bytes_of_codes >> (nibble % 2 * 4)) & 15


def _quantized(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    size = x.shape[-1]
    if weight.dim() == 3:
        codes = _codes_of_tiles(weight, size).double()
        scales, offsets = scales[0].T, None if offsets is None else offsets[0].T
    else:
        codes = (weight if weight.dtype == torch.int8 else _codes_of_weight(weight, size)).double()
    if offsets is None and weight.dtype == torch.uint8:
        codes = codes - 8
    groups = torch.arange(size) // (size // scales.shape[1])
    plain = codes * scales[:, groups] + (0 if offsets is None else offsets[:, groups])
    y = torch.einsum("...i,oi->...o", x, plain)
    return y if bias is None else y + bias


def _int8_dynamic(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    scale = scale_of(x, x.abs().amax(-1, keepdim=True), 127.0)
    codes = torch.round(quotients(x, scale))
    y = torch.einsum("...i,oi->...o", codes, weight.double()) * scale * scales.reshape(-1)
    return y if bias is None else y + bias


def _fp8_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    weight = (draw(OUT_FEATURES, size) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = (draw(OUT_FEATURES, 1).float().abs() + 0.5) / (200 * size**0.5)
    return {
        "x": draw(*lead, size),
        "weight": weight,
        "weight_scale": scale,
        "bias": draw(OUT_FEATURES),
    }


def _block_scales(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    blocks = (math.ceil(OUT_FEATURES / BLOCK_SHAPE[0]), math.ceil(size / BLOCK_SHAPE[1]))
    return (draw(*blocks).float().abs() + 0.5) / (200 * size**0.5)


def _fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
) -> Tensor:
    size = x.shape[-1]
    height, width = block_shape or (1 if weight_scale.numel() > 1 else OUT_FEATURES, size)
    scales = weight_scale.reshape(math.ceil(OUT_FEATURES / height), math.ceil(size / width))
    plain = (
        weight.double()
        * scales[torch.arange(OUT_FEATURES) // height][:, torch.arange(size) // width]
    )
    parts = []
    for part in torch.split(x, width, -1):
        largest = part.abs().amax(-1, keepdim=True).clamp(min=1 / 512)
        scale = (largest / 448).float().double() if input_scale is None else input_scale.reshape(1)
        # Torch rounds float64 to float32 on the way to 8 bits.
        parts.append(
            nearest(quotients(part, scale).float().double(), torch.float8_e4m3fn).double() * scale
        )
    y = torch.einsum("...i,oi->...o", torch.cat(parts, -1), plain)
    return y if bias is None else y + bias


def _quantized_op(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    bits = 8 if weight.dtype == torch.int8 else 4
    settings: dict[str, Any] = {
        "group_size": x.shape[-1] // scales.shape[1],
        "offsets": offsets is not None,
    }
    op = QuantizedLinear(x.shape[-1], OUT_FEATURES, bias is not None, bits=bits, **settings)
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
    settings: dict[str, Any] = {"static": input_scale is not None, "block_shape": block_shape}
    op = FP8Linear(x.shape[-1], OUT_FEATURES, bias is not None, **settings)
    tensors = {
        "weight": weight,
        "weight_scale": weight_scale,
        "input_scale": input_scale,
        "bias": bias,
    }
    return with_parameters(op, **tensors), (x,)


def _linear_flops(x: Tensor, weight: Tensor, **others: Any) -> int:
    return 2 * x.numel() * weight.shape[0] * (TILE if weight.dim() == 3 else 1)


COMMON: dict[str, Any] = {"flops": _linear_flops, "sizes": (1, 48, 769), "tolerances": HALF_NORM}
ROUNDED_TWICE = {torch.float16: (2e-2, 1e-2), torch.bfloat16: (2e-2, 1.6e-2)}
"""Tolerances in half types where both factors are rounded to them before they are multiplied."""

SPECS = (
    OpSpec(
        functional.quantized_linear,
        _int8,
        _quantized,
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
        _int8_dynamic,
        module=_int8_dynamic_op,
        variants={"": {}, "no bias": {"bias": None}},
        differentiable=False,
        **COMMON,
    ),
    OpSpec(
        functional.fp8_linear,
        _fp8_inputs,
        _fp8,
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
