"""Specs of norms and gated activations with a quantised result, made from specs of quantisation."""

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
    mean = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    normed = x / torch.sqrt(mean + eps)
    return normed if weight is None else normed * weight


def _norm_reference(quantise: Reference) -> Reference:
    return lambda x, weight, eps, **others: quantise(_norm(x, weight, eps), **others)


def _sum_reference(quantise: Reference) -> Reference:
    def reference(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **others: Any
    ) -> tuple[Tensor, ...]:
        summed = x + residual
        quantised = quantise(_norm(summed, weight, eps), **others)
        # A static quantisation returns one tensor, the others a tensor and scales.
        if isinstance(quantised, Tensor):
            return quantised, summed
        return *quantised, summed

    return reference


def _gate_reference(quantise: Reference) -> Reference:
    def reference(x: Tensor, **others: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return quantise(silu(gate) * up, **others)

    return reference


Inputs = Callable[[Draw, Sequence[int], int], Arguments]


def _joint_inputs(inputs: Inputs, spec: OpSpec) -> Inputs:
    """Draw the arguments of quantisation, and with ``inputs`` those of rows of the same length."""

    def draw_both(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
        given = spec.inputs(draw, lead, size)
        width = given["x"].shape[-1]
        return {**given, **inputs(draw, lead, width)}

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
        _norm_reference,
    ),
    (
        functional.fused_add_rms_norm_quant_fp8_static,
        functional.fused_add_rms_norm_quant_fp8_dynamic,
        functional.fused_add_rms_norm_quant_fp4,
        _sum_inputs,
        _sum_reference,
    ),
    (
        functional.silu_and_mul_quant_fp8_static,
        functional.silu_and_mul_quant_fp8_dynamic,
        functional.silu_and_mul_quant_fp4,
        _gate_inputs,
        _gate_reference,
    ),
)
# Not MXFP4: rounding may double the scale of a group, which moves all numbers of the group.
VARIANTS = (("tensor", "e5m2"), ("token", "bounded", "group"), ("NVFP4",))
QUANTISATIONS = tuple(zip(quantization.SPECS, VARIANTS, strict=True))
"""The specs of quantisation, each with the variants that are compared here."""

SPECS = tuple(
    OpSpec(
        # mypy takes what a star unpacks for objects.
        form,  # type: ignore[arg-type]
        _joint_inputs(inputs, spec),
        reference(spec.reference),
        spec.flops,
        variants={name: spec.variants[name] for name in names},
        sizes=spec.sizes,
        large=spec.large,
        # Scales follow from numbers that were rounded to a half type.
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
