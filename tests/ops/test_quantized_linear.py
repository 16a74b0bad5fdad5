"""Storage of quantized weights, functions that quantize, and what the layers refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import functional, ops
from opgraft.ops.linear.quantized.quantizers import (
    AT_ONCE,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from opgraft.ops.linear.quantized.storage import (
    dequantize,
    in_tiles,
    out_of_tiles,
    pack_int4,
    scales_in_tiles,
    unpack_int4,
)
from torch import Tensor


def plain(features: int = 6, width: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(features, width, generator=generator) / width**0.5).to(dtype)


@pytest.mark.parametrize("width", [1, 31, 128, 129, 576])
def test_packing_is_exact(width: int) -> None:
    """Codes come back as they were packed, two to a byte in whole blocks."""
    codes = torch.randint(0, 16, (3, width))
    packed = pack_int4(codes)
    assert packed.shape == (3, -(-width // 128) * 64)
    assert torch.equal(unpack_int4(packed, width), codes.to(torch.uint8))


def test_where_a_code_lies() -> None:
    """Input 32 k + w is in bits 4 k to 4 k + 3 of the 16-bit word w."""
    codes = torch.zeros(256, dtype=torch.uint8)
    codes[128 + 32 * 3 + 5] = 9
    words = pack_int4(codes[None]).view(torch.int16).long() & 0xFFFF
    assert words[0, 32 + 5] == 9 << 12
    assert words.count_nonzero() == 1


def test_where_a_code_lies_in_a_tile() -> None:
    """Input 4 r + i of output o is byte 128 r + 4 o + i with 8 bits; with 4 bits half of a byte, eight inputs a row."""
    codes = torch.zeros(64, 70, dtype=torch.uint8)
    codes[32 + 5, 32 + 8 * 3 + 4 + 2] = 9
    eights, fours = in_tiles(codes.view(torch.int8), 70), in_tiles(pack_int4(codes), 70)
    assert (eights.shape, fours.shape) == ((2, 3, 1024), (2, 3, 512))
    assert eights[1, 1, 128 * 7 + 4 * 5 + 2] == 9
    assert fours[1, 1, 128 * 3 + 4 * 5 + 2] == 9 << 4
    assert eights.count_nonzero() == fours.count_nonzero() == 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [32, 70, 160])
def test_tiles_are_exact(width: int, bits: int) -> None:
    """Codes, scales and offsets come out of tiles as they went in: all rows, or those that are asked for."""
    weight = (
        pack_int4(torch.randint(0, 16, (96, width)))
        if bits == 4
        else torch.randint(-128, 128, (96, width)).char()
    )
    scales, offsets = torch.randn(2, 96, width // 10)
    rows, held = (
        torch.tensor([95, 0, 33, 33]),
        (in_tiles(weight, width), *map(scales_in_tiles, (scales, offsets))),
    )
    for got, given in zip(out_of_tiles(*held, width), (weight, scales, offsets), strict=True):
        assert got is not None
        assert torch.equal(got, given)
    for got, given in zip(out_of_tiles(*held, width, rows), (weight, scales, offsets), strict=True):
        assert got is not None
        assert torch.equal(got, given[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [None, 16, 32])
def test_int8_is_within_half_a_step(group: int | None, dtype: torch.dtype) -> None:
    """Each number is rounded to the nearest of its group's codes, and the largest is kept."""
    weight = plain(dtype=dtype)
    codes, scales = quantize_int8(weight, group)
    assert (codes.dtype, scales.shape) == (torch.int8, (6, 96 // (group or 96)))
    step = scales.repeat_interleave(group or 96, 1)
    error = (dequantize(codes, scales, None, 96) - weight.float()).abs()
    assert (error <= step * 0.501).all()
    assert (codes.abs().amax(1) == 127).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [None, 32])
def test_int4_loses_no_more_than_the_whole_range(group: int | None, symmetric: bool) -> None:
    """The error is at most that of the range from the smallest to the largest number, in every group."""
    weight = plain()
    codes, scales, offsets = quantize_int4(weight, group, symmetric)
    assert (offsets is None) == symmetric
    error = (dequantize(codes, scales, offsets, 96) - weight).unflatten(1, (-1, group or 96))
    groups = weight.unflatten(1, (-1, group or 96))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = groups.abs().amax(-1, keepdim=True) / 7.5 if symmetric else (high - low) / 15
    base = torch.zeros_like(low) if symmetric else low
    bounds = (-8, 7) if symmetric else (0, 15)
    naive = ((groups - base) / step).round().clamp(*bounds) * step + base - groups
    assert (error.square().sum(-1) <= naive.square().sum(-1) * 1.001).all()
    assert error.square().sum() < naive.square().sum()


@pytest.mark.parametrize("shape", [(-1, -1), (1, -1), (4, 32)])
def test_fp8_by_group(shape: tuple[int, int]) -> None:
    """The largest magnitude of each group becomes 448, and all others are within half a step of their size."""
    weight = plain(6, 80)
    codes, scales = quantize_fp8(weight, shape)
    height, width = (6 if shape[0] == -1 else shape[0]), (80 if shape[1] == -1 else shape[1])
    spread = scales.reshape(-(-6 // height), -(-80 // width))
    spread = spread.repeat_interleave(height, 0)[:6].repeat_interleave(width, 1)[:, :80]
    error = (codes.float() * spread - weight).abs()
    assert (error <= weight.abs() / 16 + spread * 2**-10).all()
    assert codes.float().abs().max() == 448


def test_zeros_and_constants() -> None:
    """Weights without a range come back as they are."""
    for value in (0.0, 0.25, -3.0):
        weight = torch.full((2, 64), value)
        assert torch.allclose(dequantize(*quantize_int4(weight, 32), 64), weight)
        assert torch.allclose(dequantize(*quantize_int8(weight), None, 64), weight)


def test_large_weights_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is read at once, the result is the same."""
    weight = plain(33, 64)
    whole = quantize_int4(weight, 32)
    assert weight.numel() < AT_ONCE
    monkeypatch.setattr("opgraft.ops.linear.quantized.quantizers.AT_ONCE", 200)
    for part, expected in zip(quantize_int4(weight, 32), whole, strict=True):
        assert part is not None
        assert expected is not None
        assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_are_near_the_plain_one(dtype: torch.dtype) -> None:
    """A layer with a quantized weight computes nearly what the plain one does: 1 % with 8 bits, 10 % with four."""
    weight, x = plain(64, 256, dtype), torch.randn(5, 256).to(dtype)
    expected = (x.double() @ weight.double().T).float()
    int8, (fp8, fp8_scale) = quantize_int8(weight), quantize_fp8(weight, (32, 128))
    for bound, got in (
        (0.01, functional.quantized_linear(x, *int8)),
        (0.1, functional.quantized_linear(x, *quantize_int4(weight, 32))),
        (0.02, functional.int8_dynamic_linear(x, *int8)),
        (0.05, functional.fp8_linear(x, fp8, fp8_scale, block_shape=(32, 128))),
    ):
        assert got.dtype == dtype
        assert (got.float() - expected).norm() < bound * expected.norm()


def test_gradients_reach_the_input() -> None:
    """Codes are constants; inputs, scales and biases have gradients, where products are of plain numbers."""
    op = ops.QuantizedLinear(64, 8, bits=4, group_size=32, offsets=True)
    x = torch.randn(3, 64, requires_grad=True)
    op(x).sum().backward()
    torch.testing.assert_close(
        x.grad, dequantize(op.weight, op.scales, op.offsets, 64).sum(0).expand(3, 64)
    )
    for frozen in (ops.Int8DynamicLinear(64, 8), ops.FP8Linear(64, 8)):
        assert not frozen(x).requires_grad


CODES = quantize_int4(plain(), 32)
BYTES = quantize_int8(plain())
FP8 = quantize_fp8(plain())
X = torch.ones(2, 96)
TILES = torch.zeros(2, 3, 512, dtype=torch.uint8)
REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "width": (
        "quantized_linear",
        (torch.ones(2, 200), *CODES),
        r"expected \[out_features, 128\] for 200 inputs",
    ),
    "plain weight": (
        "quantized_linear",
        (X, plain(), CODES[1]),
        "weight is torch.float32, expected torch.int8",
    ),
    "scales of another layer": (
        "quantized_linear",
        (X, CODES[0], CODES[1][:4]),
        r"scales have shape \(4, 3\)",
    ),
    "groups": (
        "quantized_linear",
        (X, CODES[0], torch.ones(6, 5)),
        "96 inputs cannot be cut into the 5 groups",
    ),
    "offsets": (
        "quantized_linear",
        (X, *CODES[:2], torch.ones(6, 1)),
        r"offsets have shape \(6, 1\)",
    ),
    "bias": (
        "quantized_linear",
        (X, *CODES, torch.ones(5)),
        r"bias has shape \(5,\), expected \(6,\)",
    ),
    "device": (
        "quantized_linear",
        (X, CODES[0], CODES[1].to("meta")),
        "scales is on meta, expected cpu",
    ),
    "tiles": (
        "quantized_linear",
        (X[:, :64], TILES, torch.ones(2, 3, 32)),
        r"\[out_features / 32, 2, 512\] for 64",
    ),
    "scales beside tiles": (
        "quantized_linear",
        (X, TILES, torch.ones(64, 3)),
        r"expected \[2, groups, 32\] as",
    ),
    "four bits": (
        "int8_dynamic_linear",
        (X, *CODES[:2]),
        "weight is torch.uint8, expected torch.int8",
    ),
    "grouped": (
        "int8_dynamic_linear",
        (X, BYTES[0], torch.ones(6, 2)),
        "expected one for each channel",
    ),
    "no fp8": ("fp8_linear", (X, plain(), FP8[1]), "weight is torch.float32, expected one of"),
    "fp8 scales": (
        "fp8_linear",
        (X, FP8[0], torch.ones(3)),
        r"weight_scale has shape \(3,\), expected one number",
    ),
    "blocks": (
        "fp8_linear",
        (X, *FP8, None, None, (4, 32)),
        r"expected \(2, 3\), one for each block",
    ),
    "static blocks": (
        "fp8_linear",
        (X, *FP8, torch.ones(1), None, (4, 32)),
        "input_scale is given with block_shape",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_bad_arguments(case: str) -> None:
    """An error says which argument does not fit, what it is and what was expected."""
    form, arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"{form}: .*{message}"):
        getattr(functional, form)(*arguments)


def test_bad_settings() -> None:
    """Groups that do not divide a row, and other numbers of bits, are refused when a layer is made, or a weight is."""
    with pytest.raises(
        ValueError, match="group_size is 40, expected -1 or a divisor of in_features, 96"
    ):
        ops.QuantizedLinear(96, 4, group_size=40)
    with pytest.raises(ValueError, match="bits is 3"):
        ops.QuantizedLinear(96, 4, bits=3)
    with pytest.raises(ValueError, match="static is given with block_shape"):
        ops.FP8Linear(96, 4, static=True, block_shape=(128, 128))
    with pytest.raises(ValueError, match="group_size is 40, which 96 inputs cannot be cut into"):
        quantize_int4(plain(), 40)
    with pytest.raises(ValueError, match="expected \\[out_features, in_features\\]"):
        quantize_int8(torch.ones(4))
