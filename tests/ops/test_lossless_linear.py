"""bfloat16 weights in 12 bits: every number comes back, and results have the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.ops.linear.lossless.storage import (
    END,
    LosslessWeight,
    from_12_bits,
    row_bytes,
    to_12_bits,
)
from torch import Tensor
from torch.nn import functional as F

SHAPES = ((5, 200), (3, 64), (70, 576), (2, 10), (1, 63), (9, 65), (0, 64), (4, 0))


def drawn(rows: int, columns: int) -> Tensor:
    """Return a weight as training makes it: few exponents, a few outside the 16."""
    return (torch.randn(rows, columns) / max(columns, 1) ** 0.5).bfloat16()


def bits(rows: int, columns: int) -> Tensor:
    """Return a weight of any bits: all exponents, subnormals, infinities, NaN of all kinds."""
    words = torch.randint(-(2**15), 2**15, (rows, columns)).to(torch.int16)
    return words.view(torch.bfloat16)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


@pytest.mark.parametrize("draw", [drawn, bits])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_comes_back(shape: tuple[int, int], draw: Any) -> None:
    """The plain weight is rebuilt with the same bits, and so are chosen rows in any order."""
    weight = draw(*shape)
    made = to_12_bits(weight)
    assert made.codes.shape == (shape[0], row_bytes(shape[1]))
    assert same_bits(from_12_bits(*made, shape[1]), weight)
    if shape[0]:
        rows = torch.randint(0, shape[0], (11,))
        assert same_bits(from_12_bits(*made, shape[1], rows), weight[rows])


def test_every_bit_pattern_comes_back() -> None:
    """All 65,536 numbers of bfloat16 survive, those of frequent exponents and all others."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    weight = words.view(torch.bfloat16).reshape(64, 1024)
    made = to_12_bits(weight)
    assert len(made.places) > 1
    assert same_bits(from_12_bits(*made, 1024), weight)
    # Many more numbers with 16 exponents leave units with other exponents as they are.
    mostly = torch.cat((weight, drawn(4096, 1024)))
    kept = to_12_bits(mostly)
    assert same_bits(from_12_bits(*kept, 1024), mostly)
    assert 1 < len(kept.places) < mostly.numel() // 64


def test_three_quarters_of_the_memory() -> None:
    """All tensors of a trained weight's size take 0.75 to 0.76 of its bytes."""
    for shape in ((576, 576), (1536, 576), (576, 1536), (2048, 4096)):
        weight = drawn(*shape)
        taken = sum(tensor.nbytes for tensor in to_12_bits(weight))
        assert 0.75 * weight.nbytes <= taken < 0.76 * weight.nbytes


def test_zeros_have_a_place() -> None:
    """A weight with many zeros, of either sign, needs no plain unit for them."""
    weight = torch.full((8, 128), 0.5, dtype=torch.bfloat16)
    weight[:, ::2] = 0.0
    weight[:, ::4] = -0.0
    made = to_12_bits(weight)
    assert made.places.tolist() == [END]
    assert same_bits(from_12_bits(*made, 128), weight)


def test_the_seventeenth_exponent_makes_a_unit_plain() -> None:
    """Of 17 exponents the rarest has no place: its units are in the list, in ascending order."""
    weight = torch.cat([torch.full((4, 64), 2.0**power) for power in range(16)], 1).bfloat16()
    assert to_12_bits(weight).places.tolist() == [END]
    weight[1, 70] = 2.0**-60
    weight[3, 1000] = torch.inf
    made = to_12_bits(weight)
    assert made.places.tolist() == [16 + 1, 3 * 16 + 15, END]
    assert same_bits(made.units[0].view(torch.bfloat16), weight[1, 64:128])
    assert same_bits(from_12_bits(*made, 1024), weight)


def test_large_weights_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is read at once, the result is the same."""
    weight = bits(33, 200)
    whole = to_12_bits(weight)
    monkeypatch.setattr("opgraft.ops.linear.lossless.storage.AT_ONCE", 500)
    for part, expected in zip(to_12_bits(weight), whole, strict=True):
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_results_have_the_same_bits(rows: int, dtype: torch.dtype) -> None:
    """The definition computes what torch's linear computes over the plain weight."""
    weight = drawn(40, 200)
    weight[3, 5] = torch.inf
    weight[7, 199] = torch.nan
    x = torch.randn(rows, 200).to(dtype)
    bias = torch.randn(40).to(dtype)
    got = functional.lossless_linear(x, *to_12_bits(weight), bias)
    expected = F.linear(x, weight.to(dtype), bias)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_gradients_reach_input_and_bias() -> None:
    """The weight is a constant; input and bias have gradients."""
    weight = drawn(6, 100)
    x = torch.randn(3, 100, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    functional.lossless_linear(x, *to_12_bits(weight), bias).sum().backward()
    torch.testing.assert_close(x.grad, weight.float().sum(0).expand(3, 100))
    torch.testing.assert_close(bias.grad, torch.full((6,), 3.0))


X = torch.randn(3, 200)
MADE = to_12_bits(drawn(6, 200))
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "inputs": ((torch.randn(3, 100), *MADE), r"weight has shape \(6, 304\)"),
    "codes": ((X, MADE.codes.char(), *MADE[1:]), r"dtype torch.int8, expected \[6, 304\]"),
    "exponents": ((X, MADE.codes, MADE.exponents[:9], *MADE[2:]), r"exponents has shape \(9,\)"),
    "places": ((X, *MADE[:2], MADE.places.long(), MADE.units), "places has shape"),
    "no end": ((X, *MADE[:2], MADE.places[:0], MADE.units[:0]), r"expected \[1\] in torch.int32"),
    "units": ((X, *MADE[:3], MADE.units[:, :9]), "units has shape"),
    "bias": ((X, *MADE, torch.ones(3)), r"bias has shape \(3,\), expected \[6\]"),
    "bias's dtype": ((X, *MADE, torch.ones(6).bfloat16()), "bias"),
    "no rows": ((torch.tensor(1.0), *MADE), r"x has shape \(\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case: str) -> None:
    """The message names the op and the argument."""
    arguments, message = BAD[case]
    with pytest.raises(ValueError, match=f"lossless_linear: .*{message}"):
        functional.lossless_linear(*arguments)


@pytest.mark.parametrize(
    "weight", [torch.ones(3, 64), torch.ones(64).bfloat16(), torch.ones(2, 3, 64).half()], ids=str
)
def test_only_matrices_of_bfloat16_are_stored(weight: Tensor) -> None:
    """Another dtype has other exponents, and no row is cut of another shape."""
    with pytest.raises(ValueError, match="to_12_bits: weight has shape"):
        to_12_bits(weight)


def test_names_of_the_tensors() -> None:
    """``to_12_bits`` returns the tensors in the order of the form's arguments."""
    assert LosslessWeight._fields == ("codes", "exponents", "places", "units")
