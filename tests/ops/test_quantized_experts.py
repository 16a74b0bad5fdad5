"""Experts with quantized weights: what is refused, and what compiled code and the three parts make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.ops.moe.quantized.storage import dequantize_expert

EXPERTS, HIDDEN, INTERMEDIATE = 3, 8, 4


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def given(**others: Any) -> dict[str, Any]:
    arguments = {
        "x": t(5, HIDDEN),
        "w13": t(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.int8),
        "w13_scales": t(EXPERTS, 2 * INTERMEDIATE, 2),
        "w2": t(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.int8),
        "w2_scales": t(EXPERTS, HIDDEN, 1),
        "topk_weights": t(5, 2),
        "topk_ids": t(5, 2, dtype=torch.int64),
    }
    return {**arguments, **others}


HALF, BYTES, MX = torch.float16, torch.uint8, torch.float8_e8m0fnu
CASES: list[tuple[dict[str, Any], str]] = [
    ({"x": t(5, 2, HIDDEN)}, r"x has shape \(5, 2, 8\), expected 2 dimensions"),
    ({"activation": "relu"}, "activation"),
    (
        {"w13": t(EXPERTS, 8, HIDDEN)},
        r"w13 is torch.float32, expected torch.int8, torch.uint8 or one of",
    ),
    ({"w13": t(EXPERTS, 7, HIDDEN, dtype=torch.int8)}, "expected as many rows of gate as of up"),
    (
        {"w13": t(EXPERTS, 8, 7, dtype=torch.int8)},
        r"w13 has shape \(3, 8, 7\), expected \(3, 8, 8\) for 8 inputs",
    ),
    (
        {"w13": t(EXPERTS, 8, 8, dtype=BYTES)},
        r"w13 has shape \(3, 8, 8\), expected \(3, 8, 64\) for 8 inputs in torch.u",
    ),
    (
        {"w13": t(EXPERTS, 8, 8, dtype=BYTES), "w13_scales": t(EXPERTS, 8, 1, dtype=MX)},
        r"expected \(3, 8, 16\)",
    ),
    (
        {"w13_scales": t(EXPERTS, 8, 3)},
        r"w13_scales have shape \(3, 8, 3\), expected \(3, 8\) and a divisor of 8",
    ),
    ({"w2_scales": t(EXPERTS, HIDDEN, 1, dtype=torch.int64)}, "w2_scales is torch.int64"),
    ({"w2_offsets": t(EXPERTS, HIDDEN, 2)}, "w2_offsets have shape .* expected those of scales"),
    (
        {"w13": t(EXPERTS, 8, HIDDEN).to(torch.float8_e4m3fn), "w13_offsets": t(EXPERTS, 8, 2)},
        "w13_offsets are given, and only integers have offsets",
    ),
    (
        {"w2": t(EXPERTS - 1, HIDDEN, INTERMEDIATE, dtype=torch.int8)},
        r"w2 has shape \(2, 8, 4\), expected \(3, 8, 4\)",
    ),
    (
        {"w13_bias": t(EXPERTS, 8, dtype=HALF)},
        "w13_bias is torch.float16 .* expected torch.float32",
    ),
    ({"w2_bias": t(EXPERTS, 7)}, r"w2_bias is torch.float32 \(3, 7\) on cpu, expected"),
    ({"topk_weights": t(5, 3)}, r"topk_weights has shape \(5, 3\), expected \(5, 2\)"),
    ({"topk_ids": t(5, 2)}, "topk_ids are torch.float32"),
    (
        {"topk_ids": t(5, 2, dtype=torch.int64) + 3},
        "topk_ids reach from 3 to 3, expected those of 3 experts",
    ),
    (
        {"w2_scales": t(EXPERTS, HIDDEN, 1, device="meta")},
        "w2_scales is on meta, expected cpu as x",
    ),
]


@pytest.mark.parametrize(("others", "words"), CASES)
def test_bad_input(others: dict[str, Any], words: str) -> None:
    """The error names the form, the argument, and what fits."""
    with pytest.raises(ValueError, match=f"^quantized_experts: .*{words}"):
        functional.quantized_experts(**given(**others))


def test_a_token_with_nan() -> None:
    """Weights of NaN, as a router makes them of NaN, leave other tokens as they are."""
    generator = torch.Generator().manual_seed(0)
    codes = {
        name: torch.randint(-9, 9, tensor.shape, generator=generator, dtype=torch.int8)
        for name, tensor in given().items()
        if name in ("w13", "w2")
    }
    scales = {"w13_scales": t(EXPERTS, 8, 2) + 0.1, "w2_scales": t(EXPERTS, HIDDEN, 1) + 0.1}
    arguments = given(
        **codes, **scales, x=torch.randn(5, HIDDEN, generator=generator), topk_weights=t(5, 2) + 0.5
    )
    expected = functional.quantized_experts(**arguments)
    arguments["topk_weights"][2] = torch.nan
    got = functional.quantized_experts(**arguments)
    others = torch.arange(5) != 2
    assert torch.equal(got[others], expected[others])
    assert got[2].isnan().all()


def test_numbers_of_mxfp4() -> None:
    """The sixteen codes, the lower bits first, times a power of two; the rest of a block is not read."""
    codes = torch.tensor(
        [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0xFF] * 8]], dtype=torch.uint8
    )
    scales = torch.tensor([[129]], dtype=torch.uint8).view(MX)
    numbers = dequantize_expert(codes, scales, None, 16, torch.float32)
    magnitudes = [0, 2, 4, 6, 8, 12, 16, 24]
    assert numbers.tolist() == [[*magnitudes, *(-each for each in magnitudes)]]
