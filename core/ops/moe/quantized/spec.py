"""Spec of experts with quantized weights, told number by number from what the storage is documented to hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.ops.moe.fused import spec as plain
from opgraft.ops.moe.fused.methods import FusedMoEConfig
from opgraft.ops.moe.quantized import functional
from opgraft.ops.moe.quantized.methods import ExpertWeights, QuantizedFusedMoEMethod
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec
from torch import Tensor

EXPERTS, INTERMEDIATE = plain.EXPERTS, 6
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _numbers(codes: Tensor, scales: Tensor, offsets: Tensor | None, size: int) -> Tensor:
    """Return the weights ``[experts, rows, size]`` that codes stand for, each looked up where it is said to lie."""
    inputs = torch.arange(size)
    if codes.dtype == torch.uint8 and _are_powers_of_two(scales):
        code = (codes[..., inputs // 2] >> inputs % 2 * 4) & 15
        magnitude = torch.tensor(E2M1, dtype=torch.float64)[(code & 7).long()]
        return torch.where(code > 7, -magnitude, magnitude) * scales.double()[..., inputs // 32]
    if codes.dtype == torch.uint8:
        place, within = inputs // 128 * 64, inputs % 128
        code = (codes[..., place + within % 32 * 2 + within // 64] >> within // 32 % 2 * 4) & 15
        numbers = code.double() - (8 if offsets is None else 0)
    else:
        numbers = codes.double()
    groups = inputs * scales.shape[2] // size
    return numbers * scales.double()[..., groups] + (
        0 if offsets is None else offsets.double()[..., groups]
    )


def _are_powers_of_two(scales: Tensor) -> bool:
    """Recognise the scales of MXFP4 by their values, as a reference gets all of them in float64."""
    return bool((scales.frexp().mantissa == 0.5).all())


def _reference_experts(
    x: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w2: Tensor,
    w2_scales: Tensor,
    w13_offsets: Tensor | None = None,
    w2_offsets: Tensor | None = None,
    **others: Any,
) -> Tensor:
    gate_up = _numbers(w13, w13_scales, w13_offsets, x.shape[1])
    return plain.fused_experts_reference(
        x, gate_up, _numbers(w2, w2_scales, w2_offsets, w13.shape[1] // 2), **others
    )


def _groups(size: int) -> int:
    return next(size // group for group in (16, 3, 1) if size % group == 0)


def _scales(draw: Draw, rows: int, size: int, largest: float) -> Tensor:
    """Draw scales that make weights about as large as layers initialise them, where codes reach that far."""
    return (draw(EXPERTS, rows, _groups(size)).abs() + 0.5) / (largest * size**0.5)


def _offsets(draw: Draw, rows: int, size: int) -> Tensor:
    return draw(EXPERTS, rows, _groups(size)) / (4 * size**0.5)


def _int8(draw: Draw, rows: int, size: int) -> Tensor:
    return draw.integers(-127, 128, (EXPERTS, rows, size)).to(torch.int8)


def _int4(draw: Draw, rows: int, size: int) -> Tensor:
    return draw.integers(0, 256, (EXPERTS, rows, 64 * math.ceil(size / 128))).to(torch.uint8)


def _fp8(draw: Draw, rows: int, size: int) -> Tensor:
    return (draw(EXPERTS, rows, size) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def _mxfp4(draw: Draw, rows: int, size: int) -> Tensor:
    return draw.integers(0, 256, (EXPERTS, rows, 16 * math.ceil(size / 32))).to(torch.uint8)


def _mx_scales(draw: Draw, rows: int, size: int, largest: float) -> Tensor:
    exponents = (
        127
        - round(math.log2(largest * size**0.5))
        + draw.integers(-1, 2, (EXPERTS, rows, -(-size // 32)))
    )
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def _format(
    codes: Callable[[Draw, int, int], Tensor],
    largest: float,
    scales: Callable[[Draw, int, int, float], Tensor] = _scales,
    *,
    offsets: bool = False,
) -> Arguments:
    """Return the arguments of a format, whose codes reach as far as ``largest``."""
    shifts = {
        "w13_offsets": lambda draw, lead, size: _offsets(draw, 2 * INTERMEDIATE, size),
        "w2_offsets": lambda draw, lead, size: _offsets(draw, size, INTERMEDIATE),
    }
    return {
        "w13": lambda draw, lead, size: codes(draw, 2 * INTERMEDIATE, size),
        "w13_scales": lambda draw, lead, size: scales(draw, 2 * INTERMEDIATE, size, largest),
        "w2": lambda draw, lead, size: codes(draw, size, INTERMEDIATE),
        "w2_scales": lambda draw, lead, size: scales(draw, size, INTERMEDIATE, largest),
        **(shifts if offsets else {}),
    }


def _expert_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    tokens = math.prod(lead)
    return {
        "x": draw(tokens, size),
        **{name: make(draw, lead, size) for name, make in _format(_int8, 127).items()},
        "topk_weights": draw(tokens, plain.TOPK),
        "topk_ids": plain.ids(draw, lead, size),
    }


class _AsGiven(ExpertWeights):
    """Weights that stand in the layer already."""

    def create(
        self, layer: Any, sizes: tuple[int, int, int], params_dtype: torch.dtype
    ) -> None: ...

    def finish(self, layer: Any) -> None: ...


def _experts_op(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu", **weights: Any
) -> Any:
    experts, rows = weights["w13"].shape[:2]
    sizes = (experts, topk_ids.shape[1], x.shape[1], rows // 2)
    config = FusedMoEConfig(
        *sizes, activation=activation, has_bias=weights.get("w13_bias") is not None
    )
    layer = plain.layer_of({"w13_offsets": None, "w2_offsets": None, **weights})
    return QuantizedFusedMoEMethod(config, _AsGiven()), (layer, x, topk_weights, topk_ids)


def _expert_flops(x: Tensor, w13: Tensor, topk_ids: Tensor, **others: Any) -> int:
    return 3 * topk_ids.numel() * x.shape[1] * w13.shape[1]


_BIASES: Arguments = {
    "w13_bias": lambda draw, lead, size: draw(EXPERTS, 2 * INTERMEDIATE),
    "w2_bias": lambda draw, lead, size: draw(EXPERTS, size),
}

SPECS = (
    OpSpec(
        functional.quantized_experts,
        _expert_inputs,
        _reference_experts,
        module=_experts_op,
        variants={
            "8 bits": {},
            "8 bits, offsets": _format(_int8, 127, offsets=True),
            "4 bits": _format(_int4, 8),
            "4 bits, offsets": _format(_int4, 15, offsets=True),
            "fp8": _format(_fp8, 200),
            "MXFP4 of gpt-oss": {
                **_format(_mxfp4, 6, _mx_scales),
                "activation": "swigluoai",
                **_BIASES,
            },
            "gelu, experts elsewhere": {"activation": "gelu", "topk_ids": plain.elsewhere},
        },
        sizes=(1, 9, 96),
        large=(((83,), 256),),
        tolerances={**HALF_NORM, torch.bfloat16: (5e-2, 2e-2)},
        differentiable=False,
        flops=_expert_flops,
    ),
)
