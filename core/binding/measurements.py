"""Choices by measurement: what ``opgraft tune`` has written down of the candidates of ops on this machine.

Measurements hold for the machine and the versions that they were made with. Where those are others they are not
followed, and the decision says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from opgraft.base.files import read_regular
from opgraft.base.text import described, printable
from opgraft.config import NATIVE_CHOICE, CustomOpsSetting, Settings
from opgraft.config.environment import state_home
from opgraft.errors import InputError
from opgraft.logger import logger
from opgraft.platform import Platform
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import selected_platform
from opgraft.registry.choice import choice_name, objection_to
from opgraft.registry.decision import Candidate, Decision, Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.state import StateValue, host_state
from opgraft.version import __version__

SCHEMA = "opgraft.tuning/1"
MARGIN = 0.97
"""Part of the time of another candidate that one must stay below to count as faster: less is the clock's noise."""

_LARGEST = 1 << 24  # bytes of a file of measurements
_ANEW = "'opgraft tune' measures here"


@dataclass(frozen=True)
class Setup:
    """The machine and the versions that measurements are made with."""

    platform: str
    device: str
    capability: str
    driver: str
    torch: str
    opgraft: str

    @property
    def machine(self) -> tuple[str, str, str]:
        """Return what tells machines apart; the rest may change on one of them."""
        return self.platform, self.device, self.capability

    def change_to(self, here: Setup) -> str | None:
        """Say in which version this differs from another setup of the same machine, or ``None``."""
        rows = [
            (name, getattr(self, name), getattr(here, name))
            for name in ("driver", "torch", "opgraft")
        ]
        changed = [
            f"{name} {then or 'none'}, here is {now or 'none'}"
            for name, then, now in rows
            if then != now
        ]
        return f"measured with {' and '.join(changed)}" if changed else None


