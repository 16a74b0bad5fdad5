"""The whole proof of a form: every check of every implementation, in every variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

import torch
from opgraft.binding.custom_op import CustomOp
from opgraft.binding.functional import binding_of
from opgraft.config import CompilationConfig, OpgraftConfig, set_config
from opgraft.ops.spec import OpSpec
from opgraft.testing import checks
from opgraft.testing.proof_records import ProofRecord
from opgraft.testing.sources import digest_of

Check = Callable[[OpSpec, str], None]

SETTINGS = OpgraftConfig(platform="cpu", compilation_config=CompilationConfig(custom_ops=("none",)))
"""Settings for a proof: form, registered op and module run the native definition everywhere."""


def implementations(spec: OpSpec) -> list[checks.Implementation]:
    """Return the native definition, the form, the registered op, and the module if there is one."""
    found = [spec.functional.native, spec.functional, checks.registered(spec)]
    if spec.module and not spec.functional.mutates:
        found.append(checks.by_module(spec))
    return found


def _values(spec: OpSpec, variant: str) -> None:
    thorough, *others = implementations(spec)
    for dtype in spec.dtypes:
        checks.check_values(spec, variant, dtype, thorough)
        for call in others:
            checks.check_values(spec, variant, dtype, call, brief=True)


def _strides(spec: OpSpec, variant: str) -> None:
    for call in implementations(spec):
        checks.check_strides(spec, variant, call)


def _effects(spec: OpSpec, variant: str) -> None:
    # One dtype that kernels compute in, and one that they widen.
    for dtype in {torch.float32, torch.bfloat16} & set(spec.dtypes):
        for call in implementations(spec):
            checks.check_effects(spec, variant, dtype, call)


def _registration(spec: OpSpec, variant: str) -> None:
    checks.check_registration(spec, variant)
    if not spec.functional.differentiable:
        checks.check_refusal(spec, variant, checks.registered(spec))


def _fake(spec: OpSpec, variant: str) -> None:
    for dtype in spec.dtypes:
        checks.check_fake(spec, variant, dtype)


def _compilation(spec: OpSpec, variant: str) -> None:
    for call in (spec.functional, checks.registered(spec)):
        checks.check_compilation(spec, variant, call)


def _gradients(spec: OpSpec, variant: str) -> None:
    for call in (spec.functional, checks.registered(spec)):
        checks.check_gradients(spec, variant, call)


PROOF_CHECKS: Mapping[str, Check] = {
    "values": _values,
    "strides": _strides,
    "effects": _effects,
    "registration": _registration,
    "fake": _fake,
    "compilation": _compilation,
    "gradients": _gradients,
}
"""The checks of a form in one variant, by name. A comparison with ``outside`` comes on top."""


def checks_of(spec: OpSpec) -> list[str]:
    """Return the names of the checks for a form: gradients only if they are defined."""
    differentiable = spec.differentiable and not spec.functional.mutates
    return [name for name in PROOF_CHECKS if name != "gradients" or differentiable]


def prove(spec: OpSpec, family: ModuleType | str) -> ProofRecord:
    """Run every check of a form on the native definition, and return the record.

    Args:
        spec: of the form.
        family: the module with the spec, or the module's name.

    Raises:
        AssertionError: a check fails, an outside implementation was compared in no variant, or a
            kernel would run instead of the native definition.
    """
    with set_config(SETTINGS):
        # A proof of a plugin's kernel would say nothing of the definition.
        expect_native(spec)
        names = checks_of(spec)
        for name in names:
            for variant in spec.variants:
                PROOF_CHECKS[name](spec, variant)
        compared = set()
        for variant in spec.variants:
            compared |= set(checks.check_outside(spec, variant, spec.functional))
    outside = tuple(dict.fromkeys(other.name for other in spec.outside))
    missing = sorted(set(outside) - compared)
    # A library that is not installed must not leave a record that names its comparison.
    if missing:
        raise AssertionError(f"{spec.functional.name}: never compared with {missing}")
    home = family if isinstance(family, str) else family.__name__
    sources = (spec.functional.native.__module__, home)
    return ProofRecord(
        sources=sources,
        digest=digest_of(sources) or "",
        checks=(*names, "outside") if outside else tuple(names),
        variants=len(spec.variants),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        outside=outside,
    )


def expect_native(spec: OpSpec) -> None:
    """Check that the form and its modules are bound to native definitions.

    Raises:
        AssertionError: a kernel would run.
    """
    bindings = [binding_of(spec.functional)]
    if spec.module:
        for variant in spec.variants:
            arguments = spec.arguments(variant, spec.dtypes[0], spec.leads[0], spec.sizes[0])
            op, _ = spec.module(**arguments)
            bindings += [part.binding for part in op.modules() if isinstance(part, CustomOp)]
    kernels = [binding.kernel.winner for binding in bindings]
    others = dict.fromkeys(str(kernel) for kernel in kernels if kernel.key != "native")
    if others:
        told = f"{spec.functional.name} runs {', '.join(others)} here"
        raise AssertionError(f"{told}, not only the native definition")
