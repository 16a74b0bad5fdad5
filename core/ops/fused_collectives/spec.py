"""Specs of collectives with what follows or precedes them, as far as one process can prove them: a rank alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opgraft.ops.fused_collectives import functional
from opgraft.ops.fused_quantization import spec as quantised
from opgraft.ops.fused_quantization.functional import (
    fused_add_rms_norm_quant_fp8_dynamic,
    fused_add_rms_norm_quant_fp8_static,
)
from opgraft.ops.layernorm import spec as norms
from opgraft.ops.layernorm.functional import fused_add_gemma_rms_norm, fused_add_rms_norm
from opgraft.ops.spec import Arguments, Draw, OpSpec
from torch import Tensor

_SUMS: dict[Any, OpSpec] = {spec.functional: spec for spec in (*norms.SPECS, *quantised.SPECS)}
"""By form of a norm after a sum: what is computed of the part of a rank that is alone."""

_ROWS = (
    (functional.all_reduce_rms_norm, fused_add_rms_norm),
    (functional.all_reduce_gemma_rms_norm, fused_add_gemma_rms_norm),
    (functional.all_reduce_rms_norm_quant_fp8_static, fused_add_rms_norm_quant_fp8_static),
    (functional.all_reduce_rms_norm_quant_fp8_dynamic, fused_add_rms_norm_quant_fp8_dynamic),
)


def _reference(after_sum: Callable[..., Any]) -> Callable[..., Any]:
    def reference(x: Tensor, residual: Tensor | None, kind: str = "tensor", **others: Any) -> Any:
        return after_sum(x, x * 0 if residual is None else residual, **others)

    return reference


def _inputs(after_sum: OpSpec) -> Callable[[Draw, Sequence[int], int], Arguments]:
    return lambda draw, lead, size: {"eps": 1e-5, **after_sum.inputs(draw, lead, size), "kind": "tensor"}


def _variants(after_sum: OpSpec) -> dict[str, Arguments]:
    known = {name: given for name, given in after_sum.variants.items() if "variance_size" not in given}
    return {**known, "no residual": {**next(iter(known.values())), "residual": None}}


SPECS = tuple(
    OpSpec(
        form,
        _inputs(_SUMS[after_sum]),
        _reference(_SUMS[after_sum].reference),
        _SUMS[after_sum].flops,
        variants=_variants(_SUMS[after_sum]),
        large=_SUMS[after_sum].large,
        tolerances=_SUMS[after_sum].tolerances,
        differentiable=False,
    )
    for form, after_sum in _ROWS
)
