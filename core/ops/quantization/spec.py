"""Specs of quantisation, told by the list of the numbers that a format has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.ops import quantization as ops
from opgraft.ops.quantization import fp4, functional
from opgraft.ops.spec import Arguments, Draw, OpSpec, Outside
from torch import Tensor, nn

FORMATS = {
    torch.float8_e4m3fn: (3, 7, 448.0),
    torch.float8_e4m3fnuz: (3, 8, 224.0),
    torch.float8_e5m2: (2, 15, 57344.0),
    torch.float8_e5m2fnuz: (2, 16, 57344.0),
}
"""Bits of the mantissa, bias of the exponent and largest magnitude that is quantised to."""


def decoded(codes: Tensor, mantissa_bits: int, bias: int) -> Tensor:
    """Decode the magnitudes of the codes 0 to 127, from the definition of the formats."""
    mantissa = (codes % 2**mantissa_bits).double() / 2**mantissa_bits
    exponent = (codes // 2**mantissa_bits).double()
    return torch.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias)
    )


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 values to the nearest fp8 numbers, clipped; in the middle, to that with the even code."""
    mantissa_bits, bias, limit = FORMATS[dtype]
    table = decoded(torch.arange(128), mantissa_bits, bias)
    table = table[table <= limit]
    magnitudes = values.abs().clamp(max=limit)
    above = torch.searchsorted(table, magnitudes).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = table[above] - magnitudes, magnitudes - table[below]
    code = torch.where(
        (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below
    )
    has_negative_zero = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    negative = values.signbit() & ((code > 0) | has_negative_zero)
    return (code + 128 * negative).to(torch.uint8).view(dtype)


def group_ids(x: Tensor, group_shape: Sequence[int]) -> tuple[Tensor, int, int]:
    """Number the group of each element of ``[tokens, hidden]``, counted along rows; groups down and across."""
    tokens, hidden = math.prod(x.shape[:-1]), x.shape[-1]
    height = group_shape[0] if group_shape[0] > 0 else max(tokens, 1)
    width = group_shape[1] if group_shape[1] > 0 else max(hidden, 1)
    down = 1 if group_shape[0] < 0 else math.ceil(tokens / height)
    across = 1 if group_shape[1] < 0 else math.ceil(hidden / width)
    rows, columns = torch.arange(tokens) // height, torch.arange(hidden) // width
    return rows[:, None] * across + columns[None, :], down, across


def _static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    groups, *_ = group_ids(x, group_shape)
    return nearest(x / scale.flatten()[groups].reshape(x.shape), dtype)


def _dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    groups, down, across = group_ids(x, group_shape)
    largest = torch.zeros(down * across, dtype=x.dtype).scatter_reduce(
        0, groups.flatten(), x.abs().flatten(), "amax"
    )
    if scale_ub is not None:
        largest = torch.where(largest > scale_ub, scale_ub, largest)
    limit = FORMATS[dtype][2]
    scale = (torch.where(largest > 1 / 512, largest, 1 / 512) / limit).float()
    if use_ue8m0:
        powers = 2.0 ** torch.arange(-60, 60, dtype=torch.float64)
        scale = powers[torch.searchsorted(powers, scale.double())].float()
    quantised = nearest(x / scale.double()[groups].reshape(x.shape), dtype)
    shape = (
        (*x.shape[:-1], across)
        if group_shape[0] == 1
        else (1,)
        if group_shape[1] == -1
        else (1, across)
    )
    return quantised, scale.reshape(shape)


def nearest_fp4(values: Tensor) -> Tensor:
    """Round float64 values to the nearest numbers of e2m1, clipped; in the middle, to that with the even code."""
    table = decoded(torch.arange(8), 1, 1)
    magnitudes = values.abs().clamp(max=table[-1])[..., None]
    distances = (table - magnitudes).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    code = torch.where(
        (is_nearest & even).any(-1),
        (is_nearest & even).int().argmax(-1),
        is_nearest.int().argmax(-1),
    )
    return (code + 8 * values.signbit()).to(torch.uint8)


def _fp4(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    width = 32 if scale is None else 16
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
    largest = groups.abs().amax(-1)
    if scale is None:
        powers = 2.0 ** torch.arange(-125, 128, dtype=torch.float64)
        scales = powers[(torch.searchsorted(powers, largest, right=True) - 1).clamp(min=0)] / 4
        codes = nearest_fp4(groups / scales[..., None])
        group_scales = scales.to(torch.float8_e8m0fnu)
    else:
        group_scales = nearest(largest / 6 / scale, torch.float8_e4m3fn)
        codes = nearest_fp4(groups / (group_scales.double() * scale)[..., None])
    pairs = codes.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return pairs[..., 0] + 16 * pairs[..., 1], group_scales


BROADCAST = ((-1, -1), (1, -1), (-1, 1))


def _torch_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor | None:
    if dtype != torch.float8_e4m3fn or tuple(group_shape) not in BROADCAST:
        return None
    return (x / scale).clamp(-448, 448).to(dtype)


def _torch_dynamic(
    x: Tensor, group_shape: Sequence[int], **others: Any
) -> tuple[Tensor, Tensor] | None:
    if tuple(group_shape) != (1, -1) or others:
        return None
    scale = x.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale


def _quantization_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size) * 3, "group_shape": (-1, -1)}


