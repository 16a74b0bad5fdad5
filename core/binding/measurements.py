"""Choices by measurement: the times of candidates of ops, as ``opgraft tune`` has written them.

Measurements hold for one machine and for the versions on that machine. Elsewhere no choice follows
a measurement, and the decision says why.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from opgraft.base.files import read_regular, replace_file
from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.base.version import __version__
from opgraft.binding.names import other_replacements_of_op
from opgraft.config import NATIVE_CHOICE, CustomOpsSetting, Settings
from opgraft.config.environment import state_home
from opgraft.errors import InputError
from opgraft.platform import Platform
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import selected_platform
from opgraft.registry.choice import choice_name, objection_to, settled
from opgraft.registry.decision import Candidate, Decision, Provider
from opgraft.registry.declarations import Replacement
from opgraft.registry.state import StateValue, host_state

SCHEMA = "opgraft.tuning/1"
MARGIN = 0.97
"""A candidate is faster if the time is below this share of the other time; the rest is noise."""

_LARGEST = 1 << 24  # bytes of a file of measurements
_ANEW = "'opgraft tune' measures here"
_LOCKED_FOR = 10.0
"""Seconds of waiting for another process that writes the file."""


@dataclass(frozen=True)
class Setup:
    """The machine and the versions of a measurement."""

    platform: str
    device: str
    capability: str
    driver: str
    torch: str
    opgraft: str

    @property
    def machine(self) -> tuple[str, str, str]:
        """Return the fields that tell machines apart; the others may change on one machine."""
        return self.platform, self.device, self.capability

    def change_to(self, here: Setup) -> str | None:
        """Return the versions that differ from another setup, in words; ``None`` if none does."""
        changed = []
        for name in ("driver", "torch", "opgraft"):
            then = getattr(self, name)
            now = getattr(here, name)
            if then != now:
                changed.append(f"{name} {then or 'none'}, here is {now or 'none'}")
        return f"measured with {' and '.join(changed)}" if changed else None

    @classmethod
    def of_row(cls, row: Any) -> Setup:
        """Return the setup of plain data."""
        return cls(**{field.name: _expect_text(row[field.name]) for field in fields(cls)})


@dataclass(frozen=True)
class TimedChoice:
    """A candidate: the choice of ``providers``, the kernel, and the seconds of a call by shape."""

    choice: str
    provider: Provider
    kernel: str
    seconds: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The geometric mean: each shape has the same weight, however long a call takes."""
        logarithms = [math.log(seconds) for seconds in self.seconds.values()]
        return math.exp(sum(logarithms) / len(logarithms))

    @classmethod
    def of_row(cls, row: Any) -> TimedChoice:
        """Return the candidate of plain data.

        Raises:
            ValueError: a time is no time.
        """
        seconds = {_expect_text(shape): float(value) for shape, value in row["seconds"].items()}
        if not seconds or not all(0 < value < math.inf for value in seconds.values()):
            raise ValueError("it holds times that are none")
        return cls(
            _expect_text(row["choice"]), _provider(row), _expect_text(row["kernel"]), seconds
        )


@dataclass(frozen=True)
class LeftOut:
    """A candidate that failed, and is no choice until the version changes."""

    choice: str
    provider: Provider
    reason: str

    @classmethod
    def of_row(cls, row: Any) -> LeftOut:
        """Return the candidate of plain data."""
        return cls(_expect_text(row["choice"]), _provider(row), _expect_text(row["reason"]))


@dataclass(frozen=True)
class OpMeasurement:
    """The measurement of an op.

    Attributes:
        chosen: the choice of the best candidate.
        threads: of torch during the measurement.
        when: the date, in UTC.
        candidates: that ran.
        left_out: candidates that failed.
    """

    chosen: str
    threads: int
    when: str
    candidates: tuple[TimedChoice, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def winner(self) -> TimedChoice:
        return next(each for each in self.candidates if each.choice == self.chosen)

    @property
    def versions(self) -> dict[str, str | None]:
        """The version of each candidate."""
        rows: list[TimedChoice | LeftOut] = [*self.candidates, *self.left_out]
        return {each.choice: each.provider.version for each in rows}

    @property
    def verdict(self) -> str:
        """The figures of the best candidate and of the second best, in words."""
        best = self.winner
        others = [each for each in self.candidates if each is not best]
        others.sort(key=lambda each: each.mean)
        times = [f"{each.choice} {_time(each.mean)}" for each in (best, *others[:1])]
        count = len(best.seconds)
        shapes = f"{count} shape{'s' if count > 1 else ''}"
        alone = "" if others else "; no other ran"
        return f"{', '.join(times)} in the mean of {shapes}{alone}"

    def figures(self, of: TimedChoice) -> str:
        """Return the figures of a candidate: the mean, and shapes faster than the best one's."""
        best = self.winner
        text = f"{_time(of.mean)} in the mean"
        if of is best:
            return text
        text += f", {of.mean / best.mean:.2f} of the time of {best.choice}"
        ratios = {shape: of.seconds[shape] / best.seconds[shape] for shape in best.seconds}
        faster = [f"{ratio:.2f} at {shape}" for shape, ratio in ratios.items() if ratio < MARGIN]
        return f"{text}, though {', '.join(faster)}" if faster else text

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: Any) -> OpMeasurement:
        """Return the measurement of plain data.

        Raises:
            ValueError: the candidates do not belong together.
        """
        chosen = row["chosen"]
        threads = int(row["threads"])
        when = _expect_text(row["when"])
        candidates = tuple(map(TimedChoice.of_row, row["candidates"]))
        left_out = tuple(map(LeftOut.of_row, row["left_out"]))
        ran = [each.choice for each in candidates]
        failed = [each.choice for each in left_out]
        choices = {*ran, *failed}
        shapes = {tuple(each.seconds) for each in candidates}
        # A choice stands for one candidate, and means are compared over the same shapes.
        is_distinct = len(choices) == len(ran) + len(failed)
        if len(choices) < 2 or not is_distinct or len(shapes) != 1 or chosen not in ran:
            raise ValueError("the rows of its candidates do not belong together")
        return cls(chosen, threads, when, candidates, left_out)


