"""Specs of quantisation. References look numbers up in the list of all numbers of a format."""

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
"""Bits of the mantissa, bias of the exponent, and largest quantised magnitude."""


def decoded(codes: Tensor, mantissa_bits: int, bias: int) -> Tensor:
    """Return the magnitudes of codes, by the definition of the formats."""
    steps = 2**mantissa_bits
    mantissa = (codes % steps).double() / steps
    exponent = (codes // steps).double()

    subnormal = mantissa * 2.0 ** (1 - bias)
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    return torch.where(exponent == 0, subnormal, normal)


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 values to the nearest fp8 numbers, clipped; halfway to the even code."""
    mantissa_bits, bias, limit = FORMATS[dtype]
    table = decoded(torch.arange(128), mantissa_bits, bias)
    table = table[table <= limit]

    magnitudes = values.abs().clamp(max=limit)
    above = torch.searchsorted(table, magnitudes).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)

    to_above = table[above] - magnitudes
    to_below = magnitudes - table[below]
    is_tie_to_above = (to_above == to_below) & (above % 2 == 0)
    code = torch.where((to_above < to_below) | is_tie_to_above, above, below)

    # In other formats, the code of a negative zero is NaN.
    has_negative_zero = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    is_negative = values.signbit() & ((code > 0) | has_negative_zero)
    return (code + 128 * is_negative).to(torch.uint8).view(dtype)


def group_ids(x: Tensor, group_shape: Sequence[int]) -> tuple[Tensor, int, int]:
    """Return the group of each element, ``[tokens, hidden]``, and the groups down and across.

    Groups are numbered along rows.
    """
    tokens = math.prod(x.shape[:-1])
    hidden = x.shape[-1]
    rows, down = _group_of_each(tokens, group_shape[0])
    columns, across = _group_of_each(hidden, group_shape[1])
    return rows[:, None] * across + columns[None, :], down, across


def _group_of_each(extent: int, size: int) -> tuple[Tensor, int]:
    """Return the group of each row or column, and the number of groups."""
    places = torch.arange(extent)
    if size < 0:
        return torch.zeros_like(places), 1
    return places // size, math.ceil(extent / size)


def _reference_static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int], dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    groups, *_ = group_ids(x, group_shape)
    divisors = scale.flatten()[groups].reshape(x.shape)
    return nearest(x / divisors, dtype)


def _reference_dynamic(
    x: Tensor,
    group_shape: Sequence[int],
    scale_ub: Tensor | None = None,
    use_ue8m0: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    groups, down, across = group_ids(x, group_shape)
    none = torch.zeros(down * across, dtype=x.dtype)
    largest = none.scatter_reduce(0, groups.flatten(), x.abs().flatten(), "amax")
    if scale_ub is not None:
        largest = torch.where(largest > scale_ub, scale_ub, largest)

    limit = FORMATS[dtype][2]
    scale = (torch.where(largest > 1 / 512, largest, 1 / 512) / limit).float()
    if use_ue8m0:
        scale = _up_to_power_of_two(scale)

    divisors = scale.double()[groups].reshape(x.shape)
    quantised = nearest(x / divisors, dtype)

    if group_shape[0] == 1:
        return quantised, scale.reshape(*x.shape[:-1], across)
    if group_shape[1] == -1:
        return quantised, scale.reshape(1)
    return quantised, scale.reshape(1, across)


def _up_to_power_of_two(scale: Tensor) -> Tensor:
    powers = 2.0 ** torch.arange(-60, 60, dtype=torch.float64)
    return powers[torch.searchsorted(powers, scale.double())].float()


def nearest_fp4(values: Tensor) -> Tensor:
    """Round float64 values to the nearest numbers of e2m1, clipped; halfway to the even code."""
    table = decoded(torch.arange(8), 1, 1)
    magnitudes = values.abs().clamp(max=table[-1])[..., None]
    distances = (table - magnitudes).abs()

    is_nearest = distances == distances.amin(-1, keepdim=True)
    is_even = torch.arange(8) % 2 == 0
    nearest_even = is_nearest & is_even

    # Of a tie, one code is even.
    code = torch.where(
        nearest_even.any(-1), nearest_even.int().argmax(-1), is_nearest.int().argmax(-1)
    )
    return (code + 8 * values.signbit()).to(torch.uint8)


def _reference_fp4(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    *lead, hidden = x.shape
    width = 32 if scale is None else 16
    groups = x.reshape(*lead, hidden // width, width)
    largest = groups.abs().amax(-1)
    if scale is None:
        powers = 2.0 ** torch.arange(-125, 128, dtype=torch.float64)
        # The largest power up to amax.
        place = torch.searchsorted(powers, largest, right=True) - 1
        divisors = powers[place.clamp(min=0)] / 4
        group_scales = divisors.to(torch.float8_e8m0fnu)
    else:
        group_scales = nearest(largest / 6 / scale, torch.float8_e4m3fn)
        divisors = group_scales.double() * scale

    codes = nearest_fp4(groups / divisors[..., None])
    pairs = codes.reshape(*lead, hidden // 2, 2)
    return pairs[..., 0] + 16 * pairs[..., 1], group_scales


BROADCAST = ((-1, -1), (1, -1), (-1, 1))
"""Group shapes with scales that broadcast over ``x``."""


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
    """Draw scales. The small ones make values saturate."""
    return (draw(*shape).float().abs() + 0.1) / 100


def _per_group(shape: Callable[[Sequence[int], int], Sequence[int]], **settings: Any) -> Arguments:
    """Return settings with a draw of scales: ``shape`` computes their shape from lead and size."""
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
"""The tolerances of scales in float32."""

QUANTISED: dict[str, Any] = {
    "flops": _quantization_flops,
    "differentiable": False,
    "large": (((83,), 5125), ((2048,), 512)),
    # One step of a code: 1/8 with three bits of mantissa, 1/4 with two; constant for subnormals.
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
        _reference_static,
        variants=STATIC,
        outside=(Outside("torch.Tensor.to", _torch_static),),
        **QUANTISED,
    ),
    OpSpec(
        functional.quant_fp8_dynamic,
        _quantization_inputs,
        _reference_dynamic,
        module=_dynamic_op,
        variants=DYNAMIC,
        outside=(Outside("torch.Tensor.to", _torch_dynamic),),
        **QUANTISED,
    ),
    OpSpec(
        fp4.quant_fp4,
        _fp4_inputs,
        _reference_fp4,
        _quantization_flops,
        module=_fp4_op,
        variants=FP4,
        sizes=(1, 3, 24),
        large=(((83,), 160), ((2048,), 16)),
        # One step of a code is half, or half of the smaller number.
        tolerances={
            torch.float4_e2m1fn_x2: (0.5, 0.5),
            torch.float8_e4m3fn: (2**-9, 0.125),
            torch.float8_e8m0fnu: (0.0, 0.0),
        },
        differentiable=False,
    ),
)
