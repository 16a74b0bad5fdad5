"""The checks of a plugin by name: what passing means, to what each applies, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from opgraft.binding.custom_op import PluggableLayer
from opgraft.binding.specialisation import bind
from opgraft.plugins.selection import current_platform
from opgraft.testing import checks, kernel_checks, plugin_checks
from opgraft.testing.subjects import Subject, claimed_dtypes
from opgraft.text import described


@dataclass(frozen=True)
class Found:
    """The result of a check that nothing failed in: figures, or why it does not apply."""

    error: float | None = None
    skipped: str = ""
    speed: float | None = None


Run = Callable[[Subject, torch.dtype], Found | None]
Applies = Callable[[Subject], str | None]


def dtypes_of(subject: Subject) -> list[torch.dtype]:
    """List the dtypes that both the platform and the form have."""
    claimed = claimed_dtypes(current_platform())
    return [dtype for dtype in subject.proof.dtypes if dtype in claimed]


@dataclass(frozen=True)
class Check:
    """A check of what a replacement computes.

    Attributes:
        summary: a sentence of what passing means.
        run: raises ``AssertionError`` where it fails.
        against: why it does not apply, or ``None``.
        dtypes: in which it is asked; ``None``: in every one that platform and form have.
        brief: belongs to the short form.
        timed: measures, which only makes sense where nothing else runs.
    """

    summary: str
    run: Run
    against: Applies
    dtypes: tuple[torch.dtype, ...] | None = (torch.float32,)
    brief: bool = False
    timed: bool = False


def _no_form(subject: Subject) -> str | None:
    return None if subject.spec else "no functional form of it has inputs to check it with"


def _no_module(subject: Subject) -> str | None:
    if _no_form(subject) or subject.built:
        return _no_form(subject)
    return "no module stands for this form"


def _fixed(subject: Subject) -> str | None:
    if (
        not _no_form(subject)
        and bind(subject.target).kernel.winner.key == "forward"
        and issubclass(subject.target, PluggableLayer)
    ):
        return "custom_ops does not switch a layer's own forward"
    return _no_form(subject)


def _no_gradient(subject: Subject) -> str | None:
    if subject.spec and (subject.spec.functional.mutates or not subject.spec.differentiable):
        return "no gradient of this form is defined"
    return _no_form(subject)


def _no_contract(subject: Subject) -> str | None:
    if subject.op in plugin_checks.CONTRACTS:
        return None
    return "no contract but that of the form" if subject.spec else "its contract needs a model: see part_contracts"


def _values(subject: Subject, dtype: torch.dtype) -> Found:
    shares = [0.0]
    for variant in subject.variants:
        with _of(variant):
            thorough, *others = subject.calls(variant)
            shares.append(checks.check_values(subject.proof, variant, dtype, thorough))
            shares += [checks.check_values(subject.proof, variant, dtype, call, brief=True) for call in others]
    return Found(max(shares))


def _speed(subject: Subject, dtype: torch.dtype) -> Found:
    return Found(speed=kernel_checks.speed_of(subject, subject.variants[0], dtype))


def _range(subject: Subject, dtype: torch.dtype) -> Found:
    reasons = []
    for variant in subject.variants:
        with _of(variant):
            reasons.append(kernel_checks.check_range(subject, variant, dtype))
    return Found(skipped="" if None in reasons else str(reasons[0]))


def _operators(subject: Subject, dtype: torch.dtype) -> Found:
    variant = subject.variants[0]
    if subject.function is not None:
        checks.check_registration(subject.proof, variant)
    reason = kernel_checks.check_operators(subject, variant)
    return Found(skipped=reason if reason and subject.function is None else "")


def _compilation(subject: Subject, variant: str, dtype: torch.dtype) -> None:
    if subject.function is not None:
        checks.check_compilation(subject.proof, variant, subject.proof.functional)
    else:
        kernel_checks.check_module_compilation(subject, variant)


def _gradients(subject: Subject, variant: str, dtype: torch.dtype) -> None:
    wide = torch.float64 in dtypes_of(subject)
    kernel_checks.check_gradients(subject, variant, numerically=wide)


def _for_calls(check: Callable[..., None]) -> Callable[[Subject, str, torch.dtype], None]:
    """Ask a check of ``checks`` of all that computes a variant."""

    def run(subject: Subject, variant: str, dtype: torch.dtype) -> None:
        for call in subject.calls(variant):
            check(subject.proof, variant, call)

    return run


def _effects(subject: Subject, variant: str, dtype: torch.dtype) -> None:
    for call in subject.calls(variant):
        checks.check_effects(subject.proof, variant, dtype, call)


def _by_subject(check: Callable[[Subject, str], None]) -> Callable[[Subject, str, torch.dtype], None]:
    return lambda subject, variant, dtype: check(subject, variant)


def _each(check: Callable[[Subject, str, torch.dtype], None], *, built: bool = False) -> Run:
    """Ask a check in every variant that the plugin computes; ``built``: that a module of it computes."""

    def run(subject: Subject, dtype: torch.dtype) -> None:
        for variant in subject.variants:
            if not built or variant in subject.built:
                with _of(variant):
                    check(subject, variant, dtype)

    return run


class _of(AbstractContextManager[None]):  # noqa: N801  # reads as a word
    """Names the variant in what fails."""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and self.variant:
            said = str(error) if isinstance(error, AssertionError) else described(error)
            raise AssertionError(f"variant {self.variant!r}: {said}") from error


HALF = (torch.float16,)
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "reachable": Check(
            "constructing the op gives the replacement, and each kernel that it defines can run",
            lambda subject, _: kernel_checks.check_reached(subject),
            lambda subject: None,
            brief=True,
        ),
        "values": Check(
            "results are those of the reference in float64, of empty, odd and large inputs too",
            _values,
            _no_form,
            None,
            brief=True,
        ),
        "range": Check("large inputs overflow nowhere where the native definition's do not", _range, _no_form, HALF),
        "strides": Check(
            "views give what contiguous tensors give", _each(_for_calls(checks.check_strides)), _no_form, brief=True
        ),
        "effects": Check("inputs stay as they are, results are memory of their own", _each(_effects), _no_form),
        "repetition": Check(
            "the same call gives the same bits, and leaves what earlier ones returned",
            _each(_by_subject(kernel_checks.check_repetition)),
            _no_form,
        ),
        "reentrancy": Check(
            "calls of several threads at once do not disturb each other",
            _each(_by_subject(kernel_checks.check_reentrancy)),
            _no_form,
        ),
        "gradients": Check(
            "no gradient is lost, and each is the right one", _each(_gradients), _no_gradient, brief=True
        ),
        "compilation": Check("it compiles whole, once for all sizes", _each(_compilation), _no_form, brief=True),
        "operators": Check("torch.library.opcheck accepts its operators", _operators, _no_form),
        "state": Check(
            "parameters and buffers are those of the target, and load each other's",
            _each(_by_subject(kernel_checks.check_state), built=True),
            _no_module,
        ),
        "copies": Check(
            "copied and pickled it computes the same",
            _each(_by_subject(kernel_checks.check_copies), built=True),
            _no_module,
        ),
        "switching": Check(
            "custom_ops switches it off and on", _each(_by_subject(kernel_checks.check_switching)), _fixed
        ),
        "speed": Check("how many times as fast as the native definition it is", _speed, _no_form, None, timed=True),
        "contract": Check(
            "the part keeps the contract of what it replaces",
            lambda subject, _: plugin_checks.CONTRACTS[subject.op](),
            _no_contract,
        ),
    }
)
"""By name, the checks that are made of each op, in the order in which they are made."""


@dataclass(frozen=True)
class WholeCheck:
    """A check of a plugin, which is given its name, or of a platform, which is given it; ``summary`` as of a check.

    ``run`` returns why it does not apply, or ``None``.
    """

    summary: str
    run: Callable[[Any], str | None]
    brief: bool = False
    timed: bool = False


OF_PLUGIN: Mapping[str, WholeCheck] = MappingProxyType(
    {
        "registration": WholeCheck("opgraft plugins doctor finds nothing wrong", plugin_checks.check_findings, True),
        "isolation": WholeCheck("a reset takes back what it did, loading it redoes it", plugin_checks.check_isolation),
        "together": WholeCheck("beside the other installed plugins it does the same", plugin_checks.check_together),
        "spawn": WholeCheck("ops compute the same in a new process", plugin_checks.check_spawn),
    }
)
"""By name, the checks of a plugin as a whole."""

OF_PLATFORM: Mapping[str, WholeCheck] = MappingProxyType(
    {
        "devices": WholeCheck("devices are counted, and told of", plugin_checks.check_devices, True),
        "dtypes": WholeCheck("dtypes that are claimed can be computed with", plugin_checks.check_dtypes, True),
        "memory": WholeCheck("memory is told in bytes", plugin_checks.check_memory, True),
        "seeding": WholeCheck("the same seed gives the same random numbers", plugin_checks.check_seeding, True),
        "synchronisation": WholeCheck("queued work is done afterwards", plugin_checks.check_synchronisation, True),
        "streams": WholeCheck("streams that are claimed keep their order, and wait", plugin_checks.check_streams, True),
    }
)
"""By name, the checks of a platform that the plugin brings."""
