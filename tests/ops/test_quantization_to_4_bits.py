"""What is particular to quantisation to 4 bits: rounding, the two formats, numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.ops import QuantFP4
from opgraft.ops.quantization.fp4 import E2M1, fp4_numbers
from opgraft.ops.quantization.spec import decoded, nearest_fp4
from opgraft.testing.catalogue import SPECS
from torch import Tensor

ONE = torch.ones(1)


def numbers(packed: Tensor) -> Tensor:
    return fp4_numbers(packed, torch.float32)


def row(*values: float, size: int = 16) -> Tensor:
    """A row that begins with these values and ends with zeros."""
    return torch.tensor([*values, *[0.0] * (size - len(values))])


def test_the_reference_knows_the_format() -> None:
    """The numbers of the codes are those of one bit of mantissa and a bias of one."""
    assert decoded(torch.arange(8), 1, 1).tolist() == list(E2M1[:8])
    assert fp4_numbers(torch.tensor([0xF1, 0x07], dtype=torch.uint8), torch.float64).tolist() == [
        0.5,
        -6,
        6,
        0,
    ]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_number_is_rounded_to_the_nearest(half: torch.dtype) -> None:
    """All 16-bit numbers up to six round to the nearest, in the middle to the even code; each has a group whose scale
    is one."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    x = x[x.abs() <= 6]
    rows = torch.zeros(len(x), 16, dtype=half)
    rows[:, 0], rows[:, 1] = 6, x
    packed, scales = functional.quant_fp4(rows, ONE)
    assert scales.float().unique().tolist() == [1]
    assert torch.equal(packed[:, 0] >> 4, nearest_fp4(x.double()))


@pytest.mark.parametrize("variant", SPECS["quant_fp4"].variants)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_fewer_than_two_in_a_thousand_differ(variant: str, dtype: torch.dtype) -> None:
    """Rounding the quotient to float32 first moves next to no value to a neighbour, and no scale."""
    spec = SPECS["quant_fp4"]
    arguments = spec.arguments(variant, dtype, (83,), 160)
    packed, scales = spec.functional.native(**arguments)
    wide = {name: value.double() for name, value in arguments.items()}
    expected, expected_scales = spec.reference(**wide)
    assert (packed != expected).double().mean() < 0.002
    assert (scales.view(torch.uint8) != expected_scales.view(torch.uint8)).double().mean() < 0.002


def test_nvfp4_has_scales_of_16_elements() -> None:
    """Each group reaches six by a scale in e4m3, which saturates, and below whose numbers a group is zeros."""
    x = torch.stack(
        [row(3.0, -1.5), row(6 * 448.0, 6.0), row(6 * 2048.0, 6 * 448.0), row(6 * 2**-11, 1e-9)]
    )
    packed, scales = functional.quant_fp4(x, ONE)
    assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, (4, 1))
    assert scales.float().flatten().tolist() == [0.5, 448, 448, 0]
    assert numbers(packed)[:, :2].tolist() == [[6, -3], [6, 0], [6, 6], [0, 0]]
    halved, doubled = functional.quant_fp4(x[:1], ONE / 2)
    assert (numbers(halved)[0, :2].tolist(), doubled.item()) == ([6, -3], 1)


def test_mxfp4_has_scales_of_32_elements() -> None:
    """Each group has a power of two by which its largest magnitude is four or more, clipped at six."""
    x = torch.stack(
        [row(value, 1.0, size=32) for value in (4.0, 7.9, 8.0, 0.0, 2.0**-140, 2.0**127)]
    )
    x[3:5, 1] = 0
    packed, scales = functional.quant_fp4(x)
    assert (scales.dtype, scales.shape) == (torch.float8_e8m0fnu, (6, 1))
    assert torch.log2(scales.double()).flatten().tolist() == [0, 0, 1, -127, -127, 125]
    assert numbers(packed)[:, :2].tolist() == [[4, 1], [6, 1], [4, 0.5], [0, 0], [0, 0], [4, 0]]


@pytest.mark.parametrize("scale", [ONE, None], ids=["NVFP4", "MXFP4"])
def test_what_is_no_number(scale: Tensor | None) -> None:
    """A NaN is told by the scale of its group, an infinity is the largest number; other groups are as they were."""
    x = torch.stack(
        [row(math.nan, 1.0, size=32), row(-math.inf, 1.0, size=32), row(4.0, 1.0, size=32)]
    )
    packed, scales = functional.quant_fp4(x, scale)
    assert scales[:, 0].float().isnan().tolist() == [True, False, False]
    assert (numbers(packed)[:2, 0].tolist(), numbers(packed)[2, 1]) == (
        [0, -6],
        1 if scale is None else 1.5,
    )


def test_the_module_is_the_form() -> None:
    """``QuantFP4`` returns what the form does, with a scale and without one,; neither requires a gradient."""
    x = torch.randn(2, 3, 64, requires_grad=True)
    for scale in (ONE * 0.01, None):
        found, expected = QuantFP4()(x, scale), functional.quant_fp4(x, scale)
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(found, expected, strict=True)
        )
        assert not any(each.requires_grad for each in found)


X = torch.ones(2, 32)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: functional.quant_fp4(X.int()), "quant_fp4: x is torch.int32, expected one of"),
    (
        lambda: functional.quant_fp4(torch.tensor(1.0)),
        r"quant_fp4: x has shape \(\), expected \[..., a multiple of 32\]",
    ),
    (
        lambda: functional.quant_fp4(torch.ones(2, 48)),
        r"x has shape \(2, 48\), expected .* 32\] for MXFP4, as no scale",
    ),
    (
        lambda: functional.quant_fp4(torch.ones(2, 8), ONE),
        r"x has shape \(2, 8\), expected .* 16\] for NVFP4, as a",
    ),
    (
        lambda: functional.quant_fp4(X, torch.ones(2)),
        r"quant_fp4: scale has shape \(2,\), expected one element",
    ),
    (
        lambda: functional.quant_fp4(X, ONE.to("meta")),
        "quant_fp4: scale is on meta, expected cpu as x",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    """Each error names the argument, what it is and what is expected."""
    with pytest.raises(ValueError, match=message):
        call()
