"""Every op against its spec: the claims below hold for each form, in each of its variants."""

from __future__ import annotations

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
PURE = [case for case in CASES if not case[0].functional.mutates]


def cases(rows: list[tuple[OpSpec, str]]) -> pytest.MarkDecorator:
    names = [spec.functional.name + (f"~{variant}" if variant else "") for spec, variant in rows]
    return pytest.mark.parametrize(("spec", "variant"), rows, ids=names)


@cases(CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_definition(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """Native definition, form, registered op and module compute what the reference computes in float64."""
    if dtype not in spec.dtypes:
        pytest.skip(f"{spec.functional.name} does not take {dtype}")
    thorough, *others = implementations(spec)
    checks.check_values(spec, variant, dtype, thorough)
    for call in others:
        checks.check_values(spec, variant, dtype, call, brief=True)


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


@cases(CASES)
def test_registration(spec: OpSpec, variant: str) -> None:
    """torch's own checks of registered ops pass, none loses gradients, and the fake rule tells what the op makes."""
    checks.check_registration(spec, variant)
    if not spec.functional.differentiable:
        checks.check_refusal(spec, variant, checks.registered(spec))
    for dtype in spec.dtypes:
        checks.check_fake(spec, variant, dtype)


@cases(CASES)
def test_compilation(spec: OpSpec, variant: str) -> None:
    """Form and registered op compile whole and once for all sizes."""
    for call in (spec.functional, checks.registered(spec)):
        checks.check_compilation(spec, variant, call)


@cases(PURE)
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
    without = {ops.CustomOp, *ropes}
    assert {cls for cls in leaves if cls.forward_native not in proven} == without