def _given(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {**_quantization_inputs(draw, lead, size), "scale": _scales(draw, 1)}


def _scales(draw: Draw, *shape: int) -> Tensor:
    """Draw scales of which some make values saturate."""
    return (draw(*shape).float().abs() + 0.1) / 100


def _per_group(shape: Callable[[Sequence[int], int], Sequence[int]], **settings: Any) -> Arguments:
    return {"scale": lambda draw, lead, size: _scales(draw, *shape(lead, size)), **settings}


def _dynamic_op(
    x: Tensor, group_shape: Sequence[int], scale_ub: Tensor | None = None, **settings: Any
) -> tuple[nn.Module, Any]:
    return ops.QuantFP8(False, group_shape, **settings), (x, None, scale_ub)


def _fp4_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, fp4.MX_GROUP * size) * 3}


def _fp4_op(x: Tensor, scale: Tensor | None = None) -> tuple[nn.Module, Any]:
    return ops.QuantFP4(), (x, scale)


def _quantization_flops(x: Tensor, **others: Any) -> int:
    return 3 * x.numel()


STATIC: dict[str, Arguments] = {
    "tensor": {},
    "token": _per_group(lambda lead, size: (*lead, 1), group_shape=(1, -1)),
    "channel": _per_group(lambda lead, size: (1, size), group_shape=(-1, 1)),
    "group": _per_group(lambda lead, size: (*lead, math.ceil(size / 4)), group_shape=(1, 4)),
    "block": _per_group(
        lambda lead, size: (math.ceil(math.prod(lead) / 2), math.ceil(size / 3)), group_shape=(2, 3)
    ),
    "fnuz": {"dtype": torch.float8_e4m3fnuz},
    "e5m2": {"dtype": torch.float8_e5m2},
}
DYNAMIC: dict[str, Arguments] = {
    "tensor": {},
    "token": {"group_shape": (1, -1)},
    "bounded": {"group_shape": (1, -1), "scale_ub": lambda draw, lead, size: torch.tensor([2.5])},
    "channel": {"group_shape": (-1, 1)},
    "group": {"group_shape": (1, 4)},
    "powers of two": {"group_shape": (1, 4), "use_ue8m0": True},
    "fnuz": {"group_shape": (1, -1), "dtype": torch.float8_e4m3fnuz},
    "e5m2": {"dtype": torch.float8_e5m2},
}
FP4: dict[str, Arguments] = {
    "NVFP4": {"scale": lambda draw, lead, size: _scales(draw, 1)},
    "MXFP4": {},
}
SCALE = (2e-7, 2e-8)
QUANTISED: dict[str, Any] = {
    "flops": _quantization_flops,
    "differentiable": False,
    "large": (((83,), 5125), ((2048,), 512)),
    # Numbers next to each other are 1/8 apart, with two bits of mantissa 1/4; below the normal ones, by a constant.
    "tolerances": {
        **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), SCALE),
        torch.float8_e4m3fn: (2**-9, 0.125),
        torch.float8_e4m3fnuz: (2**-10, 0.125),
        torch.float8_e5m2: (2**-16, 0.25),
    },
}

SPECS = (
    OpSpec(
        functional.quant_fp8_static,
        _given,
        _static,
        variants=STATIC,
        outside=(Outside("torch.Tensor.to", _torch_static),),
        **QUANTISED,
    ),
    OpSpec(
        functional.quant_fp8_dynamic,
        _quantization_inputs,
        _dynamic,
        module=_dynamic_op,
        variants=DYNAMIC,
        outside=(Outside("torch.Tensor.to", _torch_dynamic),),
        **QUANTISED,
    ),
    OpSpec(
        fp4.quant_fp4,
        _fp4_inputs,
        _fp4,
        _quantization_flops,
        module=_fp4_op,
        variants=FP4,
        sizes=(1, 3, 24),
        large=(((83,), 160), ((2048,), 16)),
        # Numbers next to each other are half apart, or half of the smaller one.
        tolerances={
            torch.float4_e2m1fn_x2: (0.5, 0.5),
            torch.float8_e4m3fn: (2**-9, 0.125),
            torch.float8_e8m0fnu: (0.0, 0.0),
        },
        differentiable=False,
    ),
)
