"""Spec of quantized experts. The reference reads each code where the documentation puts it."""

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

EXPERTS = plain.EXPERTS
INTERMEDIATE = 6

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the codes 0 to 7 in ``e2m1``."""


def _numbers(codes: Tensor, scales: Tensor, offsets: Tensor | None, size: int) -> Tensor:
    """Return the weights ``[experts, rows, size]`` of codes, in float64."""
    is_packed = codes.dtype == torch.uint8
    if is_packed and _are_powers_of_two(scales):
        return _mxfp4_numbers(codes, scales, size)

    if is_packed:
        numbers = _unpacked_int4(codes, size).double()
        if offsets is None:
            numbers = numbers - 8
    else:
        numbers = codes.double()

    groups = torch.arange(size) * scales.shape[2] // size
    scaled = numbers * scales.double()[..., groups]
    return scaled if offsets is None else scaled + offsets.double()[..., groups]


def _mxfp4_numbers(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    inputs = torch.arange(size)
    code = (codes[..., inputs // 2] >> inputs % 2 * 4) & 15
    magnitude = torch.tensor(E2M1, dtype=torch.float64)[(code & 7).long()]
    numbers = torch.where(code > 7, -magnitude, magnitude)
    return numbers * scales.double()[..., inputs // 32]


def _unpacked_int4(codes: Tensor, size: int) -> Tensor:
    """Return codes of 4 bits, where 64 bytes hold 128 inputs.

    Of those inputs, byte ``2 · i`` holds ``i`` and ``i + 32``, and byte ``2 · i + 1`` holds
    ``i + 64`` and ``i + 96``; the first of each pair in the lower bits.
    """
    inputs = torch.arange(size)
    within = inputs % 128
    byte = inputs // 128 * 64 + within % 32 * 2 + within // 64
    shift = within // 32 % 2 * 4
    return (codes[..., byte] >> shift) & 15


def _are_powers_of_two(scales: Tensor) -> bool:
    """Return True for scales of MXFP4. A reference gets all scales in float64, so values decide."""
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
    intermediate = w13.shape[1] // 2
    gate_up = _numbers(w13, w13_scales, w13_offsets, x.shape[1])
    down = _numbers(w2, w2_scales, w2_offsets, intermediate)
    return plain.fused_experts_reference(x, gate_up, down, **others)


def _groups(size: int) -> int:
    """Return the number of groups: of 16 inputs, if that divides ``size``, else of 3, else of 1."""
    for group in (16, 3):
        if size % group == 0:
            return size // group
    return size


def _scales(draw: Draw, rows: int, size: int, largest: float) -> Tensor:
    """Draw scales for codes up to ``largest``. The weights become about ``1 / sqrt(size)``."""
    return (draw(EXPERTS, rows, _groups(size)).abs() + 0.5) / (largest * size**0.5)


def _offsets(draw: Draw, rows: int, size: int) -> Tensor:
    return draw(EXPERTS, rows, _groups(size)) / (4 * size**0.5)


def _int8(draw: Draw, rows: int, size: int) -> Tensor:
    return draw.integers(-127, 128, (EXPERTS, rows, size)).to(torch.int8)


def _int4(draw: Draw, rows: int, size: int) -> Tensor:
    return _pairs(draw, rows, 64 * math.ceil(size / 128))


def _fp8(draw: Draw, rows: int, size: int) -> Tensor:
    numbers = (draw(EXPERTS, rows, size) * 100).clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn)


def _mxfp4(draw: Draw, rows: int, size: int) -> Tensor:
    return _pairs(draw, rows, 16 * math.ceil(size / 32))


def _pairs(draw: Draw, rows: int, width: int) -> Tensor:
    """Draw bytes of two codes each."""
    return draw.integers(0, 256, (EXPERTS, rows, width)).to(torch.uint8)


def _mx_scales(draw: Draw, rows: int, size: int, largest: float) -> Tensor:
    """Draw powers of two, for weights as large as with ``_scales``."""
    shape = (EXPERTS, rows, math.ceil(size / 32))
    # 127 is the bias of the exponent in e8m0.
    middle = 127 - round(math.log2(largest * size**0.5))
    exponents = middle + draw.integers(-1, 2, shape)
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def _format(
    codes: Callable[[Draw, int, int], Tensor],
    largest: float,
    scales: Callable[[Draw, int, int, float], Tensor] = _scales,
    *,
    offsets: bool = False,
) -> Arguments:
    """Return the arguments of a format with codes up to ``largest``."""
    rows = 2 * INTERMEDIATE
    arguments: Arguments = {
        "w13": lambda draw, lead, size: codes(draw, rows, size),
        "w13_scales": lambda draw, lead, size: scales(draw, rows, size, largest),
        "w2": lambda draw, lead, size: codes(draw, size, INTERMEDIATE),
        "w2_scales": lambda draw, lead, size: scales(draw, size, INTERMEDIATE, largest),
    }
    if offsets:
        arguments |= {
            "w13_offsets": lambda draw, lead, size: _offsets(draw, rows, size),
            "w2_offsets": lambda draw, lead, size: _offsets(draw, size, INTERMEDIATE),
        }
    return arguments


def _expert_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    tokens = math.prod(lead)
    weights = _format(_int8, 127)
    return {
        "x": draw(tokens, size),
        **{name: make(draw, lead, size) for name, make in weights.items()},
        "topk_weights": draw(tokens, plain.TOPK),
        "topk_ids": plain.ids(draw, lead, size),
    }


class _FinishedWeights(ExpertWeights):
    """The format of a layer with all codes in place."""

    def create(
        self, layer: Any, sizes: tuple[int, int, int], params_dtype: torch.dtype
    ) -> None: ...

    def finish(self, layer: Any) -> None: ...


def _experts_op(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu", **weights: Any
) -> Any:
    experts, rows, _ = weights["w13"].shape
    config = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=topk_ids.shape[1],
        hidden_dim=x.shape[1],
        intermediate_size_per_partition=rows // 2,
        activation=activation,
        has_bias=weights.get("w13_bias") is not None,
    )
    layer = plain.layer_of({"w13_offsets": None, "w2_offsets": None, **weights})
    method = QuantizedFusedMoEMethod(config, _FinishedWeights())
    return method, (layer, x, topk_weights, topk_ids)


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
