"""Every op against its spec: the checks of the proof hold for each form, with the kernels that this machine has.

A form is checked here in its first and last variants. Gradients are checked in one variant. Tracing is checked for one
form of each family. 'make prove' makes every check of every variant, and test_proofs.py fails if the code has changed
since. So the other variants, and realistic sizes of further dtypes, are for 'make test-slow'.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from opgraft import functional, ops
from opgraft.binding.functional import FUNCTIONALS
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.catalogue import FAMILIES, SPECS
from opgraft.testing.proof import PROOF_CHECKS, checks_of

Case = tuple[OpSpec, str]

CASES = [(spec, variant) for spec in SPECS.values() for variant in spec.variants]
ENDS = [
    (spec, variant)
    for spec in SPECS.values()
    for variant in dict.fromkeys([*spec.variants][:: len(spec.variants) - 1 or 1])
]
LAST = [(spec, [*spec.variants][-1]) for spec in SPECS.values()]
TRACED = [(spec, "" if spec.functional.name == "conv2d" else variant) for spec, variant in LAST]
"""The last variants, but for the plain convolution: to trace circular padding takes four times as long."""
LONG_TO_TRACE = {
    *(
        "conv3d",
        "dual_chunk_rotary_embedding",
        "fp8_linear",
        "mamba_chunk_scan",
        "mm_encoder_attn",
        "mrope",
    ),
    *(
        "paged_attention",
        "qk_norm_rope",
        "quantized_experts",
        "quantized_linear",
        "rotary_embedding",
        "rotary_embedding_",
    ),
    "selective_scan",
}
"""Ops that take seconds to trace, by AOT autograd or by Dynamo.

Each has a relative that does not. ``qk_norm_rope`` has none in its folder: compiled models call the
op in compilation/test_rotary_fusion.py.
"""
SHORTEST = [
    next((spec for spec in family.SPECS if spec.functional.name not in LONG_TO_TRACE), None)
    for family in FAMILIES
]
TRACED_HERE = {spec.functional.name for spec in SHORTEST if spec is not None}
"""One op of each family, which is traced in every run."""
DIFFERENTIATED_LONG = ("conv3d", "mamba_chunk_scan", "paged_attention")
"""Ops that take seconds to differentiate by finite differences; so have these."""
TRACED_ELSEWHERE = SPECS.keys() - TRACED_HERE
LONG = {
    "registration": TRACED_ELSEWHERE,
    "compilation": TRACED_ELSEWHERE,
    "gradients": DIFFERENTIATED_LONG,
}
HALF_AND_SINGLE = (torch.bfloat16, torch.float32)


def dtypes_of(spec: OpSpec, variant: str) -> tuple[torch.dtype, ...]:
    """The dtypes in which a variant is computed: all for the last variant, two for the others."""
    return tuple(
        dtype for dtype in spec.dtypes if (spec, variant) in LAST or dtype in HALF_AND_SINGLE
    )


SAMPLES: dict[str, list[Case]] = {
    "values": [
        (dataclasses.replace(spec, large=(), dtypes=dtypes_of(spec, name)), name)
        for spec, name in CASES
    ],
    "strides": CASES,
    "effects": CASES,
    "registration": TRACED,
    "fake": CASES,
    "compilation": TRACED,
    "gradients": ENDS,
}


TRACED_NAMES = {(spec.functional.name, variant) for spec, variant in TRACED}
END_NAMES = {(spec.functional.name, variant) for spec, variant in ENDS}
FEWER = {"gradients": TRACED_NAMES}
"""Checks that every run makes of one variant of a form, not of the first and the last."""


def named(spec: OpSpec, variant: str) -> str:
    return spec.functional.name + (f"~{variant}" if variant else "")


def made(check: str, spec: OpSpec, variant: str) -> Any:
    """A check of a variant as a parameter; some are for 'make test-slow'."""
    name = spec.functional.name
    variants = FEWER.get(check, END_NAMES)
    slow = name in LONG.get(check, ()) or (name, variant) not in variants
    return pytest.param(
        check, spec, variant, id=f"{check}-{named(spec, variant)}", marks=[pytest.mark.slow] * slow
    )


@pytest.mark.parametrize(
    ("check", "spec", "variant"),
    [
        made(check, *case)
        for check, rows in SAMPLES.items()
        for case in rows
        if check in checks_of(case[0])
    ],
)
def test_check(check: str, spec: OpSpec, variant: str) -> None:
    """What 'make prove' proves of native definitions holds for whatever is bound here."""
    PROOF_CHECKS[check](spec, variant)


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        pytest.param(*case, id=named(*case))
        for case in CASES
        if not case[0].functional.differentiable
    ],
)
def test_refusal(spec: OpSpec, variant: str) -> None:
    """What has no gradients loses none: of registration, which traces, the part that takes no time."""
    checks.check_refusal(spec, variant, checks.registered(spec))


@pytest.mark.parametrize(
    ("spec", "variant", "dtype"),
    [
        pytest.param(
            *(spec, variant, dtype),
            id=f"{dtype}-{named(spec, variant)}",
            marks=[pytest.mark.slow]
            * ((spec, variant) not in LAST or dtype not in HALF_AND_SINGLE),
        )
        for spec, variant in CASES
        if spec.large
        for dtype in dtypes_of(spec, variant)
    ],
)
def test_realistic_sizes(spec: OpSpec, variant: str, dtype: torch.dtype) -> None:
    """The native definition computes what the reference computes on large inputs, too."""
    checks.check_values(dataclasses.replace(spec, leads=()), variant, dtype, spec.functional.native)


def test_no_check_is_left_out() -> None:
    """The list of checks is that of the proof, which says what each claims."""
    assert SAMPLES.keys() == PROOF_CHECKS.keys()


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS.values() if spec.outside], ids=lambda spec: spec.functional.name
)
def test_outside(spec: OpSpec) -> None:
    """Others' implementations compute the same, each in at least one variant."""
    if any(outside.name.startswith("transformers") for outside in spec.outside):
        pytest.importorskip("transformers")
    compared = [
        name
        for variant in spec.variants
        for name in checks.check_outside(spec, variant, spec.functional)
    ]
    assert set(compared) == {outside.name for outside in spec.outside}


def test_every_form_has_a_spec_and_a_public_name() -> None:
    """What is registered with torch is in opgraft.functional and carries its proof."""
    own = {
        name for name, form in FUNCTIONALS.items() if form.native.__module__.startswith("opgraft.")
    }
    assert own == set(SPECS) == set(functional.__all__)
    for name in own:
        assert getattr(functional, name) is FUNCTIONALS[name]
        assert FUNCTIONALS[name].__doc__


def test_every_op_class_is_built_by_a_spec() -> None:
    """Each native definition of an exported op class, but for layers made of ops, runs in what some spec builds."""
    exported: set[Any] = {
        value for value in map(vars(ops).get, ops.__all__) if isinstance(value, type)
    }
    leaves = {
        cls
        for cls in exported
        if issubclass(cls, ops.CustomOp) and not issubclass(cls, ops.PluggableLayer)
    }
    built = {
        spec.module(**spec.arguments(variant, spec.dtypes[0], spec.leads[0], spec.sizes[0]))[
            0
        ].op_class
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
    # It is made of a form that is proved, with which test_fused_moe compares it.
    without = {ops.CustomOp, *ropes, ops.FusedMoEModularMethod}
    assert {cls for cls in leaves if cls.forward_native not in proven} == without