Profile = dict[Setup, dict[str, OpMeasurement]]
"""The measurements of a file, by setup and by name of the op or variant; one setup per machine."""


def follow(
    cls: type, name: str | None, settings: Settings, active: Sequence[Replacement]
) -> tuple[Settings, tuple[Decision, ...]]:
    """Let measurements choose the provider of an op if ``custom_ops`` says ``auto``.

    A choice by hand comes first: of a list in ``providers``, the first name that applies.

    Returns:
        The settings, with the choice if there is one, and the record of the choice; no record if
        no setting asked for measurements.
    """
    custom_ops = CustomOpsSetting.parse(settings.config.compilation_config.custom_ops or ())
    # A class without a name in settings was never measured.
    if name is None:
        return settings, ()
    if settings.wanted_providers(name):
        return _chosen_by_hand(cls, name, settings, active), ()
    if not custom_ops.leaves_to_measurements(name):
        return settings, ()
    source = f"'auto' in custom_ops ({settings.origins['compilation_config.custom_ops']})"
    subject = subject_of(cls, name)
    about = f"measurement of {subject}"
    found = _measured_here(cls, name, settings, active)
    if isinstance(found, str):
        return settings, (Decision(about, None, f"{source}, but {found}"),)
    where = profile_path(settings)
    reason = f"{source}; measured {found.when} with {_threads(found.threads)}, {where}"
    change = f"OPGRAFT_PROVIDERS={name}=..., or measure anew by 'opgraft tune {subject}'"
    decision = Decision(about, found.chosen, reason, _candidates(found), change)
    return settings.with_provider(name, found.chosen, f"measured: {found.verdict}"), (decision,)


def _chosen_by_hand(
    cls: type, name: str, settings: Settings, active: Sequence[Replacement]
) -> Settings:
    return settled(
        settings,
        cls,
        op_name=name,
        own=discover().provider_of(cls.__module__),
        active=active,
        platform=selected_platform().platform,
        other_replacements=other_replacements_of_op(cls, active),
    )


def _candidates(found: OpMeasurement) -> tuple[Candidate, ...]:
    """Return the measured candidates, then those left out."""
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
) -> OpMeasurement | str:
    """Return the measurement of an op on this machine, or the reason not to follow one."""
    enabled, because = settings.enabled(name)
    # A compiler fuses native definitions, and no measurement tells of fused ones.
    if not enabled:
        return because
    try:
        found = _known(profile_path(settings))
    except InputError as error:
        return str(error)
    if isinstance(found, str):
        return found
    subject = subject_of(cls, name)
    measured = found.get(subject)
    if measured is None:
        return f"it was not measured: 'opgraft tune {subject}' does"
    own = discover().provider_of(cls.__module__)
    platform = selected_platform().platform
    here = versions_here(cls, own, active, platform)
    then = {choice: version for choice, version in measured.versions.items() if choice != own.name}
    if then != here:
        return (
            f"measured were {_listed(then)}, here are {_listed(here)}: "
            f"'opgraft tune {subject}' measures them"
        )
    threads = torch.get_num_threads()
    # Which kernel is faster depends on the threads.
    if platform.device_type == "cpu" and measured.threads != threads:
        return (
            f"it was measured with {_threads(measured.threads)}, here are {threads}: "
            f"'OMP_NUM_THREADS={threads} opgraft tune {subject}' measures with as many"
        )
    return measured


def subject_of(cls: type, name: str) -> str:
    """Return the name of an op in measurements; a variant has a name of its own."""
    record = host_state().registry.ops.get(name)
    return name if record is not None and record.cls is cls else cls.__qualname__


