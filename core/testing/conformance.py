"""Conformance of a plugin: every check of every op of the plugin, each outcome as data.

``Conformance`` lists the questions and answers them. Tests, commands and reports use the answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from opgraft.base.reached import ReachedLines, united
from opgraft.base.text import described, printable
from opgraft.binding.provenance import exits_as_errors, own_words
from opgraft.config import OpgraftConfig, set_config
from opgraft.errors import OpgraftError
from opgraft.plugins.changes import thorough
from opgraft.plugins.discovery import HOST_DISTRIBUTION, discover, names_of
from opgraft.plugins.host import load_plugins
from opgraft.plugins.outcomes import findings_of
from opgraft.plugins.selection import current_platform
from opgraft.registry.decision import Provider
from opgraft.registry.state import PluginStatus, host_state
from opgraft.testing.check_table import (
    CHECKS,
    LOADING,
    OP,
    PLATFORM,
    PLUGIN,
    SUMMARIES,
    Check,
    CheckAnswer,
    together,
)
from opgraft.testing.drawn_checks import calls_of, departure_of
from opgraft.testing.examples import Example
from opgraft.testing.shapes import ShapeRecord
from opgraft.testing.subjects import Noting, Subject, Trial, subjects_of

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

_BY_NAME = {check.name: check for check in CHECKS}


@dataclass(frozen=True)
class Case:
    """One question: a check of an op, in one dtype if the dtype matters.

    ``op`` is ``PLUGIN`` or ``PLATFORM`` for a question about the plugin as a whole or the platform.
    """

    op: str
    check: str
    dtype: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.op, self.check, self.dtype)))


@dataclass(frozen=True)
class CheckOutcome:
    """The answer to a question.

    Attributes:
        op, check, dtype: as in the ``Case``.
        status: ``passed``, ``failed`` or ``skipped``.
        reason: why the check failed, does not apply, or left out inputs.
        error: the largest error against float64, as a share of the tolerance, if numbers were
            compared.
        speed: the speed as a multiple of the native definition's, if measured.
        seconds: the time that the answer took.
        lines: the lines of the kernel that the calls of a passed check ran, as far as the kernel is
            written in Python; ``None`` for a check that does not note lines.
    """

    op: str
    check: str
    dtype: str | None
    status: str
    reason: str = ""
    error: float | None = None
    speed: float | None = None
    seconds: float = 0.0
    lines: ReachedLines | None = None

    @property
    def case(self) -> Case:
        """The question."""
        return Case(self.op, self.check, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return asdict(self)


def again(plugin: str, form: str, example: Example) -> str:
    """Make a call again, and return how the result departs from the native definition.

    Args:
        plugin: the name of the entry point or of the distribution.
        form: the functional form.
        example: as the failed check prints it.
    """
    with alone(plugin):
        load_plugins()
        subject = next(each for each in subjects_of(plugin) if each.name == form)
        trial = Trial(subject, example.variant, example.dtype)
        found = [departure_of(trial, call, example) for call in calls_of(trial)]
    return "; ".join(filter(None, found)) or "within its bounds"


def alone(plugin: str) -> AbstractContextManager[None]:
    """Return a scope that admits no other plugin, unless a setting lists the plugins.

    For a built-in platform without a plugin, the scope selects the platform.

    Raises:
        ConfigError: no installed plugin has the name.
    """
    # A user may want to judge a plugin beside others.
    listed = host_state().settings().config.plugins
    provider, _, platforms = names_of(plugin)
    # A built-in platform has no plugin to admit.
    if provider == HOST_DISTRIBUTION:
        config = OpgraftConfig(platform=platforms[0], plugins=listed or ())
    else:
        config = OpgraftConfig(plugins=(provider,) if listed is None else listed)
    return set_config(config, origin=f"the check of {plugin}")


class Conformance:
    """The questions about a plugin, and the answers. The constructor loads the plugin.

    Attributes:
        plugin: the name of the entry point or of the distribution.
        brief: True for the short form: fewer questions, on small inputs.
        timed: True if speed is measured, too.
        record: calls of real models to replay; ``None`` asks no question about them.
        refused: why the plugin is not active here; empty if active. A refused plugin has only the
            question ``loading``.
        cases: the questions, in the best order.

    Raises:
        ConfigError: no installed plugin has the name.
    """

    def __init__(
        self,
        plugin: str,
        *,
        brief: bool = False,
        timed: bool = False,
        record: ShapeRecord | None = None,
    ) -> None:
        self.plugin = plugin
        self.brief = brief
        self.timed = timed
        self.record = record
        # Names of a plugin that is not installed are refused before anything is loaded.
        self._provider, self._names, self._platforms = names_of(plugin)
        self._subjects: dict[str, Subject] = {}
        self.refused = self._load()
        self.cases = [Case(PLUGIN, LOADING)]
        if not self.refused:
            self._find_subjects()
            self.cases += self._cases()

    @property
    def provider(self) -> Provider:
        """The distribution of the plugin."""
        providers = (offer.provider for offer in discover().offers)
        return next(provider for provider in providers if provider.name == self._provider)

    @property
    def checks(self) -> dict[str, str]:
        """By name of each check in ``cases``, a sentence about the meaning of passing."""
        return {case.check: SUMMARIES[case.check] for case in self.cases}

    @property
    def ops(self) -> dict[str, str]:
        """By name of each subject, the name of the op in settings."""
        return {name: subject.op for name, subject in self._subjects.items()}

    def _find_subjects(self) -> None:
        for subject in subjects_of(self.plugin, brief=self.brief, record=self.record):
            self._subjects[subject.name] = subject

    def _load(self) -> str:
        """Load the plugin, and return why the plugin is not active."""
        try:
            with thorough():
                load_plugins()
        except OpgraftError as error:
            return str(error)
        # A platform without a plugin has no record, and is never refused.
        records = [host_state().plugins[name] for name in self._names]
        ended = [record for record in records if record.status is not PluginStatus.ACTIVATED]
        findings = [str(finding) for record in ended for finding in findings_of(record)]
        if findings:
            return "; ".join(findings)
        return "; ".join(f"{each.name} is {each.status.value}: {each.reason}" for each in ended)

    def _cases(self) -> Iterator[Case]:
        asked = [check for check in CHECKS if self._asks(check)]
        for check in asked:
            if check.of != OP:
                yield Case(check.of, check.name)
        for subject in self._subjects.values():
            for check in asked:
                if check.of == OP:
                    yield from _cases_of(subject, check)

    def _asks(self, check: Check) -> bool:
        if check.of == PLATFORM and current_platform().name not in self._platforms:
            return False
        if check.timed and not self.timed:
            return False
        if check.replays and self.record is None:
            return False
        return check.brief or not self.brief

    def judge(self, case: Case) -> CheckOutcome:
        """Answer a question. Any exception of the plugin's code is an outcome."""
        start = time.perf_counter()
        answer = CheckAnswer()
        status = FAILED
        noted: list[Noting] = []
        try:
            with exits_as_errors():
                answer = self._answer(case, noted)
            status = SKIPPED if answer.skipped else PASSED
            reason = answer.skipped or answer.left_out
        except AssertionError as failure:
            # The text of a plugin may hold control characters.
            reason = printable(" ".join(str(failure).split()))
        # A kernel may call sys.exit.
        except (Exception, SystemExit) as failure:
            reason = own_words(failure)
        seconds = round(time.perf_counter() - start, 3)
        question = case.op, case.check, case.dtype
        lines = united(watch.lines for watch in noted if watch.lines)
        return CheckOutcome(*question, status, reason, answer.error, answer.speed, seconds, lines)

    def _answer(self, case: Case, noted: list[Noting]) -> CheckAnswer:
        """Ask a check. ``noted`` takes the watches of its calls."""
        if case.check == LOADING:
            if self.refused:
                raise AssertionError(self.refused)
            return CheckAnswer()
        check = _BY_NAME[case.check]
        if check.of == PLATFORM:
            return CheckAnswer.of(check.run(current_platform()))
        if check.of == OP:
            return _answer_of(self._subjects[case.op], check, case.dtype, noted)
        try:
            return CheckAnswer.of(check.run(self.plugin))
        finally:
            # The check may have reset the host, and the plugin may have made its classes anew.
            self._find_subjects()


