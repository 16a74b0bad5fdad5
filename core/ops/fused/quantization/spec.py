"""Specs of norms and gated activations whose result is quantised, made of those of quantisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.ops.activation.spec import silu
from opgraft.ops.fused.quantization import functional
from opgraft.ops.quantization import spec as quantization
from opgraft.ops.spec import HALF_NORM, Arguments, Draw, OpSpec
from torch import Tensor

Reference = Callable[..., Any]


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return normed if weight is None else normed * weight


def _normed(quantised: Reference) -> Reference:
    return lambda x, weight, eps, **others: quantised(_norm(x, weight, eps), **others)


def _summed(quantised: Reference) -> Reference:
    def reference(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **others: Any
    ) -> tuple[Tensor, ...]:
        found = quantised(_norm(x + residual, weight, eps), **others)
        return (found, x + residual) if isinstance(found, Tensor) else (*found, x + residual)

    return reference


def _gated_reference(quantised: Reference) -> Reference:
    def reference(x: Tensor, **others: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return quantised(silu(gate) * up, **others)

    return reference


Inputs = Callable[[Draw, Sequence[int], int], Arguments]


def _quantised(inputs: Inputs, spec: OpSpec) -> Inputs:
    """Draw arguments for rows as long as those that are quantised, and beside them those of quantisation."""

    def draw_both(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
        given = spec.inputs(draw, lead, size)
        return {**given, **inputs(draw, lead, given["x"].shape[-1])}

    return draw_both


def _norm_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, size), "weight": draw(size), "eps": 1e-5}


def _sum_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {**_norm_inputs(draw, lead, size), "residual": draw(*lead, size)}


def _gate_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {"x": draw(*lead, 2 * size)}


ROWS = (
    (
        functional.rms_norm_quant_fp8_static,
        functional.rms_norm_quant_fp8_dynamic,
        functional.rms_norm_quant_fp4,
        _norm_inputs,
        _normed,
    ),
    (
        functional.fused_add_rms_norm_quant_fp8_static,
        functional.fused_add_rms_norm_quant_fp8_dynamic,
        functional.fused_add_rms_norm_quant_fp4,
        _sum_inputs,
        _summed,
    ),
    (
        functional.silu_and_mul_quant_fp8_static,
        functional.silu_and_mul_quant_fp8_dynamic,
        functional.silu_and_mul_quant_fp4,
        _gate_inputs,
        _gated_reference,
    ),
)
# In MXFP4 rounding may double the scale of a group, and so move all its numbers.
VARIANTS = (("tensor", "e5m2"), ("token", "bounded", "group"), ("NVFP4",))
QUANTISATIONS = tuple(zip(quantization.SPECS, VARIANTS, strict=True))
"""The specs of quantisation, each with those of its variants that are told apart here."""

SPECS = tuple(
    OpSpec(
        form,  # type: ignore[arg-type]  # mypy knows no more of what a star takes than that these are objects
        _quantised(inputs, spec),
        reference(spec.reference),
        spec.flops,
        variants={name: spec.variants[name] for name in names},
        sizes=spec.sizes,
        large=spec.large,
        # Scales follow from what is rounded to a half type first.
        tolerances={
            **spec.tolerances,
            torch.float32: (1e-5, 1.3e-6),
            torch.float64: (1e-8, 1e-6),
            **HALF_NORM,
        },
        differentiable=False,
    )
    for *forms, inputs, reference in ROWS
    for form, (spec, names) in zip(forms, QUANTISATIONS, strict=True)
)
