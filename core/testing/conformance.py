"""Conformance of a plugin: every check of every op that it serves, each outcome as data.

``Conformance`` lists the questions and answers them. Tests, commands and reports are made of these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from opgraft.base.text import described, printable
from opgraft.config import OpgraftConfig, set_config
from opgraft.errors import OpgraftError
from opgraft.plugins.discovery import HOST_DISTRIBUTION, discover, names_of
from opgraft.plugins.host import load_plugins
from opgraft.plugins.outcomes import findings_of
from opgraft.plugins.selection import current_platform
from opgraft.registry.decision import Provider
from opgraft.registry.state import PluginStatus, host_state
from opgraft.testing.check_table import (
    CHECKS,
    LOADING,
    OF_PLATFORM,
    OF_PLUGIN,
    SUMMARIES,
    Check,
    Found,
    WholeCheck,
    dtypes_of,
)
from opgraft.testing.subjects import Subject, subjects_of

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

PLUGIN, PLATFORM = "(plugin)", "(platform)"
"""Stand for an op in questions about the plugin as a whole and about its platform."""


@dataclass(frozen=True)
class Case:
    """One question: a check, asked of an op, in one dtype where it makes a difference."""

    op: str
    check: str
    dtype: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.op, self.check, self.dtype)))


@dataclass(frozen=True)
class Outcome:
    """The answer to a question.

    Attributes:
        op, check, dtype: as in the ``Case``.
        status: ``passed``, ``failed`` or ``skipped``.
        reason: why it failed or does not apply.
        error: the largest error against float64, as a share of its tolerance, where numbers were compared.
        speed: how many times as fast as the native definition it is, where that was measured.
        seconds: that the answer took.
    """

    op: str
    check: str
    dtype: str | None
    status: str
    reason: str = ""
    error: float | None = None
    speed: float | None = None
    seconds: float = 0.0

    @property
    def case(self) -> Case:
        """The question."""
        return Case(self.op, self.check, self.dtype)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Return the outcome that ``to_dict`` wrote down."""
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return asdict(self)


def alone(plugin: str) -> AbstractContextManager[None]:
    """Return a scope in which no other plugin is admitted, unless a setting says which are.

    Of a built-in platform, which has no plugin, it is that platform's.

    Raises:
        ConfigError: nothing that is installed answers to the name.
    """
    asked = host_state().settings().config.plugins
    provider, _, platforms = names_of(plugin)
    if provider == HOST_DISTRIBUTION:
        return set_config(OpgraftConfig(platform=platforms[0], plugins=asked or ()))
    return set_config(OpgraftConfig(plugins=asked if asked is not None else (provider,)))


class Conformance:
    """The questions about a plugin, and their answers. Making one loads the plugin, in the scope that is active.

    Attributes:
        plugin: the name of its entry point or of its distribution.
        brief: whether the questions are those of the short form, on small inputs.
        timed: whether speed is measured, too.
        refused: why it is not active here, in which case there is one question; empty where it is.
        cases: the questions, in the order in which they are best asked.

    Raises:
        ConfigError: nothing that is installed answers to the name.
    """

    def __init__(self, plugin: str, *, brief: bool = False, timed: bool = False) -> None:
        self.plugin = plugin
        self.brief = brief
        self.timed = timed
        self._provider, self._names, self._platforms = names_of(plugin)
        self.refused = self._load()
        self._subjects = {} if self.refused else self._subjects_now()
        self.cases = [Case(PLUGIN, LOADING), *([] if self.refused else self._cases())]

    @property
    def provider(self) -> Provider:
        """The distribution that brings the plugin."""
        return next(
            offer.provider for offer in discover().offers if offer.provider.name == self._provider
        )

    @property
    def checks(self) -> dict[str, str]:
        """A sentence about each check that is asked: what passing means."""
        return {name: SUMMARIES[name] for name in dict.fromkeys(case.check for case in self.cases)}

    @property
    def ops(self) -> dict[str, str]:
        """The op that settings call each of what is judged by."""
        return {name: subject.op for name, subject in self._subjects.items()}

    def _subjects_now(self) -> dict[str, Subject]:
        return {subject.name: subject for subject in subjects_of(self.plugin, brief=self.brief)}

    def _load(self) -> str:
        try:
            load_plugins()
        except OpgraftError as error:
            return str(error)
        records = [host_state().plugins[name] for name in self._names]
        ended = [record for record in records if record.status is not PluginStatus.ACTIVATED]
        told = [str(finding) for record in ended for finding in findings_of(record)]
        return "; ".join(
            told or [f"{record.name} is {record.status.value}: {record.reason}" for record in ended]
        )

    def _cases(self) -> Iterator[Case]:
        yield from (Case(PLUGIN, name) for name, check in OF_PLUGIN.items() if self._asks(check))
        if current_platform().name in self._platforms:
            yield from (
                Case(PLATFORM, name) for name, check in OF_PLATFORM.items() if self._asks(check)
            )
        for subject in self._subjects.values():
            for name, check in CHECKS.items():
                if not self._asks(check):
                    continue
                if check.dtypes is None and subject.spec is not None:
                    yield from (
                        Case(subject.name, name, _text(dtype)) for dtype in dtypes_of(subject)
                    )
                else:
                    yield Case(subject.name, name)

    def _asks(self, check: Check | WholeCheck) -> bool:
        return (check.brief or not self.brief) and (self.timed or not check.timed)

    def judge(self, case: Case) -> Outcome:
        """Answer a question. Whatever the plugin's code raises is an outcome."""
        start = time.perf_counter()
        try:
            found = self._found(case)
            status, reason = (SKIPPED if found.skipped else PASSED), found.skipped
        except AssertionError as failure:
            found, status, reason = Found(), FAILED, printable(" ".join(str(failure).split()))
        except (Exception, SystemExit) as failure:
            found, status, reason = Found(), FAILED, described(failure)
        seconds = round(time.perf_counter() - start, 3)
        return Outcome(
            case.op, case.check, case.dtype, status, reason, found.error, found.speed, seconds
        )

    def _found(self, case: Case) -> Found:
        if case.check == LOADING:
            if self.refused:
                raise AssertionError(self.refused)
            return Found()
        if case.op == PLUGIN:
            try:
                return Found(skipped=OF_PLUGIN[case.check].run(self.plugin) or "")
            finally:  # it may have reset the host, and the plugin have made its classes anew
                self._subjects |= self._subjects_now()
        if case.op == PLATFORM:
            return Found(skipped=OF_PLATFORM[case.check].run(current_platform()) or "")
        subject, check = self._subjects[case.op], CHECKS[case.check]
        against = check.against(subject)
        if against:
            return Found(skipped=against)
        dtypes = (getattr(torch, case.dtype),) if case.dtype else check.dtypes or ()
        missing = [
            _text(dtype) for dtype in dtypes if subject.spec and dtype not in dtypes_of(subject)
        ]
        if missing:
            return Found(skipped=f"platform or form takes no {' or '.join(missing)}")
        return check.run(subject, dtypes[0]) or Found()


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