def _cases_of(subject: Subject, check: Check) -> Iterator[Case]:
    """Yield the questions of a check about an op, one for each dtype if all dtypes are asked."""
    if check.dtypes is not None or subject.spec is None:
        yield Case(subject.name, check.name)
        return
    for dtype in subject.dtypes:
        yield Case(subject.name, check.name, _dtype_name(dtype))


def _answer_of(
    subject: Subject, check: Check, named: str | None, noted: list[Noting]
) -> CheckAnswer:
    """Ask a check of an op in all variants, in the dtype of that name if there is one."""
    reason = check.against(subject)
    if reason:
        return CheckAnswer(skipped=reason)
    dtypes = check.dtypes or ()
    if named:
        dtypes = (getattr(torch, named),)
    # A part of the engine has no form, and takes the dtypes of its contract.
    if subject.spec:
        missing = [_dtype_name(dtype) for dtype in dtypes if dtype not in subject.dtypes]
        if missing:
            return CheckAnswer(skipped=f"platform or form takes no {' or '.join(missing)}")
    # A part without a form has one trial without a variant.
    trials = [Trial(subject, variant, dtypes[0], noted) for variant in check.variants(subject)]
    return together([_tried(check, trial) for trial in trials])


def _tried(check: Check, trial: Trial) -> CheckAnswer:
    """Ask a check of an op in one variant; a failure names the variant."""
    try:
        return CheckAnswer.of(check.run(trial))
    except Exception as error:
        if not trial.variant:
            raise
        said = str(error) if isinstance(error, AssertionError) else described(error)
        raise AssertionError(f"variant {trial.variant!r}: {said}") from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
