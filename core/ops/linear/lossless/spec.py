"""The spec of linear layers in 12 bits. The reference reads the numbers one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.ops.linear.lossless import functional
from opgraft.ops.linear.lossless.modules import LosslessLinear
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec, with_parameters
from torch import Tensor, nn

OUT_FEATURES = 5
END = 2**31 - 1


def _weights(draw: Draw, size: int, *shape: int) -> Tensor:
    """Draw plain weights of about ``1 / sqrt(size)``."""
    return (draw(*shape) / size**0.5).bfloat16().contiguous()


def _inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    """Draw any bytes as codes of units, with exponents for weights up to ``1 / sqrt(size)``."""
    shape = (OUT_FEATURES, 96 * (size // 64))
    of_units = draw.integers(0, 256, shape).to(torch.uint8)
    rest = _weights(draw, size, OUT_FEATURES, size % 64)
    codes = torch.cat((of_units, rest.view(torch.uint8)), 1)

    largest = 126 - size.bit_length() // 2
    exponents = draw.integers(largest - 20, largest + 1, (16,))
    return {
        "x": draw(*lead, size),
        "weight": codes,
        "exponents": exponents.to(torch.uint8),
        "places": torch.tensor([END], dtype=torch.int32),
        "units": torch.zeros(1, 64, dtype=torch.int16),
        "bias": draw(OUT_FEATURES),
    }


def _places(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw which units are plain: each third one, and the last."""
    count = OUT_FEATURES * (size // 64)
    chosen = set(range(0, count, 3))
    if count:
        chosen.add(count - 1)
    return torch.tensor([*sorted(chosen), END], dtype=torch.int32)


def _units(draw: Draw, lead: Sequence[int], size: int) -> Tensor:
    """Draw the plain units of ``_places``."""
    count = len(_places(draw, lead, size))
    return _weights(draw, size, count, 64).view(torch.int16)


def _reference(
    x: Tensor,
    weight: Tensor,
    exponents: Tensor,
    places: Tensor,
    units: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    size = x.shape[-1]
    units_of_row = size // 64
    plain = torch.zeros(len(weight), size, dtype=torch.float64)

    # Numbers that make no whole unit lie behind the units.
    rest = weight[:, 96 * units_of_row :].contiguous()
    plain[:, 64 * units_of_row :] = rest.view(torch.bfloat16)
    plain_units = units.view(torch.bfloat16)
    listed = dict(zip(places.tolist(), plain_units, strict=True))

    table = exponents.tolist()
    for row, codes in enumerate(weight.tolist()):
        for column in range(units_of_row):
            first = 64 * column
            numbers = listed.get(row * units_of_row + column)
            if numbers is None:
                numbers = _numbers(codes[96 * column :], table)
            plain[row, first : first + 64] = numbers

    y = torch.einsum("...i,oi->...o", x, plain)
    return y if bias is None else y + bias


def _numbers(unit: Sequence[int], exponents: Sequence[int]) -> Tensor:
    """Return the 64 numbers of the 96 bytes of a unit, the first bytes of ``unit``."""
    numbers = torch.zeros(64, dtype=torch.float64)
    for k in range(32):
        low = unit[2 * k]
        high = unit[2 * k + 1]
        places = unit[64 + k]
        # The sign of either number is in the byte with the other one's mantissa.
        numbers[k] = _number(high, low, exponents[places % 16])
        numbers[32 + k] = _number(low, high, exponents[places // 16])
    return numbers


def _number(with_sign: int, with_mantissa: int, exponent: int) -> float:
    sign = -1.0 if with_sign & 128 else 1.0
    mantissa = 1 + (with_mantissa & 127) / 128
    return sign * mantissa * 2.0 ** (exponent - 127)


def _module(
    x: Tensor,
    weight: Tensor,
    exponents: Tensor,
    places: Tensor,
    units: Tensor,
    bias: Tensor | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    op = LosslessLinear(x.shape[-1], len(weight), bias is not None)
    module = with_parameters(
        op,
        weight=weight,
        exponents=exponents,
        places=places,
        units=units,
        bias=bias,
    )
    return module, (x,)


def _flops(x: Tensor, weight: Tensor, **others: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


SPECS = (
    OpSpec(
        functional.lossless_linear,
        _inputs,
        _reference,
        module=_module,
        variants={
            "": {},
            "no bias": {"bias": None},
            "plain units": {"places": _places, "units": _units},
        },
        sizes=(1, 96, 769),
        flops=_flops,
        tolerances=HALF_NORM,
    ),
)
