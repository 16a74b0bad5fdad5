"""The table of all checks of a plugin: a row for each check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from opgraft.binding.custom_op import PluggableLayer
from opgraft.binding.specialisation import bind
from opgraft.testing import checks, drawn_checks, honesty, kernel_checks, plugin_checks
from opgraft.testing.reached_lines import LineWatch
from opgraft.testing.replaying import calls_of, replayable
from opgraft.testing.subjects import Subject, Trial

PLUGIN, PLATFORM, OP = "(plugin)", "(platform)", "(op)"
"""The things that a check is asked of: the plugin as a whole, its platform, or each of its ops."""

LOADING = "loading"
"""The check before all others: only an active plugin can be judged."""

REPLAYED = 17
"""Tokens of a replayed call, beside a single one: neither a power of two nor a whole tile."""


@dataclass(frozen=True)
class CheckAnswer:
    """The answer of a check that did not fail.

    Attributes:
        error: the largest error against float64, as a share of the tolerance.
        speed: the speed as a multiple of the native definition's.
        skipped: the reason why the check does not apply; empty if the check passed.
        left_out: inputs without a comparison, each with the reason.
    """

    error: float | None = None
    speed: float | None = None
    skipped: str = ""
    left_out: str = ""

    @classmethod
    def of(cls, answer: CheckAnswer | str | None) -> CheckAnswer:
        """Return the answer of a check's function: a text is the reason to skip."""
        return answer if isinstance(answer, CheckAnswer) else cls(skipped=answer or "")


def together(answers: Sequence[CheckAnswer]) -> CheckAnswer:
    """Return one answer for all variants: skipped only if the check applies to no variant."""
    errors = [each.error for each in answers if each.error is not None]
    speeds = [each.speed for each in answers if each.speed is not None]
    reasons = [each.skipped for each in answers]
    # The check applies if it applies to one variant.
    skipped = reasons[0] if reasons and all(reasons) else ""
    left_out = "; ".join(dict.fromkeys(each.left_out for each in answers if each.left_out))
    return CheckAnswer(
        max(errors, default=None),
        max(speeds, default=None),
        skipped,
        left_out,
    )


def _no_form(subject: Subject) -> str | None:
    return None if subject.spec else "no functional form of it has inputs to check it with"


def _no_module(subject: Subject) -> str | None:
    reason = _no_form(subject)
    if reason or subject.built:
        return reason
    return "no module stands for this form"


def _no_switch(subject: Subject) -> str | None:
    reason = _no_form(subject)
    if reason:
        return reason
    if not subject.target.switchable:
        return "custom_ops does not switch this op"
    if not issubclass(subject.target, PluggableLayer):
        return None
    if bind(subject.target).kernel.winner.key != "forward":
        return None
    return "custom_ops does not switch a layer's own forward"


def _no_gradient(subject: Subject) -> str | None:
    spec = subject.spec
    if spec and (spec.functional.mutates or not spec.differentiable):
        return "no gradient of this form is defined"
    return _no_form(subject)


def _no_contract(subject: Subject) -> str | None:
    if subject.op in plugin_checks.CONTRACTS:
        return None
    if subject.spec:
        return "no contract but that of the form"
    return "its contract needs a model: see part_contracts"


def _always(subject: Subject) -> None:
    return None


def _all_variants(subject: Subject) -> tuple[str, ...]:
    return subject.variants


def _first_variant(subject: Subject) -> tuple[str, ...]:
    return subject.variants[:1]


def _built_variants(subject: Subject) -> tuple[str, ...]:
    return tuple(variant for variant in subject.variants if variant in subject.built)


def _fewer_in_brief(subject: Subject) -> tuple[str, ...]:
    # To compile a variant takes a hundred times as long as to compute one.
    return subject.variants[:1] if subject.brief else subject.variants


def _no_variant(subject: Subject) -> tuple[str, ...]:
    return ("",)


def _values(trial: Trial) -> CheckAnswer:
    watch = LineWatch(trial)
    thorough, *others = map(watch.over, trial.calls)
    given = trial.spec, trial.variant, trial.dtype
    # In the short form, other dtypes share the sizes of float32.
    few = trial.subject.brief and trial.dtype != torch.float32
    shares = [checks.check_values(*given, thorough, brief=few)]
    for call in others:
        # The other implementations share the arithmetic of the first one.
        shares.append(checks.check_values(*given, call, brief=True))
    return CheckAnswer(max(shares))


def _no_recorded_call(subject: Subject) -> str | None:
    spec = subject.spec
    if spec is None or subject.record is None:
        return _no_form(subject) or "no record of shapes is given"
    if calls_of(subject.record, spec):
        return None
    return f"no model of the record {subject.record.name} calls {subject.name}"


