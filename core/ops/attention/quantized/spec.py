"""The spec of attention with a quantised result, made of two other specs."""

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

ATTENTION = attention.SPECS[0]
QUANTISATION = quantization.SPECS[0]
SCALE = 0.05
STEPS = {torch.float8_e4m3fn: 0.125, torch.float8_e5m2: 0.25}
"""The distance of two neighbouring numbers, relative to them, by dtype."""


def _attention_inputs(draw: Draw, lead: Sequence[int], head_size: int) -> Arguments:
    inputs = ATTENTION.inputs(draw, lead, head_size)
    return {**inputs, "output_scale": torch.tensor([SCALE])}


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
        # A sum of terms that cancel is small, but in half types has the error of its terms.
        tolerances={
            **QUANTISATION.tolerances,
            **{dtype: (0.01 / SCALE, step) for dtype, step in STEPS.items()},
        },
        differentiable=False,
    ),
)
