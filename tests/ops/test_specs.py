"""Every op against its spec: the claims below hold for each form.

Checks that take long are made here of a form's last variant, or of its first and last. 'make evidence' makes every
check of every variant, and test_evidence.py fails where the code has changed since. So what takes seconds to trace, and
realistic sizes of the other variants and dtypes, are for 'make test-slow'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from opgraft.binding.functional import FUNCTIONALS
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import SPECS
from opgraft.testing.proof import implementations

CASES = [(spec, variant) for spec in SPECS.values() for variant in spec.variants]
ENDS = [
    (spec, variant)
    for spec in SPECS.values()
    for variant in dict.fromkeys([*spec.variants][:: len(spec.variants) - 1 or 1])
]
LAST = [(spec, [*spec.variants][-1]) for spec in SPECS.values()]
TRACED_LONG = (
    *("conv3d", "dual_chunk_rotary_embedding", "mamba_chunk_scan", "mrope", "paged_attention", "quantized_experts"),
    *("rotary_embedding", "rotary_embedding_", "selective_scan"),
)
"""Ops that take seconds to trace; each has a relative that does not."""
DIFFERENTIATED_LONG = ("conv3d", "mamba_chunk_scan", "paged_attention")
"""Ops that take seconds to differentiate by finite differences; so have these."""
PURE = [case for case in ENDS if not case[0].functional.mutates]
HALF_AND_SINGLE = (torch.bfloat16, torch.float32)
VALUES = [(*case, dtype) for case in CASES for dtype in case[0].dtypes if case in ENDS or dtype in HALF_AND_SINGLE]
REALISTIC = [row for row in VALUES if row[0].large]


def named(spec: OpSpec, variant: str) -> str:
    return spec.functional.name + (f"~{variant}" if variant else "")


def cases(rows: list[tuple[OpSpec, str]], long: Container[str] = ()) -> pytest.MarkDecorator:
    """A test of variants of ops; those of long ones are for 'make test-slow'."""
    marked = [
        pytest.param(*row, id=named(*row), marks=[pytest.mark.slow] * (row[0].functional.name in long)) for row in rows
    ]
    return pytest.mark.parametrize(("spec", "variant"), marked)


@pytest.mark.parametrize(
    ("spec", "variant", "dtype"), VALUES, ids=[f"{dtype}-{named(*case)}" for *case, dtype in VALUES]
)
def test_definition(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """Native definition, form, registered op and module compute what the reference computes in float64."""
    thorough, *others = implementations(spec)
    checks.check_values(dataclasses.replace(spec, large=()), variant, dtype, thorough)
    for call in others:
        checks.check_values(spec, variant, dtype, call, brief=True)


@pytest.mark.parametrize(
    ("spec", "variant", "dtype"),
    [
        pytest.param(
            *(spec, variant, dtype),
            id=f"{dtype}-{named(spec, variant)}",
            marks=[pytest.mark.slow] * ((spec, variant) not in LAST or dtype not in HALF_AND_SINGLE),
        )
        for spec, variant, dtype in REALISTIC
    ],
)
def test_realistic_sizes(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """So does the native definition on large inputs."""
    checks.check_values(dataclasses.replace(spec, leads=()), variant, dtype, spec.functional.native)


@cases(CASES)
def test_strides(spec: OpSpec, variant: str) -> None:
    """Views with gaps between their elements give what contiguous tensors give."""
    for call in implementations(spec):
        checks.check_strides(spec, variant, call)


@cases(CASES)
def test_effects(spec: OpSpec, variant: str) -> None:
    """Only declared arguments are written to, and results are new memory."""
    for dtype in {torch.float32, torch.bfloat16} & set(spec.dtypes):
        for call in implementations(spec):
            checks.check_effects(spec, variant, dtype, call)


@cases(LAST, TRACED_LONG)
def test_registration(spec: OpSpec, variant: str) -> None:
    """torch's own checks of registered ops pass."""
    checks.check_registration(spec, variant)


@cases(CASES)
def test_fake(spec: OpSpec, variant: str) -> None:
    """The fake rule tells what the op makes, and what has no gradients loses none."""
    for dtype in spec.dtypes:
        checks.check_fake(spec, variant, dtype)
    if not spec.functional.differentiable:
        checks.check_refusal(spec, variant, checks.registered(spec))


@cases(LAST, TRACED_LONG)
def test_compilation(spec: OpSpec, variant: str) -> None:
    """Form and registered op compile whole and once for all sizes."""
    for call in (spec.functional, checks.registered(spec)):
        checks.check_compilation(spec, variant, call)


@cases(PURE, DIFFERENTIATED_LONG)
def test_gradients(spec: OpSpec, variant: str) -> None:
    """Gradients of form and registered op are those of finite differences."""
    if not spec.differentiable:
        pytest.skip(f"{spec.functional.name} has no gradient")
    for call in (spec.functional, checks.registered(spec)):
        checks.check_gradients(spec, variant, call)


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS.values() if spec.outside], ids=lambda spec: spec.functional.name
)
def test_outside(spec: OpSpec) -> None:
    """Others' implementations compute the same, each in at least one variant."""
    if any(outside.name.startswith("transformers") for outside in spec.outside):
        pytest.importorskip("transformers")
    compared = [name for variant in spec.variants for name in checks.check_outside(spec, variant, spec.functional)]
    assert set(compared) == {outside.name for outside in spec.outside}


def test_every_form_has_a_spec_and_a_public_name() -> None:
    """What is registered with torch is in opgraft.functional and carries its proof."""
    own = {name for name, form in FUNCTIONALS.items() if form.native.__module__.startswith("opgraft.")}
    assert own == set(SPECS) == set(functional.__all__)
    for name in own:
        assert getattr(functional, name) is FUNCTIONALS[name]
        assert FUNCTIONALS[name].__doc__


def test_every_op_class_is_built_by_a_spec() -> None:
    """Each native definition of an exported op class, but for layers made of ops, runs in what some spec builds."""
    exported: set[Any] = {value for value in map(vars(ops).get, ops.__all__) if isinstance(value, type)}
    leaves = {cls for cls in exported if issubclass(cls, ops.CustomOp) and not issubclass(cls, ops.PluggableLayer)}
    built = {
        spec.module(**spec.arguments(variant, spec.dtypes[0], spec.leads[0], spec.sizes[0]))[0].op_class
        for spec, variant in CASES
        if spec.module
    }
    proven = {cls.forward_native for cls in built}
    # These ropes rotate by what the context or a geometry asks for, which test_rope_classes compares in float64.
    ropes = {
        ops.DynamicNTKScalingRotaryEmbedding,
        ops.Phi3LongRoPEScaledRotaryEmbedding,
        ops.Llama4VisionRotaryEmbedding,
    }
    # They are made of a form that is proved, which test_fused_moe and test_mixers compare with the maths.
    composed = {ops.FusedMoEModularMethod, ops.Mixer2RMSNormGated}
    without = {ops.CustomOp, *ropes, *composed}
    assert {cls for cls in leaves if cls.forward_native not in proven} == without
