"""The spec of attention whose result is quantised, made of those of attention and of quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opgraft.ops.attention import spec as attention
from opgraft.ops.attention.quantized.functional import (
    FP8,
    scaled_dot_product_attention_quant_fp8_static,
)
from opgraft.ops.quantization import spec as quantization
from opgraft.ops.spec import Arguments, Draw, OpSpec
from torch import Tensor

ATTENTION, QUANTISATION = attention.SPECS[0], quantization.SPECS[0]
SCALE = 0.05
STEPS = {torch.float8_e4m3fn: 0.125, torch.float8_e5m2: 0.25}
"""By dtype, the distance of numbers next to each other."""


def _attention_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    return {**ATTENTION.inputs(draw, lead, head_size), "output_scale": torch.tensor([SCALE])}


def _quantised_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_scale: Tensor,
    dtype: torch.dtype = FP8,
    **others: Any,
) -> Tensor:
    attended = ATTENTION.reference(query, key, value, **others)
    quantised: Tensor = QUANTISATION.reference(attended, output_scale, (-1, -1), dtype)
    return quantised


SPECS = (
    OpSpec(
        scaled_dot_product_attention_quant_fp8_static,
        _attention_inputs,
        _quantised_attention,
        ATTENTION.flops,
        variants={**ATTENTION.variants, "e5m2": {"attn_mask": None, "dtype": torch.float8_e5m2}},
        leads=ATTENTION.leads,
        sizes=ATTENTION.sizes,
        large=ATTENTION.large,
        # Sums that cancel are small, and in half types have the error of their parts, over the scale.
        tolerances={
            **QUANTISATION.tolerances,
            **{dtype: (0.01 / SCALE, step) for dtype, step in STEPS.items()},
        },
        differentiable=False,
    ),
)
