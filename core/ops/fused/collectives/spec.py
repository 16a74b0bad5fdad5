"""Specs of norms and linear maps with collectives, for a rank alone: one process has no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.ops.fused.collectives import functional
from opgraft.ops.fused.quantization import spec as quantised
from opgraft.ops.fused.quantization.functional import (
    fused_add_rms_norm_quant_fp4,
    fused_add_rms_norm_quant_fp8_dynamic,
    fused_add_rms_norm_quant_fp8_static,
)
from opgraft.ops.layernorm import spec as norms
from opgraft.ops.layernorm.functional import fused_add_gemma_rms_norm, fused_add_rms_norm
from opgraft.ops.linear import spec as linear
from opgraft.ops.spec import Arguments, Draw, OpSpec
from torch import Tensor

_SUMS: dict[Any, OpSpec] = {spec.functional: spec for spec in (*norms.SPECS, *quantised.SPECS)}
"""The specs of norms after a sum, by their forms. A rank alone computes the same as such a norm."""

(_LINEAR,) = linear.SPECS

_ROWS = (
    (functional.all_reduce_rms_norm, fused_add_rms_norm),
    (functional.all_reduce_gemma_rms_norm, fused_add_gemma_rms_norm),
    (functional.all_reduce_rms_norm_quant_fp8_static, fused_add_rms_norm_quant_fp8_static),
    (functional.all_reduce_rms_norm_quant_fp8_dynamic, fused_add_rms_norm_quant_fp8_dynamic),
    (functional.all_reduce_rms_norm_quant_fp4, fused_add_rms_norm_quant_fp4),
)


def _reference_after_sum(after_sum: Callable[..., Any]) -> Callable[..., Any]:
    def reference(x: Tensor, residual: Tensor | None, kind: str = "tensor", **others: Any) -> Any:
        if residual is None:
            residual = torch.zeros_like(x)
        return after_sum(x, residual, **others)

    return reference


def _inputs_of_ranks(after_sum: OpSpec) -> Callable[[Draw, Sequence[int], int], Arguments]:
    def draw_with_kind(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
        return {"eps": 1e-5, **after_sum.inputs(draw, lead, size), "kind": "tensor"}

    return draw_with_kind


def _variants(after_sum: OpSpec) -> dict[str, Arguments]:
    # The collectives have no variance_size.
    known = {
        name: given for name, given in after_sum.variants.items() if "variance_size" not in given
    }
    first = next(iter(known.values()))
    return {**known, "no residual": {**first, "residual": None}}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, **others: Any) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _map_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    # One process is a group of one rank.
    return {**_LINEAR.inputs(draw, lead, size), "world_size": 1}


def _gathered_inputs(draw: Draw, lead: Sequence[int], size: int) -> Arguments:
    return {**_map_inputs(draw, lead, size), "rows": lead[0]}


def _spec_of_norm(form: Any, after_sum: OpSpec) -> OpSpec:
    return OpSpec(
        form,
        _inputs_of_ranks(after_sum),
        _reference_after_sum(after_sum.reference),
        after_sum.flops,
        variants=_variants(after_sum),
        sizes=after_sum.sizes,
        large=after_sum.large,
        tolerances=after_sum.tolerances,
        differentiable=False,
    )


_OF_NORMS = tuple(_spec_of_norm(form, _SUMS[after_sum]) for form, after_sum in _ROWS)

_OF_MAPS = tuple(
    OpSpec(
        form,
        inputs,
        _linear,
        _LINEAR.flops,
        variants={"": {}, "no bias": {"bias": None}},
        tolerances=_LINEAR.tolerances,
        differentiable=False,
    )
    for form, inputs in (
        (functional.linear_reduce_scatter_rows, _map_inputs),
        (functional.all_gather_rows_linear, _gathered_inputs),
    )
)

SPECS = (*_OF_NORMS, *_OF_MAPS)