@dataclass(frozen=True)
class Timed:
    """A candidate: the choice of ``providers`` that it is, its kernel, and the seconds of a call by shape."""

    choice: str
    provider: Provider
    kernel: str
    seconds: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Return the geometric mean, in which each shape has the same weight, however long it takes."""
        return math.exp(sum(map(math.log, self.seconds.values())) / len(self.seconds))

    def to_dict(self) -> dict[str, Any]:
        return {
            "choice": self.choice,
            "provider": self.provider.to_dict(),
            "kernel": self.kernel,
            "seconds": dict(self.seconds),
        }


@dataclass(frozen=True)
class LeftOut:
    """A candidate that raised, which is no choice until it has another version."""

    choice: str
    provider: Provider
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"choice": self.choice, "provider": self.provider.to_dict(), "reason": self.reason}


@dataclass(frozen=True)
class Measured:
    """The candidates of an op, the best of them, the threads that they ran with, when in UTC, and those that raised."""

    chosen: str
    threads: int
    when: str
    candidates: tuple[Timed, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def winner(self) -> Timed:
        return next(each for each in self.candidates if each.choice == self.chosen)

    @property
    def versions(self) -> dict[str, str | None]:
        """Return the version that each candidate had, of those that raised too."""
        ran = {each.choice: each.provider.version for each in self.candidates}
        return ran | {each.choice: each.provider.version for each in self.left_out}

    @property
    def verdict(self) -> str:
        """Quote the figures of the best candidate, and those of the best other one, if another one ran."""
        best = self.winner
        others = [each for each in self.candidates if each is not best]
        others.sort(key=lambda each: each.mean)
        times = [f"{each.choice} {_time(each.mean)}" for each in (best, *others[:1])]
        count = len(best.seconds)
        shapes = f"{count} shape{'s' if count > 1 else ''}"
        alone = "" if others else "; no other ran"
        return f"{', '.join(times)} in the mean of {shapes}{alone}"

    def figures(self, of: Timed) -> str:
        """Give the figures of a candidate: its mean, and the shapes at which it is faster or slower than the best."""
        best = self.winner
        text = f"{_time(of.mean)} in the mean"
        if of is not best:
            ratios = {shape: of.seconds[shape] / best.seconds[shape] for shape in best.seconds}
            text += f", {of.mean / best.mean:.2f} of the time of {best.choice}"
            faster = [
                f"{ratio:.2f} at {shape}" for shape, ratio in ratios.items() if ratio < MARGIN
            ]
            text += f", though {', '.join(faster)}" if faster else ""
        return text

    def to_dict(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen,
            "threads": self.threads,
            "when": self.when,
            "candidates": [each.to_dict() for each in self.candidates],
            "left_out": [each.to_dict() for each in self.left_out],
        }


Profile = dict[Setup, dict[str, Measured]]
"""The measurements of a file: by setup, of which each machine has one, and by name of the op or variant."""


def follow(
    cls: type, name: str | None, settings: Settings, active: Sequence[Replacement]
) -> tuple[Settings, tuple[Decision, ...]]:
    """Let measurements choose the provider of an op where ``custom_ops`` says ``auto`` and nothing chooses by hand.

    Returns:
        The settings, with the choice if there is one, and the record of it; none where nobody asked.
    """
    custom_ops = CustomOpsSetting.parse(settings.config.compilation_config.custom_ops or ())
    if name is None or settings.chosen_provider(name):
        return settings, ()
    if not custom_ops.leaves_to_measurements(name):
        return settings, ()
    source = f"'auto' in custom_ops ({settings.origins['compilation_config.custom_ops']})"
    subject = subject_of(cls, name)
    found = _measured_here(cls, name, settings, active)
    if isinstance(found, str):
        return settings, (Decision(f"measurement of {subject}", None, f"{source}, but {found}"),)
    where = profile_path(settings)
    reason = f"{source}; measured {found.when} with {_threads(found.threads)}, {where}"
    change = f"OPGRAFT_PROVIDERS={name}=..., or measure anew by 'opgraft tune {subject}'"
    about = f"measurement of {subject}"
    decision = Decision(about, found.chosen, reason, _candidates(found), change)
    return settings.with_provider(name, found.chosen, f"measured: {found.verdict}"), (decision,)


def _candidates(found: Measured) -> tuple[Candidate, ...]:
    """Return what was measured, then what was left out."""
    rows = []
    for row in found.candidates:
        wins = row is found.winner
        rows.append(Candidate(row.choice, wins, found.figures(row), row.provider))
    for left_out in found.left_out:
        why = f"left out, as {left_out.reason}"
        rows.append(Candidate(left_out.choice, False, why, left_out.provider))
    return tuple(rows)


def _measured_here(
    cls: type, name: str, settings: Settings, active: Sequence[Replacement]
) -> Measured | str:
    """Return what was measured of the candidates that an op has here, or say why that is not followed."""
    enabled, because = settings.enabled(name)
    if not enabled:  # a compiler fuses native definitions, of which no measurement tells
        return because
    try:
        found = _known(profile_path(settings))
    except InputError as error:
        return str(error)
    if isinstance(found, str):
        return found
    subject = subject_of(cls, name)
    if subject not in found:
        return f"it was not measured: 'opgraft tune {subject}' does"
    measured, own, platform = (
        found[subject],
        discover().provider_of(cls.__module__),
        selected_platform().platform,
    )
    here = versions_here(cls, own, active, platform)
    then = {choice: version for choice, version in measured.versions.items() if choice != own.name}
    if then != here:
        return (
            f"measured were {_listed(then)}, here are {_listed(here)}: "
            f"'opgraft tune {subject}' measures them"
        )
    threads = torch.get_num_threads()
    if platform.device_type == "cpu" and measured.threads != threads:
        return (
            f"it was measured with {_threads(measured.threads)}, here are {threads}: "
            f"'OMP_NUM_THREADS={threads} opgraft tune {subject}' measures with as many"
        )
    return measured


def subject_of(cls: type, name: str) -> str:
    """Return the name by which an op is measured; of a variant, which may have other kernels, that of its class."""
    record = host_state().registry.ops.get(name)
    return name if record is not None and record.cls is cls else cls.__qualname__


def versions_here(
    cls: type, own: Provider, active: Sequence[Replacement], platform: Platform
) -> dict[str, str | None]:
    """Return the version of each provider whose replacement of an op applies here, and of the native definition."""
    here = [r for r in active if r.target is cls and objection_to(r, platform, None) is None]
    return {**{choice_name(r): r.provider.version for r in here}, NATIVE_CHOICE: own.version}


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(
        f"{choice} {version or ''}".rstrip() for choice, version in sorted(versions.items())
    )


def profile_path(settings: Settings) -> Path:
    """Return the file of measurements.

    Raises:
        InputError: no setting names one, and there is no home folder.
    """
    given = settings.config.compilation_config.tuning_file
    try:
        return Path(given) if given else state_home() / "opgraft" / "tuning.json"
    except RuntimeError as error:
        raise InputError(
            "there is no home folder for measurements: name a file by compilation_config.tuning_file"
        ) from error


_FILES = StateValue[dict[Path, dict[str, Measured] | str]](dict)
"""By path, what files of measurements say of this machine, or why they say nothing, as they were read first."""


def _known(path: Path) -> dict[str, Measured] | str:
    """Return the rows that a file has for this machine, or why there are none; read once in a process."""
    known = _FILES.get()
    if path not in known:
        known[path] = _rows_here(path)
        if isinstance(known[path], str):
            logger.warning(
                "%s", printable(f"custom_ops auto follows no measurements: {known[path]}")
            )
    return known[path]


def _rows_here(path: Path) -> dict[str, Measured] | str:
    try:
        profile, here = read_profile(path), setup_here()
    except FileNotFoundError:
        return f"there is no file {path}: {_ANEW}"
    except InputError as error:
        return str(error)
    setup = next((setup for setup in profile if setup.machine == here.machine), None)
    if setup is None:
        others = ", ".join(each.device for each in profile)
        return f"{path} is of other machines ({others}), this one has {here.device}: {_ANEW}"
    change = setup.change_to(here)
    return f"{path} was {change}: {_ANEW} anew" if change else profile[setup]


def setup_here() -> Setup:
    """Describe this machine, and the versions of what runs on it."""
    selection = selected_platform()
    platform = selection.platform
    device = platform.capability()
    chosen = next((each for each in selection.decision.candidates if each.accepted), None)
    devices = chosen.evidence.devices if chosen and chosen.evidence else ()
    driver = next((each.driver for each in devices if each.driver), None) or ""
    features = " ".join(device.features)
    return Setup(platform.name, device.name, features, driver, str(torch.__version__), __version__)


def read_profile(path: Path) -> Profile:
    """Read a file of measurements.

    Raises:
        FileNotFoundError: there is none.
        InputError: it cannot be used.
    """
    try:
        content = json.loads(read_regular(path, _LARGEST))
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"it holds no object of the schema {SCHEMA!r}")
        return {
            Setup(**{field.name: _text(row["setup"][field.name]) for field in fields(Setup)}): {
                name: _measured(each) for name, each in row["ops"].items()
            }
            for row in content["machines"]
        }
    except FileNotFoundError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else described(error)
        raise InputError(
            f"the measurements {path} cannot be used: {why}: remove the file and tune anew, or name another by "
            "compilation_config.tuning_file"
        ) from error


def written(profile: Profile) -> str:
    """Return the text of a file of measurements."""
    rows = [
        {"setup": asdict(setup), "ops": {name: ops[name].to_dict() for name in sorted(ops)}}
        for setup, ops in profile.items()
    ]
    return json.dumps({"schema": SCHEMA, "machines": rows}, indent=1) + "\n"


def _measured(row: Any) -> Measured:
    candidates = tuple(_timed(each) for each in row["candidates"])
    left_out = tuple(
        LeftOut(_text(r["choice"]), _provider(r), _text(r["reason"])) for r in row["left_out"]
    )
    shapes = {tuple(each.seconds) for each in candidates}
    ran = [each.choice for each in candidates]
    others = [each.choice for each in left_out]
    choices = {*ran, *others}
    distinct = len(choices) == len(ran) + len(others)
    enough = len(choices) >= 2
    if len(shapes) != 1 or row["chosen"] not in ran or not (distinct and enough):
        raise ValueError("the rows of its candidates do not belong together")
    return Measured(row["chosen"], int(row["threads"]), _text(row["when"]), candidates, left_out)


def _timed(row: Any) -> Timed:
    seconds = {}
    for shape, value in row["seconds"].items():
        seconds[_text(shape)] = float(value)
    if not seconds or not all(0 < value < math.inf for value in seconds.values()):
        raise ValueError("it holds times that are none")
    return Timed(_text(row["choice"]), _provider(row), _text(row["kernel"]), seconds)


def _provider(row: Any) -> Provider:
    version = row["provider"]["version"]
    return Provider(_text(row["provider"]["name"]), None if version is None else _text(version))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} stands for a text")
    return value


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
