"""The kernels against the specs of opgraft, where the plugin's own tests do not ask them: other paths, large inputs.

``test_plugin.py`` runs those tests in their short form, and ``make test-conformance`` in full.
"""

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
    "rms_norm_quant_fp8_static",
    "rms_norm_quant_fp8_dynamic",
    "fused_add_rms_norm_quant_fp8_static",
    "fused_add_rms_norm_quant_fp8_dynamic",
    "gemma_rms_norm",
    "fused_add_gemma_rms_norm",
    "fused_add_gemma_rms_norm_",
    "layer_norm",
    "rms_norm_gated",
    "silu_and_mul",
    "silu_and_mul_quant_fp8_static",
    "silu_and_mul_quant_fp8_dynamic",
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
    "scaled_dot_product_attention_quant_fp8_static",
    "causal_conv1d",
    "causal_conv1d_update",
    "selective_scan",
    "selective_state_update",
    "fused_experts",
    "add_lora_",
]
FORMS = [name for name in NAMES if name in SPECS]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="no g++ to build the kernels with"
)


def kernel(spec: OpSpec) -> Any:
    return function_of(spec.functional.name)


def function_of(name: str) -> Any:
    from opgraft_cpu_kernels import dense_attention, experts, kernels, lora

    return next(
        getattr(module, name)
        for module in (dense_attention, experts, kernels, lora)
        if hasattr(module, name)
    )


@pytest.mark.parametrize("name", FORMS)
def test_other_paths(name: str, path: str, kernels: Any) -> None:
    """Paths that are not this CPU's compute what the reference computes, of views too, and write to nothing else."""
    import opgraft_cpu_kernels

    if path == opgraft_cpu_kernels.paths()[0]:
        pytest.skip("the plugin's own tests take this path")
    spec = dataclasses.replace(SPECS[name], large=())
    assert {
        variant: wrong for variant in spec.variants if (wrong := wrong_with(spec, variant))
    } == {}


def wrong_with(spec: OpSpec, variant: str) -> str:
    """What the checks find wrong with a variant."""
    try:
        for dtype in {*DTYPES} & {*spec.dtypes}:
            checks.check_values(spec, variant, dtype, kernel(spec))
            checks.check_effects(spec, variant, dtype, kernel(spec))
        checks.check_strides(spec, variant, kernel(spec))
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [name for name in FORMS if SPECS[name].large])
def test_realistic_sizes(name: str, kernels: Any) -> None:
    """So does the path of this CPU of large inputs, which differ from small ones in the sharing among threads only."""
    spec = SPECS[name]
    variant = [*spec.variants][-1]
    if torch.bfloat16 in spec.dtypes:
        checks.check_values(
            dataclasses.replace(spec, leads=()), variant, torch.bfloat16, kernel(spec)
        )


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_served(name: str, kernels: Any) -> None:
    """A form runs this plugin's function, which has its signature, and the torch op behind it is not bypassed."""
    from opgraft_cpu_kernels import path

    form = getattr(functional, name)
    function = function_of(name)
    assert inspect.signature(function) == inspect.signature(form.native)
    if name not in SPECS:
        return
    if name == "fused_experts" and path() == "scalar":
        pytest.skip("without vectors experts run the native definition")
    spec = SPECS[name]
    variant = next(iter(spec.variants))
    arguments = spec.arguments(variant, torch.float32, spec.leads[1], spec.sizes[1])
    with torch.no_grad(), torch.profiler.profile() as profile:
        spec.functional(**arguments)
    assert f"opgraft_cpu_kernels::{name}" in {event.key for event in profile.key_averages()}
