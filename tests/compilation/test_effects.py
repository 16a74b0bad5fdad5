"""What each pass saves: bytes that the operators of a graph read and write, with the pass and without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import opgraft
import pytest
import torch
from compilation.test_attention_fusion import Attending as Heads
from compilation.test_attention_fusion import drawn as heads
from compilation.test_fusions import ROW, Quantizing
from compilation.test_passes import CopyingFirst
from compilation.test_rotary_fusion import Attending as Rotating
from compilation.test_rotary_fusion import drawn as rotated
from opgraft import CompilationConfig
from opgraft.ops import QuantFP4, QuantFP8, RMSNorm, RotaryEmbedding, SiluAndMul
from support.blocks import WIDTH, Block
from support.providers import provide
from support.traffic import traffic_of
from torch import Tensor, nn


def block() -> nn.Module:
    return Block().requires_grad_(False)


def to_8_bits() -> nn.Module:
    return Quantizing(QuantFP8(False, (1, -1)), False)


def to_4_bits() -> nn.Module:
    return Quantizing(QuantFP4(), True)


def rows(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 5, WIDTH),)


def long_rows(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 5, ROW),)


def attended(size: int) -> tuple[Tensor, ...]:
    return (heads(size),)


NORMS = ("rms_norm", "fused_add_rms_norm")
ROWS: Mapping[
    str,
    tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], Mapping[Any, Any], float],
] = {
    "copies": (CopyingFirst, rows, {}, 0.95),
    "gated_product": (block, rows, {SiluAndMul: ("silu_and_mul",)}, 0.9),
    "add_rms_norm": (block, rows, {RMSNorm: NORMS}, 0.98),
    "rms_norm_quant_fp8": (
        to_8_bits,
        long_rows,
        {
            RMSNorm: (*NORMS, *(f"{name}_quant_fp8_dynamic" for name in NORMS)),
            QuantFP8: ("quant_fp8_dynamic",),
        },
        0.85,
    ),
    "rms_norm_quant_fp4": (
        to_4_bits,
        long_rows,
        {RMSNorm: (*NORMS, *(f"{name}_quant_fp4" for name in NORMS)), QuantFP4: ("quant_fp4",)},
        0.85,
    ),
    "silu_and_mul_quant_fp4": (
        to_4_bits,
        long_rows,
        {SiluAndMul: ("silu_and_mul", "silu_and_mul_quant_fp4"), QuantFP4: ("quant_fp4",)},
        0.98,
    ),
    "silu_and_mul_quant_fp8": (
        to_8_bits,
        long_rows,
        {
            SiluAndMul: ("silu_and_mul", "silu_and_mul_quant_fp8_dynamic"),
            QuantFP8: ("quant_fp8_dynamic",),
        },
        0.98,
    ),
    "attention_quant_fp8": (Heads, attended, {}, 0.98),
    "qk_norm_rope": (
        Rotating,
        rotated,
        {RMSNorm: ("rms_norm",), RotaryEmbedding: ("rotary_embedding", "qk_norm_rope")},
        0.6,
    ),
}
"""By pass: a model, its input for a size of the batch, kernels of ops, and the share of bytes that remains at most.

What is in no kernel is computed by one operator of torch after another. ``joint_linears`` saves calls, and passes over
collectives what ranks exchange: that is with their other tests.
"""


@pytest.mark.parametrize("name", ROWS)
def test_bytes_moved(name: str) -> None:
    """Kernels and operators read and write less where a pass has joined what they compute."""
    make, inputs, provided, most = ROWS[name]
    for op, forms in provided.items():
        provide(op, *forms)
    moved = []
    for on in (True, False):
        torch.manual_seed(0)
        config = CompilationConfig(level=1, pass_config={name: on})
        moved.append(
            traffic_of(opgraft.compile(make().eval(), config, args=inputs(3)), *inputs(64))
        )
    assert moved[0] < most * moved[1]
