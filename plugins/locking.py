"""Lockfiles: the distributions whose plugins may be imported, as they were when they were locked.

A distribution is compared with its row, and its files with the hashes of its RECORD, before anything of it is imported.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

import importlib_metadata
from opgraft.base.files import read_regular, replace_file
from opgraft.base.text import described
from opgraft.config import Settings
from opgraft.config.declaration import without_duplicates
from opgraft.errors import ConfigError, InputError, PluginError
from opgraft.plugins.discovery import discover, is_editable, normalized
from opgraft.plugins.metadata import Problem, distributions, is_namespace, specs_of, text_of
from opgraft.plugins.records import difference, rows_of
from opgraft.plugins.requirements import FAULTS, unfit
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue

SCHEMA = "opgraft.lock/1"
ALLOW_EDITABLE = "--allow-editable"
_LARGEST = 1 << 24  # bytes of a lockfile
_SUFFIXES = tuple(all_suffixes())  # of what can be imported
_LIBRARY = re.compile(
    r"\.(so(\.\d+)*|dylib|dll)$"
)  # which the system's loader may find beside another
_ANEW = "reinstall it, or look at it and lock it anew by 'opgraft plugins lock'"


@dataclass(frozen=True)
class Locked:
    """A distribution as it is installed, or was when it was locked.

    Attributes:
        name, version: its own.
        record: SHA-256 over its RECORD in hexadecimal, whose lines are taken to end with a line feed alone.
        editable: whether it is an editable install, whose source no RECORD lists.
        entry_points: its offers to opgraft, each ``group: name = value``, sorted.
    """

    name: str
    version: str
    record: str
    editable: bool
    entry_points: tuple[str, ...]

    @classmethod
    def from_dict(cls, data: Any) -> Locked:
        """Return the row that ``to_dict`` wrote down.

        Raises:
            ValueError: it is none.
        """
        texts = ("name", "version", "record")
        fits = isinstance(data, dict) and data.keys() == {*texts, "editable", "entry_points"}
        if (
            not fits
            or not all(isinstance(data[key], str) for key in texts)
            or not isinstance(data["editable"], bool)
        ):
            raise ValueError(f"{data!r:.100} is no row of a distribution")
        points = data["entry_points"]
        if not isinstance(points, list) or not all(isinstance(point, str) for point in points):
            raise ValueError(f"the entry points of {data['name']!r} are no list of strings")
        return cls(**{**data, "entry_points": tuple(points)})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "entry_points": list(self.entry_points)}


class Lockfile:
    """The rows of a lockfile, and what speaks against the distributions that were compared with them."""

    def __init__(self, path: str, rows: Iterable[Locked]) -> None:
        self.path = path
        self.rows = {normalized(row.name): row for row in rows}
        self.verdicts: dict[Provider, str | None] = {}

    def __str__(self) -> str:
        """Tell by a digest what it holds, in whichever order."""
        rows = [self.rows[name].to_dict() for name in sorted(self.rows)]
        digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
        return f"one of {len(rows)} distributions with the SHA-256 {digest:.16}"

    def against(self, provider: Provider) -> str | None:
        """Say what tells a distribution from its row, or its files from its RECORD, or ``None``; compared once."""
        if provider not in self.verdicts:
            self.verdicts[provider] = self._against(provider)
        return self.verdicts[provider]

    def _against(self, provider: Provider) -> str | None:
        row = self.rows.get(normalized(provider.name))
        if row is None:
            return f"it is not in {self.path}: 'opgraft plugins lock' adds it, once you trust it"
        try:
            change = _change(row, as_installed(provider), self.path) or _damage(provider)
        except PluginError as error:
            change = str(error)
        return f"{change}: {_ANEW}" if change else None


_LOCKFILES = StateValue[dict[str, Lockfile]](dict)
"""By path, as they were read first, with what the installed distributions were compared with."""


def lockfile(path: str, origin: str) -> Lockfile:
    """Return the lockfile that a setting of that ``origin`` names, read once per process.

    Raises:
        ConfigError: it cannot be used.
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


def read_rows(path: str) -> list[Locked]:
    """Read a lockfile.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or is none.
    """
    content = json.loads(read_regular(path, _LARGEST), object_pairs_hook=without_duplicates)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"it holds no object of the schema {SCHEMA!r}")
    if content.keys() != {"schema", "distributions"} or not isinstance(
        content["distributions"], list
    ):
        raise ValueError("it holds other keys than 'schema' and a list of 'distributions'")
    rows = [Locked.from_dict(row) for row in content["distributions"]]
    names = [normalized(row.name) for row in rows]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"{twice!r} stands in it twice")
    return rows


