"""The kernels as forms and as modules, against the specs of opgraft, on each path."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from typing import Any

import pytest
import torch
from opgraft import functional
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS

NAMES = [
    "rms_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "gemma_rms_norm",
    "fused_add_gemma_rms_norm",
    "fused_add_gemma_rms_norm_",
    "layer_norm",
    "rms_norm_gated",
    "silu_and_mul",
    "mul_and_silu",
    "gelu_and_mul",
    "gelu_and_mul_sparse",
    "fatrelu_and_mul",
    "swigluoai_and_mul",
    "silu_and_mul_with_clamp",
    "swiglustep_and_mul",
    "gelu",
    "gelu_tanh",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "silu",
    "silu_",
    "relu2",
    "xielu",
    "apply_rotary_emb",
    "rotary_embedding",
    "rotary_embedding_",
    "qk_norm_rope",
    "mrope",
    "dual_chunk_rotary_embedding",
    "quant_fp8_static",
    "quant_fp8_dynamic",
    "scaled_dot_product_attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "selective_scan",
    "selective_state_update",
    "fused_experts",
]
CASES = [(SPECS[name], variant) for name in NAMES if name in SPECS for variant in SPECS[name].variants]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IDS = [spec.functional.name + (f"~{variant}" if variant else "") for spec, variant in CASES]
cases = pytest.mark.parametrize(("spec", "variant"), CASES, ids=IDS)
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build the kernels with")


def kernel(spec: OpSpec) -> Any:
    return function_of(spec.functional.name)


def function_of(name: str) -> Any:
    from opgraft_cpu_kernels import dense_attention, experts, kernels

    return next(getattr(module, name) for module in (dense_attention, experts, kernels) if hasattr(module, name))


@cases
def test_values_and_strides(spec: OpSpec, variant: str, path: str) -> None:
    """Each path computes what the reference computes in float64, of views with gaps between their elements too."""
    for dtype in DTYPES:
        if dtype in spec.dtypes:
            checks.check_values(dataclasses.replace(spec, large=()), variant, dtype, kernel(spec))
    checks.check_strides(spec, variant, kernel(spec))


@cases
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16))],
)
def test_realistic_sizes(spec: OpSpec, variant: str, dtype: torch.dtype, kernels: Any) -> None:
    """So does the path of this CPU of large inputs, which differ from small ones in the sharing among threads only."""
    if dtype in spec.dtypes and spec.large:
        checks.check_values(dataclasses.replace(spec, leads=()), variant, dtype, kernel(spec))


@cases
def test_bindings(spec: OpSpec, variant: str, kernels: Any) -> None:
    """The form, and the module where there is one, compute the same; what the kernels do not take is computed too."""
    modules = [checks.by_module(spec)] if spec.module and not spec.functional.mutates else []
    for call in (spec.functional, *modules):
        checks.check_values(spec, variant, torch.bfloat16, call, brief=True)
    if torch.float64 in spec.dtypes:
        checks.check_values(spec, variant, torch.float64, kernel(spec), brief=True)


@cases
def test_effects(spec: OpSpec, variant: str, kernels: Any) -> None:
    """Only declared arguments are written to, and results are new memory."""
    for dtype in {torch.float32, torch.bfloat16} & set(spec.dtypes):
        checks.check_effects(spec, variant, dtype, kernel(spec))


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        pytest.param(spec, variant, id=name, marks=[pytest.mark.slow] * (variant != [*spec.variants][-1]))
        for (spec, variant), name in zip(CASES, IDS, strict=True)
    ],
)
def test_compilation(spec: OpSpec, variant: str, kernels: Any) -> None:
    """A kernel compiles whole and once for all sizes, as the form of opgraft that calls it."""
    checks.check_compilation(spec, variant, spec.functional)


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_served(name: str, kernels: Any) -> None:
    """A form runs this plugin's function, which has its signature, and the torch op behind it is not bypassed."""
    form = getattr(functional, name)
    function = function_of(name)
    assert inspect.signature(function) == inspect.signature(form.native)
    if name not in SPECS:
        return
    spec = SPECS[name]
    variant = next(iter(spec.variants))
    arguments = spec.arguments(variant, torch.float32, spec.leads[1], spec.sizes[1])
    with torch.no_grad(), torch.profiler.profile() as profile:
        spec.functional(**arguments)
    assert f"opgraft_cpu_kernels::{name}" in {event.key for event in profile.key_averages()}