def versions_here(
    cls: type, own: Provider, active: Sequence[Replacement], platform: Platform
) -> dict[str, str | None]:
    """Return the versions of the candidates here, by choice; the native definition comes last."""
    versions = {}
    for replacement in active:
        if replacement.target is cls and objection_to(replacement, platform, None) is None:
            versions[choice_name(replacement)] = replacement.provider.version
    return {**versions, NATIVE_CHOICE: own.version}


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {versions[name] or ''}".rstrip() for name in sorted(versions))


def profile_path(settings: Settings) -> Path:
    """Return the file of measurements.

    Raises:
        InputError: no setting names a file, and there is no home folder.
    """
    given = settings.config.compilation_config.tuning_file
    try:
        return Path(given) if given else state_home() / "opgraft" / "tuning.json"
    except RuntimeError as error:
        raise InputError(
            "there is no home folder for measurements: name a file by "
            "compilation_config.tuning_file"
        ) from error


_FILES = StateValue[dict[Path, dict[str, OpMeasurement] | str]](dict)
"""By path, the measurements of a file for this machine, or why there are none."""


def _known(path: Path) -> dict[str, OpMeasurement] | str:
    """Return the measurements of a file for this machine, or why there are none.

    A process reads a file once.
    """
    # Constructing ops asks often, and a file may be large.
    known = _FILES.get()
    if path not in known:
        known[path] = _rows_here(path)
        if isinstance(known[path], str):
            told = f"custom_ops auto follows no measurements: {known[path]}"
            logger.warning("%s", printable(told))
    return known[path]


def _rows_here(path: Path) -> dict[str, OpMeasurement] | str:
    try:
        profile = read_profile(path)
        here = setup_here()
    except FileNotFoundError:
        return f"there is no file {path}: {_ANEW}"
    except InputError as error:
        return str(error)
    for setup, rows in profile.items():
        if setup.machine == here.machine:
            change = setup.change_to(here)
            return f"{path} was {change}: {_ANEW} anew" if change else rows
    others = ", ".join(each.device for each in profile)
    return f"{path} is of other machines ({others}), this one has {here.device}: {_ANEW}"


def setup_here() -> Setup:
    """Describe this machine, and the versions on this machine."""
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
        FileNotFoundError: there is no file.
        InputError: the file cannot be used.
    """
    try:
        content = json.loads(read_regular(path, _LARGEST))
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"it holds no object of the schema {SCHEMA!r}")
        profile = {}
        # The file may be damaged or edited, so every value is checked.
        for row in content["machines"]:
            setup = Setup.of_row(row["setup"])
            rows = row["ops"].items()
            profile[setup] = {name: OpMeasurement.of_row(each) for name, each in rows}
        return profile
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
            f"the measurements {path} cannot be used: {why}: remove the file and tune anew, or "
            "name another by compilation_config.tuning_file"
        ) from error


def written(profile: Profile) -> str:
    """Return the text of a file of measurements."""
    rows = []
    for setup, ops in profile.items():
        by_name = {name: ops[name].to_dict() for name in sorted(ops)}
        rows.append({"setup": asdict(setup), "ops": by_name})
    return json.dumps({"schema": SCHEMA, "machines": rows}, indent=1) + "\n"


class ProfileFile:
    """A file of measurements; several processes may add to the file at the same time.

    Raises:
        InputError: the file holds something else, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.setup = setup_here()
        self.add({})

    def add(self, rows: Mapping[str, OpMeasurement]) -> None:
        """Add measurements of this machine, and drop those of other versions."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.path):
                # Read again under the lock: another process may have added measurements.
                profile = read_profile(self.path) if self.path.exists() else {}
                merged = {
                    setup: ops
                    for setup, ops in profile.items()
                    if setup.machine != self.setup.machine
                }
                merged[self.setup] = {**profile.get(self.setup, {}), **rows}
                replace_file(self.path, written(merged), 0o600)
        except OSError as error:
            why = error.strerror or described(error)
            raise InputError(
                f"the measurements {self.path} cannot be written: {why}: name another file by "
                "compilation_config.tuning_file"
            ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; the system frees the lock when the process ends in any way."""
    # The file itself is replaced, and the lock would go with the former one.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    lock = os.open(f"{path}.lock", flags, 0o600)
    try:
        end = time.monotonic() + _LOCKED_FOR
        while not _take(lock):
            if time.monotonic() > end:
                told = f"another process has held {path}.lock for {_LOCKED_FOR:g} s"
                raise TimeoutError(errno.ETIMEDOUT, told)
            time.sleep(0.01)
        yield
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _provider(row: Any) -> Provider:
    provider = row["provider"]
    version = provider["version"]
    return Provider(
        _expect_text(provider["name"]), None if version is None else _expect_text(version)
    )


def _expect_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} stands for a text")
    return value


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