def write_rows(path: Path, rows: Iterable[Locked]) -> None:
    """Write a lockfile in one step: a reader finds the former one or this one.

    Raises:
        InputError: it cannot be written.
    """
    content = {"schema": SCHEMA, "distributions": [row.to_dict() for row in rows]}
    try:
        replace_file(
            path, f"{json.dumps(content, indent=2)}\n", 0o644
        )  # a fleet's lockfile is for everyone
    except OSError as error:
        why = error.strerror or described(error)
        raise InputError(
            f"the lockfile {path} cannot be written: {why}: name another by --output"
        ) from error


def lock_installed(
    settings: Settings, *, allow_editable: bool
) -> tuple[list[Locked], list[Problem]]:
    """Return the rows of the distributions that the settings admit, and those that cannot be locked, with the reason.

    The lockfile that is set has no say: it may be the one to be renewed.
    """
    judged: dict[Provider, list[str | None]] = {}
    for offer in discover().offers:
        if not offer.built_in:
            judged.setdefault(offer.provider, []).append(unfit(offer, settings))
    rows, left_out = [], []
    for provider, against in judged.items():
        if None not in against:  # a list of the user is no fault
            left_out += [
                Problem(provider, why) for why in against[:1] if why and why.startswith(FAULTS)
            ]
            continue
        try:
            row = as_installed(provider)
            if row.editable and not allow_editable:
                raise PluginError(
                    f"it is an editable install, whose source can change: {ALLOW_EDITABLE} locks it"
                )
            damage = _damage(provider)
            if damage:
                raise PluginError(f"{damage}: reinstall it")
            rows.append(row)
        except PluginError as error:
            left_out.append(Problem(provider, str(error)))
    return sorted(rows, key=lambda row: normalized(row.name)), left_out


def as_installed(provider: Provider) -> Locked:
    """Describe an installed distribution by its metadata.

    Raises:
        PluginError: it cannot be read.
    """
    distribution = discover().distributions[provider]
    try:
        read = {offer.stands_in for offer in discover().offers if offer.provider == provider}
        points = [point for point in distribution.entry_points if point.group in read]
        digest = hashlib.sha256(_record(distribution).encode()).hexdigest()
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise PluginError(f"its metadata cannot be read: {described(error)}") from error
    offers = tuple(sorted(f"{point.group}: {point.name} = {point.value}" for point in points))
    return Locked(provider.name, str(provider.version), digest, is_editable(distribution), offers)


def _record(distribution: importlib_metadata.Distribution) -> str:
    text = text_of(distribution, "RECORD")
    if text is None:
        raise PluginError(
            "it has no RECORD that its files could be compared with, as pip and its like write one"
        )
    return text


def _change(row: Locked, found: Locked, path: str) -> str | None:
    """Say what tells an installed distribution from its row."""
    if found.version != row.version:
        return f"its version is {found.version}, {path} has {row.version}"
    if found.editable != row.editable:
        return f"it is {'an' if found.editable else 'no longer an'} editable install"
    if found.entry_points != row.entry_points:
        new = [f"new: {point}" for point in found.entry_points if point not in row.entry_points]
        gone = [f"gone: {point}" for point in row.entry_points if point not in found.entry_points]
        return f"its entry points have changed ({', '.join(new + gone)})"
    if found.record != row.record:
        return f"its RECORD has changed: its SHA-256 is {found.record:.12}…, {path} has {row.record:.12}…"
    return None


def _damage(provider: Provider) -> str | None:
    """Say which file of a distribution is not the one that its RECORD lists, or would not be imported from there.

    Raises:
        PluginError: the RECORD is malformed.
    """
    distribution = discover().distributions[provider]
    try:
        rows = rows_of(_record(distribution))
    except (csv.Error, ValueError) as error:
        raise PluginError(f"its RECORD is malformed: {described(error)}") from error
    hashed = [row for row in rows if row[1]]  # RECORD itself and compiled bytecode have none
    changes = (difference(Path(str(distribution.locate_file(row[0]))), *row) for row in hashed)
    change = next(filter(None, changes), None)
    if change or is_editable(distribution):
        return change
    return _stray(provider, distribution, {row[0] for row in hashed})


