"""Lockfiles: the distributions whose plugins may be imported, as they were when they were locked.

A distribution is compared with its row, and its files with the hashes of its RECORD, before any
import.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import importlib_metadata
from opgraft.base.files import read_regular, replace_file
from opgraft.base.text import described
from opgraft.config import Settings
from opgraft.config.declaration import without_duplicates
from opgraft.config.plugin_settings import SETTINGS_GROUP
from opgraft.errors import ConfigError, InputError, PluginError
from opgraft.plugins.discovery import discover, is_editable, normalized
from opgraft.plugins.metadata import Problem, text_of
from opgraft.plugins.records import difference, rows_of
from opgraft.plugins.requirements import FAULTS, unfit
from opgraft.plugins.stray import stray_code
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue

SCHEMA = "opgraft.lock/1"
ALLOW_EDITABLE = "--allow-editable"
_LARGEST = 1 << 24  # bytes of a lockfile
_TEXTS = ("name", "version", "record")
_ANEW = "reinstall it, or look at it and lock it anew by 'opgraft plugins lock'"


@dataclass(frozen=True)
class LockedPackage:
    """A distribution as it is installed, or was when it was locked.

    Attributes:
        name, version: of the distribution.
        record: SHA-256 of the RECORD in hexadecimal. Lines are taken to end with a line feed alone.
        editable: True for an editable install. No RECORD lists the source.
        entry_points: the offers to opgraft, each ``group: name = value``, sorted.
    """

    name: str
    version: str
    record: str
    editable: bool
    entry_points: tuple[str, ...]

    @classmethod
    def from_dict(cls, data: Any) -> LockedPackage:
        """Return the row of plain data from ``to_dict``.

        Raises:
            ValueError: the data is no row.
        """
        if not _is_row(data):
            raise ValueError(f"{data!r:.100} is no row of a distribution")
        points = data["entry_points"]
        if not isinstance(points, list) or not _are_texts(points):
            raise ValueError(f"the entry points of {data['name']!r} are no list of strings")
        return cls(**{**data, "entry_points": tuple(points)})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "entry_points": list(self.entry_points)}


def _is_row(data: Any) -> bool:
    """Return True if data has the keys and types of a row, the entry points aside."""
    if not isinstance(data, dict) or data.keys() != {*_TEXTS, "editable", "entry_points"}:
        return False
    return _are_texts([data[key] for key in _TEXTS]) and isinstance(data["editable"], bool)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


class Lockfile:
    """The rows of a lockfile, and the verdicts about installed distributions."""

    def __init__(self, path: str, rows: Iterable[LockedPackage]) -> None:
        self.path = path
        self.rows = {normalized(row.name): row for row in rows}
        self.verdicts: dict[Provider, str | None] = {}

    def __str__(self) -> str:
        """Return the number of rows, and a digest for any order."""
        # Two lockfiles with equal rows are one to workers, wherever the files lie.
        rows = [self.rows[name].to_dict() for name in sorted(self.rows)]
        text = json.dumps(rows, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"one of {len(rows)} distributions with the SHA-256 {digest:.16}"

    def against(self, provider: Provider) -> str | None:
        """Return the difference of a distribution from its row or RECORD, or ``None``.

        The comparison is made once.
        """
        # Hashing the files takes time, and each offer of the distribution asks.
        if provider not in self.verdicts:
            self.verdicts[provider] = self._against(provider)
        return self.verdicts[provider]

    def _against(self, provider: Provider) -> str | None:
        row = self.rows.get(normalized(provider.name))
        if row is None:
            return f"it is not in {self.path}: 'opgraft plugins lock' adds it, once you trust it"
        try:
            found = as_installed(provider)
            change = _change(row, found, self.path) or _damage(provider)
        except PluginError as error:
            change = str(error)
        return f"{change}: {_ANEW}" if change else None


_LOCKFILES = StateValue[dict[str, Lockfile]](dict)
"""By path, as they were read first, with what the installed distributions were compared with."""


def lockfile(path: str, origin: str) -> Lockfile:
    """Return a lockfile, read once per process.

    Args:
        path: the file.
        origin: the source of the setting, for messages.

    Raises:
        ConfigError: the file cannot be used.
    """
    known = _LOCKFILES.get()
    if path not in known:
        try:
            known[path] = Lockfile(path, read_rows(path))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"the lockfile {path} ({origin}) cannot be used: {why}. Nothing is admitted "
                f"without it: write it by 'opgraft plugins lock --output {path}', or unset lockfile"
            ) from error
    return known[path]


def read_rows(path: str) -> list[LockedPackage]:
    """Read a lockfile.

    Raises:
        OSError, ValueError, RecursionError: the file cannot be read, or is no lockfile.
    """
    # The path comes from a setting, and may lead to a pipe or a huge file.
    text = read_regular(path, _LARGEST)
    content = json.loads(text, object_pairs_hook=without_duplicates)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"it holds no object of the schema {SCHEMA!r}")
    has_keys = content.keys() == {"schema", "distributions"}
    if not has_keys or not isinstance(content["distributions"], list):
        raise ValueError("it holds other keys than 'schema' and a list of 'distributions'")
    rows = [LockedPackage.from_dict(row) for row in content["distributions"]]
    names = [normalized(row.name) for row in rows]
    # Of two rows, the reader cannot know which one somebody trusts.
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"{twice!r} stands in it twice")
    return rows


def write_rows(path: Path, rows: Iterable[LockedPackage]) -> None:
    """Write a lockfile in one step: a reader finds the former file or the new one.

    Raises:
        InputError: the file cannot be written.
    """
    content = {"schema": SCHEMA, "distributions": [row.to_dict() for row in rows]}
    try:
        text = json.dumps(content, indent=2)
        replace_file(path, f"{text}\n", 0o644)  # a fleet's lockfile is for everyone
    except OSError as error:
        why = error.strerror or described(error)
        raise InputError(
            f"the lockfile {path} cannot be written: {why}: name another by --output"
        ) from error


def lock_installed(
    settings: Settings, *, allow_editable: bool
) -> tuple[list[LockedPackage], list[Problem]]:
    """Return the rows of admitted distributions, and the distributions that cannot be locked.

    The lockfile of the settings has no say: somebody may be about to renew the file.
    """
    rows, left_out = [], []
    for provider, reasons in _reasons_against(settings).items():
        if None in reasons:
            try:
                rows.append(_row_to_lock(provider, allow_editable))
            except PluginError as error:
                left_out.append(Problem(provider, str(error)))
            continue
        first = reasons[0]
        # A list of the user is no fault.
        if first is not None and first.startswith(FAULTS):
            left_out.append(Problem(provider, first))
    return sorted(rows, key=lambda row: normalized(row.name)), left_out


def _reasons_against(settings: Settings) -> dict[Provider, list[str | None]]:
    """Return the reasons against the offers of each distribution, ``None`` for a used offer."""
    reasons: dict[Provider, list[str | None]] = {}
    for offer in discover().offers:
        if not offer.built_in:
            reasons.setdefault(offer.provider, []).append(unfit(offer, settings))
    return reasons


def _row_to_lock(provider: Provider, allow_editable: bool) -> LockedPackage:
    """Return the row of an installed distribution.

    Raises:
        PluginError: the distribution cannot be locked.
    """
    row = as_installed(provider)
    if row.editable and not allow_editable:
        raise PluginError(
            f"it is an editable install, whose source can change: {ALLOW_EDITABLE} locks it"
        )
    damage = _damage(provider)
    if damage:
        raise PluginError(f"{damage}: reinstall it")
    return row


def as_installed(provider: Provider) -> LockedPackage:
    """Return the row of an installed distribution, by its metadata.

    Raises:
        PluginError: the metadata cannot be read.
    """
    distribution = discover().distributions[provider]
    try:
        read = {offer.stands_in for offer in discover().offers if offer.provider == provider}
        if provider in discover().sections:
            read.add(SETTINGS_GROUP)
        # Groups of other hosts may change without harm.
        points = [point for point in distribution.entry_points if point.group in read]
        digest = hashlib.sha256(_record(distribution).encode()).hexdigest()
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise PluginError(f"its metadata cannot be read: {described(error)}") from error
    offers = sorted(f"{point.group}: {point.name} = {point.value}" for point in points)
    version, editable = str(provider.version), is_editable(distribution)
    return LockedPackage(provider.name, version, digest, editable, tuple(offers))


def _record(distribution: importlib_metadata.Distribution) -> str:
    text = text_of(distribution, "RECORD")
    if text is None:
        raise PluginError(
            "it has no RECORD that its files could be compared with, as pip and its like write one"
        )
    return text


def _change(row: LockedPackage, found: LockedPackage, path: str) -> str | None:
    """Return the difference of an installed distribution from its row, or ``None``."""
    if found.version != row.version:
        return f"its version is {found.version}, {path} has {row.version}"
    # The source of an editable install is compared with nothing.
    if found.editable != row.editable:
        return f"it is {'an' if found.editable else 'no longer an'} editable install"
    if found.entry_points != row.entry_points:
        new = [f"new: {point}" for point in found.entry_points if point not in row.entry_points]
        gone = [f"gone: {point}" for point in row.entry_points if point not in found.entry_points]
        return f"its entry points have changed ({', '.join(new + gone)})"
    if found.record != row.record:
        return (
            f"its RECORD has changed: its SHA-256 is {found.record:.12}…, "
            f"{path} has {row.record:.12}…"
        )
    return None


def _damage(provider: Provider) -> str | None:
    """Return a difference of the files of a distribution from its RECORD, or ``None``.

    Raises:
        PluginError: the RECORD is malformed.
    """
    distribution = discover().distributions[provider]
    try:
        rows = rows_of(_record(distribution))
    except (csv.Error, ValueError) as error:
        raise PluginError(f"its RECORD is malformed: {described(error)}") from error
    hashed = [row for row in rows if row[1]]  # RECORD itself and compiled bytecode have no hash
    for path, digest, size in hashed:
        place = Path(str(distribution.locate_file(path)))
        change = difference(place, path, digest, size)
        if change is not None:
            return change
    if is_editable(distribution):
        return None
    return stray_code(provider, distribution, {path for path, _, _ in hashed})
