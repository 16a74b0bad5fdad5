"""The checks of a plugin by name: what passing means, to what each applies, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.binding.custom_op import PluggableLayer
from opgraft.binding.specialisation import bind
from opgraft.plugins.selection import current_platform
from opgraft.testing import checks, kernel_checks, plugin_checks
from opgraft.testing.subjects import Subject, claimed_dtypes


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
    return (
        "no contract but that of the form"
        if subject.spec
        else "its contract needs a model: see part_contracts"
    )


def _values(subject: Subject, dtype: torch.dtype) -> Found:
    shares = [0.0]
    for variant in subject.variants:
        with _of(variant):
            thorough, *others = subject.calls(variant)
            shares.append(checks.check_values(subject.proof, variant, dtype, thorough))
            shares += [
                checks.check_values(subject.proof, variant, dtype, call, brief=True)
                for call in others
            ]
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


def _compilation(subject: Subject, dtype: torch.dtype) -> None:
    for variant in subject.compiled:
        with _of(variant):
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


def _by_subject(
    check: Callable[[Subject, str], None],
) -> Callable[[Subject, str, torch.dtype], None]:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
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
            "results are those of the reference in float64, also of empty, odd and large inputs, in each claimed dtype",
            _values,
            _no_form,
            None,
            brief=True,
        ),
        "range": Check(
            "large inputs overflow nowhere where the native definition's do not",
            _range,
            _no_form,
            HALF,
        ),
        "strides": Check(
            "views give what contiguous tensors give",
            _each(_for_calls(checks.check_strides)),
            _no_form,
            brief=True,
        ),
        "effects": Check(
            "inputs stay as they are, and results are memory of their own",
            _each(_effects),
            _no_form,
        ),
        "repetition": Check(
            "the same call gives the same bits again, and leaves what earlier ones returned",
            _each(_by_subject(kernel_checks.check_repetition)),
            _no_form,
        ),
        "reentrancy": Check(
            "threads that call at once get what each gets alone",
            _each(_by_subject(kernel_checks.check_reentrancy)),
            _no_form,
        ),
        "gradients": Check(
            "no gradient is lost, and in float64 each is that of finite differences",
            _each(_gradients),
            _no_gradient,
            brief=True,
        ),
        "compilation": Check(
            "the op compiles without a graph break, once for all sizes",
            _compilation,
            _no_form,
            brief=True,
        ),
        "operators": Check(
            "torch.library.opcheck accepts the operators that a call runs", _operators, _no_form
        ),
        "state": Check(
            "parameters and buffers are those of the target by name, shape and dtype, and load what those load",
            _each(_by_subject(kernel_checks.check_state), built=True),
            _no_module,
        ),
        "copies": Check(
            "deep copies and unpickled ops compute the same, with memory of their own",
            _each(_by_subject(kernel_checks.check_copies), built=True),
            _no_module,
        ),
        "switching": Check(
            "custom_ops switches the kernel off and on",
            _each(_by_subject(kernel_checks.check_switching)),
            _fixed,
        ),
        "speed": Check(
            "nothing: it measures how many times as fast as the native definition the plugin is",
            _speed,
            _no_form,
            None,
            timed=True,
        ),
        "contract": Check(
            "a part of the engine, such as attention or a sampler, keeps the contract of what it replaces",
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
        "registration": WholeCheck(
            "the doctor finds nothing wrong with how it registers",
            plugin_checks.check_findings,
            True,
        ),
        "isolation": WholeCheck(
            "a reset takes back what it did, and loading it again does the same",
            plugin_checks.check_isolation,
        ),
        "together": WholeCheck(
            "beside the other plugins that may run here it replaces the same, without a conflict",
            plugin_checks.check_together,
        ),
        "spawn": WholeCheck("its ops compute the same in a new process", plugin_checks.check_spawn),
    }
)
"""By name, the checks of a plugin as a whole."""

OF_PLATFORM: Mapping[str, WholeCheck] = MappingProxyType(
    {
        "devices": WholeCheck(
            "the platform counts its devices, and tells the capability of each",
            plugin_checks.check_devices,
            True,
        ),
        "dtypes": WholeCheck(
            "each dtype that the platform claims can be computed with",
            plugin_checks.check_dtypes,
            True,
        ),
        "memory": WholeCheck(
            "the platform tells in bytes how much memory there is, and how much is free",
            plugin_checks.check_memory,
            True,
        ),
        "seeding": WholeCheck(
            "the same seed gives the same random numbers, another one others",
            plugin_checks.check_seeding,
            True,
        ),
        "synchronisation": WholeCheck(
            "work that was queued is done when the platform has synchronised",
            plugin_checks.check_synchronisation,
            True,
        ),
        "streams": WholeCheck(
            "streams that the platform claims keep their order, and who waits for one finds its work done",
            plugin_checks.check_streams,
            True,
        ),
    }
)
"""By name, the checks of a platform that the plugin brings."""

LOADING = "loading"
"""The question that comes before all others."""

SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        LOADING: "the plugin is active here",
        **{name: check.summary for name, check in (*OF_PLUGIN.items(), *OF_PLATFORM.items())},
        **{name: check.summary for name, check in CHECKS.items()},
    }
)
"""By name of a check, what passing means."""