def _stray(
    provider: Provider, distribution: importlib_metadata.Distribution, listed: set[str]
) -> str | None:
    """Say which module would be imported that RECORD does not list: one earlier on the path, or put into a package."""
    root = os.path.abspath(str(distribution.locate_file("")))
    files = {os.path.normpath(os.path.join(root, path)) for path in listed}
    for offer in discover().offers:
        if offer.provider == provider:
            found = list(_files_of(offer.module)) or ["elsewhere"]
            stray = next((file for file in found if file not in files), None)
            if stray:
                return f"its module {offer.module} would be imported from {stray}, which its RECORD does not list"
    for module in sorted(set(_outermost(listed))):
        stray = next((file for file in _files_of(module) if file not in files), None)
        if stray:
            return f"its module {module} would be imported from {stray}, which its RECORD does not list"
    tops = {
        offer.module.partition(".")[0] for offer in discover().offers if offer.provider == provider
    }
    own = {
        os.path.dirname(file) for file in files if os.path.basename(file).startswith("__init__.")
    }
    names = {_imported_as(file) for file in files if file.endswith(_SUFFIXES)}
    for file in _added(root, files):
        hides = file.endswith(_SUFFIXES) and _imported_as(file) in names
        if hides or not _is_anothers(file, root, own, tops):
            return f"{file} lies in a package of its own, and its RECORD does not list it"
    return None


def _outermost(listed: Iterable[str]) -> Iterator[str]:
    """Yield modules and packages in no other package of the distribution, so that others may bring their names too."""
    modules = [path for path in listed if path.endswith(_SUFFIXES)]
    packages = {
        folder
        for folder, _, name in (path.rpartition("/") for path in modules)
        if _stem(name) == "__init__"
    }
    for path in modules:
        parents = ("/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 1))
        found = next((each for each in parents if each in packages), path.rpartition(".")[0])
        name = ".".join(map(_stem, found.split("/")))
        if all(map(str.isidentifier, name.split("."))):
            yield name


def _stem(name: str) -> str:
    """Return what a file is imported as: its name without any suffix."""
    return name.partition(".")[0]


def _imported_as(file: str) -> str:
    """Return the path of a module without its suffixes, of a package that of its folder: one of them hides others."""
    folder, name = os.path.split(file)
    return folder if _stem(name) == "__init__" else os.path.join(folder, _stem(name))


def _is_anothers(file: str, root: str, own: Collection[str], tops: Collection[str]) -> bool:
    """Tell whether a module is another distribution's, by its RECORD, in a folder that both have.

    That is one without a module of its own, as vendors divide among distributions, or one that no plugin is in, such as
    the ``tests`` that many install by mistake.
    """
    path = os.path.relpath(file, root)
    if path.partition(os.sep)[0] in tops and any(
        file.startswith(f"{folder}{os.sep}") for folder in own
    ):
        return False
    for found in distributions():
        with suppress(ValueError, OSError, csv.Error):
            text = "" if isinstance(found, Problem) else text_of(found, "RECORD") or ""
            rows = (
                [row for row in csv.reader(text.splitlines()) if row[:1] == [path]]
                if path in text
                else []
            )
            if any(row[1] and difference(Path(file), *row) is None for row in rows):
                return True
    return False


def _added(root: str, listed: set[str]) -> Iterator[str]:
    """Yield code below the packages of a distribution that is not listed, which may come before what is."""
    packages = {
        os.path.dirname(file)
        for file in listed
        if _is_code(file) and file.startswith(root + os.sep)
    }
    packages.discard(root)  # where others lie too
    for package in sorted(packages):
        for folder, folders, names in os.walk(package):
            # Into a link to a folder, which no wheel has, nothing goes here, and imports do.
            yield from (
                os.path.join(folder, each)
                for each in folders
                if os.path.islink(os.path.join(folder, each))
            )
            folders[:] = [each for each in folders if os.path.join(folder, each) not in packages]
            if os.path.basename(folder) != "__pycache__":
                files = (os.path.join(folder, name) for name in names if _is_code(name))
                yield from (file for file in files if file not in listed)


def _is_code(name: str) -> bool:
    return name.endswith(_SUFFIXES) or _LIBRARY.search(name) is not None


def _files_of(module: str) -> Iterator[str]:
    """Yield the files that the import of a module would run, those of packages above it first."""
    for spec in specs_of(module):
        if spec.has_location and spec.origin is not None:
            yield os.path.abspath(spec.origin)
        elif not is_namespace(spec):
            yield f"{spec.origin or type(spec.loader).__qualname__}, which is no file"