def _shapes(trial: Trial) -> CheckAnswer:
    subject = trial.subject
    if trial.dtype == torch.float64 or subject.record is None:
        return CheckAnswer(skipped="models compute in narrower dtypes")
    counts = (REPLAYED,) if subject.brief else (1, REPLAYED)
    by_module = subject.function is None
    shares = []
    left_out = []
    for replayed, obstacle in replayable(subject.record, trial.spec, REPLAYED):
        reason = obstacle
        if not reason and by_module and not replayed.builds():
            reason = "no module has its settings"
        if reason:
            left_out.append(f"not replayed: {replayed.call} of {replayed.model}: {reason}")
            continue
        for tokens in counts if replayed.is_per_token else counts[:1]:
            shares.append(replayed.check_values(trial.dtype, tokens, by_module=by_module))
    if not shares:
        return CheckAnswer(skipped="; ".join(left_out))
    return CheckAnswer(max(shares), left_out="; ".join(left_out))


def _inputs(trial: Trial) -> CheckAnswer:
    watch = LineWatch(trial)
    compared, left_out = drawn_checks.check_inputs(trial, watch.over)
    if not compared:
        return CheckAnswer(skipped=left_out or "the native definition takes no drawn input")
    return CheckAnswer(left_out=left_out)


def _strides(trial: Trial) -> None:
    for call in trial.calls:
        checks.check_strides(trial.spec, trial.variant, call)


def _effects(trial: Trial) -> None:
    for call in trial.calls:
        checks.check_effects(trial.spec, trial.variant, trial.dtype, call)


def _speed(trial: Trial) -> CheckAnswer:
    return CheckAnswer(speed=kernel_checks.speed_of(trial))


def _contract(trial: Trial) -> None:
    plugin_checks.CONTRACTS[trial.subject.op]()


@dataclass(frozen=True)
class Check:
    """A row: one check.

    Attributes:
        name: in reports.
        of: the thing that the check is asked of, ``PLUGIN``, ``PLATFORM`` or ``OP``.
        summary: a sentence about the meaning of passing.
        run: the check itself. The argument is a plugin's name, a ``Platform`` or a ``Trial``.
            A failure is an ``AssertionError``; a text as the result is the reason to skip.
        brief: True if the short form of the kit has the check.
        timed: True if the check measures time and must run alone.
        replays: True if the check needs a record of shapes.
        dtypes: the dtypes of an op's inputs; ``None`` for each dtype of platform and form.
        variants: returns the variants of an op to check.
        against: returns the reason why the check does not apply to an op, or ``None``.
    """

    name: str
    of: str
    summary: str
    run: Callable[[Any], CheckAnswer | str | None]
    brief: bool = False
    timed: bool = False
    replays: bool = False
    dtypes: tuple[torch.dtype, ...] | None = (torch.float32,)
    variants: Callable[[Subject], tuple[str, ...]] = _all_variants
    against: Callable[[Subject], str | None] = _no_form


