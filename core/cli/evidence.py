"""Evidence of conformance as a file, for later runs and comparisons."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import urllib.parse
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opgraft.base.files import read_regular, replace_file
from opgraft.base.installed import version_of
from opgraft.base.log import logger
from opgraft.base.reached import ReachedLines, united
from opgraft.base.text import printable
from opgraft.config.environment import state_home
from opgraft.errors import InputError, PluginError
from opgraft.plugins.discovery import discover, is_editable, normalized
from opgraft.plugins.locking import hashed_files
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state

SCHEMA = "opgraft.conformance/1"
SHIPPED = "conformance.json"
"""The file with evidence in the package of a plugin."""
LARGEST = 1 << 26
"""Bytes of a file with evidence."""
MOST_LINES = 1 << 21
"""Lines of kernels in a file, each counted in each answer. More come from a faulty file only."""

_SUBJECT = ("plugin", "provider", "platform", "device", "versions", "brief")
"""Fields that must be the same for a run to go on with earlier evidence."""

_FURTHER = ("ops", "checks", "date", "code", "shapes")

_ABOUT = {
    "provider": dict,
    "platform": str,
    "device": str,
    "versions": dict,
    "ops": dict,
    "checks": dict,
    "date": str,
    "code": str,
}
_CODE = re.compile(r"\.(pyd?|so(\.\d+)*|dll|dylib|cubin|ptx|cc?|cpp|cxx|cuh?|hpp|h)$")
"""The end of the name of a file with code."""
_LARGEST_CODE = 1 << 30
"""Bytes of a file with code."""

_OUTCOME = {"op": str, "check": str, "status": str, "reason": str}

DEVICE = "(device)"
"""The ``op`` of an answer of the device suite."""

Key = tuple[str, str, str | None]


@dataclass
class ConformanceEvidence:
    """The answers about a plugin.

    Attributes:
        about: plugin, provider, platform, device, versions, day, digest of the code, ops and
            checks, as plain data.
        cases: the number of questions.
        outcomes: the answers so far, by question.
        device_suite: name, version and level of the device suite, the claims of the
            platform, and by part the number of tests left out by reason; empty if it did not run.
    """

    about: dict[str, Any] = field(default_factory=dict)
    cases: int = 0
    outcomes: dict[Key, dict[str, Any]] = field(default_factory=dict)
    device_suite: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Return True if every question is answered."""
        return 0 < self.cases <= len(self.outcomes)

    def add(self, outcome: Mapping[str, Any]) -> None:
        """Take note of an answer."""
        self.outcomes[key_of(outcome)] = dict(outcome)

    def counted(self) -> dict[str, int]:
        """Return the number of answers by status."""
        found = Counter(outcome["status"] for outcome in self.outcomes.values())
        return {status: found[status] for status in ("passed", "failed", "skipped")}

    def failed(self) -> list[dict[str, Any]]:
        """Return the failed answers."""
        return [outcome for outcome in self.outcomes.values() if outcome["status"] == "failed"]

    def lines(self) -> dict[str, ReachedLines]:
        """Return for each op the lines of the kernel that the calls of checks ran.

        The forms of an op share a kernel, and each may run other lines.
        """
        ops = self.about.get("ops", {})
        noted: dict[str, list[ReachedLines]] = {}
        for outcome in self.outcomes.values():
            # Older evidence and other checks have none.
            if outcome.get("lines"):
                op = ops.get(outcome["op"], outcome["op"])
                noted.setdefault(op, []).append(ReachedLines.of(outcome["lines"]))
        return {op: found for op, each in noted.items() if (found := united(each))}

    def of_device(self) -> list[dict[str, Any]]:
        """Return the answers of the device suite."""
        return [outcome for outcome in self.outcomes.values() if is_of_device(outcome)]

    def score(self) -> float | None:
        """Return the share of tests of the device suite that pass, of those that ran."""
        counted = Counter(outcome["status"] for outcome in self.of_device())
        ran = counted["passed"] + counted["failed"]
        return round(counted["passed"] / ran, 4) if ran else None

    def regressions(self, baseline: ConformanceEvidence) -> list[dict[str, Any]]:
        """Return the checks that passed in an earlier run, and do not pass now."""
        gone = {"status": "missing", "reason": "it is not asked any more"}
        found = []
        for key, before in baseline.outcomes.items():
            now = self.outcomes.get(key, gone)
            # A check that is skipped now counts, too: a kernel may have lost a dtype.
            if before["status"] != "passed" or now["status"] == "passed":
                continue
            op, check, dtype = key
            told = {name: now[name] for name in gone}
            found.append({"op": op, "check": check, "dtype": dtype, **told})
        return found

    def to_dict(self, regressions: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Return the same as plain data; ``regressions`` are ``None`` without a baseline."""
        return {
            "schema": SCHEMA,
            **self.about,
            "complete": self.complete,
            "cases": self.cases,
            "counts": self.counted(),
            "outcomes": list(self.outcomes.values()),
            "lines": {op: asdict(found) for op, found in self.lines().items()},
            "regressions": None if regressions is None else list(regressions),
            "device_suite": self._device_suite(),
        }

    def _device_suite(self) -> dict[str, Any] | None:
        if not self.device_suite:
            return None
        return {**self.device_suite, "score": self.score()}

    def expect_same(self, about: Mapping[str, Any], path: Path | None) -> None:
        """Check that earlier answers are about the same subject.

        Raises:
            InputError: the subject is another one.
        """
        fields = [name for name in (*_SUBJECT, "code", "shapes") if name in self.about]
        changed = [name for name in fields if self.about[name] != about.get(name)]
        if not changed:
            return
        changes = []
        for name in changed:
            changes.append(f"{name} was {self.about.get(name)!r} and is {about.get(name)!r}")
        listed = "; ".join(changes)
        raise InputError(
            f"{path} cannot be gone on with: {listed}. Run without --resume to begin anew."
        )


def is_of_device(outcome: Mapping[str, Any]) -> bool:
    """Return True for an answer of the device suite."""
    return bool(outcome["op"] == DEVICE)


def key_of(outcome: Mapping[str, Any]) -> Key:
    """Return the question of an answer."""
    return outcome["op"], outcome["check"], outcome["dtype"]


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Write evidence.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, json.dumps(data, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file of the user in one step.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        replace_file(path, text, 0o644)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}. Name another file, in a folder that is "
            "there."
        ) from error


def read(path: Path) -> ConformanceEvidence:
    """Read evidence.

    Raises:
        InputError: there is no file, or the schema is another one.
    """
    try:
        return _evidence_of(json.loads(read_regular(path, LARGEST)))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except _OF_OTHER_DATA as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path} holds no evidence that 'opgraft conformance --json' writes: {why}"
        ) from error


_OF_OTHER_DATA = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors of reading a file with other data."""


def _evidence_of(data: Any) -> ConformanceEvidence:
    """Return the evidence in plain data.

    Raises:
        ValueError: the data are of another schema, or have wrong values.
    """
    if data["schema"] != SCHEMA:
        raise ValueError(f"its schema is {data['schema']!r}, expected {SCHEMA!r}")
    about = {name: data[name] for name in _SUBJECT}
    # Older evidence lacks these fields.
    about |= {name: data[name] for name in _FURTHER if name in data}
    for name, kind in _ABOUT.items():
        if not isinstance(about.get(name, kind()), kind):
            raise ValueError("what it is about has a value of another type")
    if not {"name", "version"} <= about["provider"].keys():
        raise ValueError("its provider has no name or no version")
    suite = dict(data.get("device_suite") or {})
    found = ConformanceEvidence(about, int(data["cases"]), device_suite=suite)
    outcomes: Iterable[Mapping[str, Any]] = data["outcomes"]
    lines = 0
    for outcome in outcomes:
        if any(not isinstance(outcome[name], kind) for name, kind in _OUTCOME.items()):
            raise ValueError("an outcome has a value of another type")
        if outcome.get("lines"):
            lines += ReachedLines.of(outcome["lines"]).count()
        # Before a reader makes sets of them.
        if lines > MOST_LINES:
            raise ValueError(f"its outcomes have more than {MOST_LINES:,} lines")
        found.add(outcome)
    return found


def shipped(module: str, installed: Provider) -> dict[str, Any] | None:
    """Return a summary of the evidence in a plugin's package; ``None`` if there is none.

    Nothing of the package is imported. ``problem`` of the summary is about unreadable evidence,
    ``outdated`` about evidence for other versions or other code than the installed ones. If a
    platform was chosen, ``outdated`` is about another platform or device, too.
    """
    for place in _places_of(module):
        file = place / SHIPPED
        if file.is_file():
            return _summary(file, installed)
    return None


def digest_of_code(provider: Provider) -> str:
    """Return a digest of the code of a distribution, which is not imported.

    The code lies in the packages of all its offers. Other distributions may share such a package,
    so only the files in RECORD count. The source of an editable install counts as it lies there.
    """
    modules = [each.module for each in discover().offers if each.provider == provider]
    tops = {module.partition(".")[0] for module in modules}
    digest = hashlib.sha256()
    for name, file in sorted(_files_of_code(provider, tops).items()):
        # Neither a broken link nor a folder is code.
        with suppress(OSError, ValueError):
            content = hashlib.sha256(read_regular(file, _LARGEST_CODE)).digest()
            digest.update(f"{name}\0".encode() + content)
    return digest.hexdigest()


def _files_of_code(provider: Provider, tops: Collection[str]) -> dict[str, Path]:
    """Return the files with code of a distribution by path, as in a wheel.

    Args:
        provider: the distribution.
        tops: the names of its top-level packages and modules.
    """
    distribution = discover().distributions.get(provider)
    if distribution is None or is_editable(distribution):
        return _code_below(tops)
    try:
        listed = hashed_files(distribution)
    except (PluginError, ValueError, OSError):
        return _code_below(tops)
    files = {}
    for path in listed:
        top = path.partition("/")[0].partition(".")[0]
        if top in tops and _CODE.search(path):
            files[path] = Path(str(distribution.locate_file(path)))
    return files


def _code_below(tops: Iterable[str]) -> dict[str, Path]:
    """Return the files with code in top-level packages by path, as in a wheel."""
    files = {}
    for top in tops:
        for place in _places_of(top):
            if place.is_file():
                files[place.name] = place
                continue
            for file in place.rglob("*"):
                if _CODE.search(file.name):
                    files[f"{top}/{file.relative_to(place).as_posix()}"] = file
    return files


def _places_of(module: str) -> list[Path]:
    """Return the folders of the package of a module, or the file of a single module."""
    found = importlib.util.find_spec(module.partition(".")[0])
    if found is None:
        return []
    return list(map(Path, found.submodule_search_locations or filter(None, [found.origin])))


def keep(name: str, data: Mapping[str, Any]) -> Path | None:
    """Keep evidence about a distribution or a built-in platform; return the file if possible."""
    file = kept_file(name)
    if file is None:
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write(file, data)
    except (OSError, InputError) as error:
        logger.info("%s", printable(f"the evidence is not kept: {error}"))
        return None
    return file


def kept(name: str, installed: Provider) -> dict[str, Any] | None:
    """Return a summary of the kept evidence about a name, as ``shipped`` does."""
    file = kept_file(name)
    return _summary(file, installed) if file is not None and file.is_file() else None


def kept_file(name: str) -> Path | None:
    """Return the file of kept evidence about a name; ``None`` if the user has no home folder."""
    file = f"{urllib.parse.quote(name, safe='')}.json"
    with suppress(RuntimeError):
        return state_home() / "opgraft" / "conformance" / file
    return None


def _summary(file: Path, installed: Provider) -> dict[str, Any]:
    try:
        evidence = read(file)
    except InputError as error:
        return {"file": str(file), "problem": str(error)}
    shown = ("provider", "platform", "device", "versions", "date")
    return {
        "file": str(file),
        **{name: evidence.about.get(name) for name in shown},
        "complete": evidence.complete,
        "counts": evidence.counted(),
        "outdated": "; ".join(_differences(evidence.about, installed)) or None,
        "problem": None,
    }


def _differences(about: Mapping[str, Any], installed: Provider) -> Iterator[str]:
    """Yield words for each part of the subject of evidence that is another one here."""
    judged = about["provider"]
    same_name = normalized(str(judged["name"])) == normalized(installed.name)
    if not same_name or judged["version"] != installed.version:
        yield f"it is about {judged['name']} {judged['version']}, and {installed} is installed"
    elif about.get("code", "") not in ("", digest_of_code(installed)):
        yield f"the code of {installed} has changed since"
    for name in ("opgraft", "torch"):
        made_with, now = about["versions"].get(name), version_of(name)
        if made_with != now:
            yield f"it was made with {name} {made_with}, and {name} {now} is installed"
    selection = host_state().selection
    if selection is None:
        return
    platform = selection.platform
    here = {"platform": platform.name, "device": platform.capability().name}
    for name, value in here.items():
        if about.get(name) != value:
            yield f"its {name} is {about.get(name)}, and the {name} here is {value}"