CHECKS: tuple[Check, ...] = (
    # The short form has the checks of registration, values, strides, gradients and compilation:
    # they find most faults of a kernel in a minute.
    Check(
        "registration",
        PLUGIN,
        "the doctor finds nothing wrong with its registrations",
        plugin_checks.check_findings,
        brief=True,
    ),
    # To load plugins again takes seconds.
    Check(
        "isolation",
        PLUGIN,
        "a reset undoes the plugin's changes, and a second load makes the same changes",
        plugin_checks.check_isolation,
    ),
    Check(
        "together",
        PLUGIN,
        "beside other plugins it replaces the same classes, without a conflict",
        plugin_checks.check_together,
    ),
    # A new process imports torch first.
    Check(
        "spawn",
        PLUGIN,
        "its ops compute the same in a new process",
        plugin_checks.check_spawn,
    ),
    # All checks of a platform are quick, and a kernel fails on a wrong platform in any case.
    Check(
        "devices",
        PLATFORM,
        "the platform counts its devices, and tells the capability of each",
        plugin_checks.check_devices,
        brief=True,
    ),
    Check(
        "dtypes",
        PLATFORM,
        "the platform computes in each dtype that it claims",
        plugin_checks.check_dtypes,
        brief=True,
    ),
    Check(
        "memory",
        PLATFORM,
        "the platform tells its total and its free memory, in bytes",
        plugin_checks.check_memory,
        brief=True,
    ),
    Check(
        "seeding",
        PLATFORM,
        "equal seeds give equal random numbers, different seeds different ones",
        plugin_checks.check_seeding,
        brief=True,
    ),
    Check(
        "synchronisation",
        PLATFORM,
        "after a synchronisation, all queued work is done",
        plugin_checks.check_synchronisation,
        brief=True,
    ),
    Check(
        "streams",
        PLATFORM,
        "the streams of the platform keep their order, and after a wait for one its work is done",
        plugin_checks.check_streams,
        brief=True,
    ),
    Check(
        "reachable",
        OP,
        "constructing the op gives the replacement, and each of its kernels can run",
        kernel_checks.check_reached,
        brief=True,
        variants=_no_variant,
        against=_always,
    ),
    # A kernel may take another path for each dtype.
    Check(
        "values",
        OP,
        "results equal the float64 reference, also for empty, odd and large inputs, "
        "in each claimed dtype",
        _values,
        brief=True,
        dtypes=None,
    ),
    # A kernel may be wrong at one size only, such as a hidden size of 3584.
    Check(
        "shapes",
        OP,
        "results equal the float64 reference at the sizes of the real models of a record",
        _shapes,
        brief=True,
        replays=True,
        dtypes=None,
        variants=_first_variant,
        against=_no_recorded_call,
    ),
    # Most faults in a corner are outside the inputs of a proof.
    Check(
        "inputs",
        OP,
        "results equal the native definition's for inputs of all sizes, layouts, values "
        "and threads",
        _inputs,
        brief=True,
        dtypes=None,
        variants=_fewer_in_brief,
    ),
    Check(
        "calls",
        OP,
        "each of many calls answers for its own values, in the same memory and of other sizes",
        drawn_checks.check_calls,
        brief=True,
        variants=_fewer_in_brief,
    ),
    # Only float16 overflows at such numbers.
    Check(
        "range",
        OP,
        "large inputs overflow only if they overflow in the native definition",
        kernel_checks.check_range,
        dtypes=(torch.float16,),
    ),
    Check(
        "strides",
        OP,
        "views give the results of contiguous tensors",
        _strides,
        brief=True,
    ),
    Check(
        "effects",
        OP,
        "inputs stay as they are, and results have their own memory",
        _effects,
    ),
    Check(
        "repetition",
        OP,
        "a repeated call gives the same bits, and leaves earlier results alone",
        kernel_checks.check_repetition,
    ),
    Check(
        "reentrancy",
        OP,
        "calls in parallel threads give the results of single calls",
        kernel_checks.check_reentrancy,
    ),
    Check(
        "gradients",
        OP,
        "no gradient is lost, and in float64 each equals finite differences",
        kernel_checks.check_gradients,
        brief=True,
        against=_no_gradient,
    ),
    Check(
        "compilation",
        OP,
        "the op compiles without a graph break, once for all sizes",
        kernel_checks.check_compilation,
        brief=True,
        variants=_fewer_in_brief,
    ),
    Check(
        "operators",
        OP,
        "torch.library.opcheck accepts the operators of a call",
        kernel_checks.check_operators,
        variants=_first_variant,
    ),
    # A function has neither parameters nor copies.
    Check(
        "state",
        OP,
        "parameters and buffers have the names, shapes and dtypes of the target, "
        "and load the same checkpoints",
        kernel_checks.check_state,
        variants=_built_variants,
        against=_no_module,
    ),
    Check(
        "copies",
        OP,
        "deep copies and unpickled ops compute the same, with their own memory",
        kernel_checks.check_copies,
        variants=_built_variants,
        against=_no_module,
    ),
    Check(
        "switching",
        OP,
        "custom_ops switches the kernel off and on",
        kernel_checks.check_switching,
        against=_no_switch,
    ),
    # Other work on the machine would falsify a measurement.
    Check(
        "speed",
        OP,
        "nothing: the check measures the speed as a multiple of the native definition's",
        _speed,
        timed=True,
        dtypes=None,
        variants=_first_variant,
    ),
    # A part of the engine has no form, so that no other check applies.
    Check(
        "contract",
        OP,
        "a part of the engine, such as attention or a sampler, keeps the contract of its target",
        _contract,
        variants=_no_variant,
        against=_no_contract,
    ),
    # Last, as a kernel may replace a clock at any call.
    Check(
        "honesty",
        OP,
        "values are the same unobserved, and no reference, clock or comparison is touched",
        honesty.check_honesty,
        brief=True,
        variants=_first_variant,
    ),
)
"""All checks, in the order of a run."""

SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        LOADING: "the plugin is active here",
        **{check.name: check.summary for check in CHECKS},
    }
)
"""By name of a check, the meaning of passing."""
