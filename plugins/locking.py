"""Lockfiles: the distributions whose plugins may be imported, as they were when they were locked.

A distribution is compared with its row, and its files with the hashes of its RECORD, before any
import. So are its dependencies.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from importlib_metadata import Distribution
from opgraft.base.files import read_regular
from opgraft.base.text import described
from opgraft.config.declaration import without_duplicates
from opgraft.config.plugin_settings import SETTINGS_GROUP
from opgraft.errors import ConfigError, PluginError
from opgraft.plugins.discovery import discover, is_editable, normalized
from opgraft.plugins.metadata import (
    Problem,
    distributions,
    fields_of,
    is_stray,
    place_of,
    text_of,
)
from opgraft.plugins.namesakes import installed_among
from opgraft.plugins.pylock import is_pylock, read_pylock
from opgraft.plugins.records import (
    difference,
    digest_of_wheel,
    files_to_compare,
    is_misplaced,
    places_of,
    rows_of,
)
from opgraft.plugins.stray import stray_code
from opgraft.registry.decision import Provider
from opgraft.registry.state import StateValue

SCHEMA = "opgraft.lock/2"
LARGEST = 1 << 24
"""Bytes of a lockfile."""
SIGNER = ("issuer", "source", "build")
"""Keys of an identity: who vouches for the signer, the repository and the workflow."""

_TEXTS = ("name", "version", "files")
_LISTS = ("entry_points", "dependencies")
ALLOW_EDITABLE = "--allow-editable"
_ANEW = "look at it and lock it anew by 'opgraft plugins lock{}'"


class LockedPackage(NamedTuple):
    """A distribution as it is installed, or was when it was locked.

    Attributes:
        name, version: of the distribution.
        files: SHA-256 of the names and hashes of the files of the wheel, in hexadecimal, equal for
            every installer and every place.
        editable: True for an editable install. No RECORD lists the source.
        entry_points: the offers to opgraft, each ``group: name = value``, sorted.
        dependencies: for a distribution with offers, the normalized names of all dependencies,
            without those of opgraft. A name without a row was not installed.
        identity: the signer of the wheel, with the attestation, if asked for. No start reads this.
    """

    name: str
    version: str
    files: str
    editable: bool
    entry_points: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()
    identity: Mapping[str, str] | None = None

    @classmethod
    def from_dict(cls, data: Any) -> LockedPackage:
        """Return the row of plain data from ``to_dict``.

        Raises:
            ValueError: the data is no row.
        """
        if not _is_row(data):
            raise ValueError(f"{data!r:.100} is no row of a distribution")
        for key in _LISTS:
            if not isinstance(data[key], list) or not _are_texts(data[key]):
                words = key.replace("_", " ")
                raise ValueError(f"the {words} of {data['name']!r} are no list of strings")
        return cls(**{**data, **{key: tuple(data[key]) for key in _LISTS}})

    def to_dict(self) -> dict[str, Any]:
        row = {**self._asdict(), **{key: list(getattr(self, key)) for key in _LISTS}}
        if self.identity is None:
            del row["identity"]
        return row


def _is_row(data: Any) -> bool:
    """Return True if data has the keys and types of a row, the lists aside."""
    if not isinstance(data, dict):
        return False
    if "identity" in data and not _is_identity(data["identity"]):
        return False
    if data.keys() - {"identity"} != {*_TEXTS, "editable", *_LISTS}:
        return False
    return _are_texts([data[key] for key in _TEXTS]) and isinstance(data["editable"], bool)


def _is_identity(value: Any) -> bool:
    is_named = isinstance(value, dict) and value.keys() >= {*SIGNER}
    return is_named and _are_texts(value.values())


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


class Lockfile:
    """The rows of a lockfile, and the verdicts about installed distributions."""

    def __init__(self, path: str, rows: Iterable[LockedPackage]) -> None:
        self.path = path
        self.rows = {normalized(row.name): row for row in rows}
        self.verdicts: dict[str, str | None] = {}

    def __str__(self) -> str:
        """Return the number of rows, and a digest for any order."""
        # Two lockfiles with equal rows are one to workers, wherever the files lie.
        rows = [self.rows[name].to_dict() for name in sorted(self.rows)]
        text = json.dumps(rows, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"one of {len(rows)} distributions with the SHA-256 {digest:.16}"

    def against(self, provider: Provider) -> str | None:
        """Return the difference of a distribution from its row or RECORD, or ``None``.

        Its dependencies are compared, too.
        """
        row = self.rows.get(normalized(provider.name))
        if row is None:
            return (
                f"it is not in {self.path}: 'opgraft plugins lock' adds it once you trust it, or "
                "says what is in the way"
            )
        change = self._against(row, discover().distributions[provider])
        for name in row.dependencies:
            if change is None:
                change = self._against_dependency(name)
        return change

    def _against_dependency(self, name: str) -> str | None:
        row, found = self.rows.get(name), installed(name)
        if row is None and found is None:
            return None
        if row is None or found is None:
            if found is None:
                return f"its dependency {name} is missing: install it"
            state = "was not installed when the plugin was locked"
            return f"its dependency {name} {state}: uninstall it, or {_ANEW.format('')}"
        change = self._against(row, found)
        return f"its dependency {name}: {change}" if change else None

    def _against(self, row: LockedPackage, found: Distribution) -> str | None:
        """Return the difference of an installed distribution from a row, and the next step.

        The answer is found once.
        """
        # Hashing the files takes time. Each offer asks, and each plugin that needs the same one.
        if row.name not in self.verdicts:
            try:
                now = as_installed(found)
                change, harm = change_of(row, now, self.path), damage(found)
                if change:
                    # What is damaged cannot be locked.
                    change = f"{change}: {harm or _steps_after_change(now)}"
                change = change or harm
            except PluginError as error:
                change = str(error)
            self.verdicts[row.name] = change
        return self.verdicts[row.name]


def _steps_after_change(found: LockedPackage) -> str:
    """Return the next steps if another distribution is installed than the locked one."""
    return f"reinstall it, or {_ANEW.format(f' {ALLOW_EDITABLE}' if found.editable else '')}"


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
            why = reason_of(error)
            raise ConfigError(
                f"the lockfile {path} ({origin}) cannot be used: {why}. Nothing is admitted "
                f"without it: write it by 'opgraft plugins lock --output {path}', or unset lockfile"
            ) from error
    return known[path]


def reason_of(error: Exception) -> str:
    """Return the words of an error of ``read_rows``, for a message."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def read_rows(path: str) -> list[LockedPackage]:
    """Read a lockfile, or the section of opgraft in a ``pylock.toml``.

    Raises:
        OSError, ValueError, RecursionError: the file cannot be read, or is no lockfile.
    """
    # The path comes from a setting, and may lead to a pipe or a huge file.
    text = read_regular(path, LARGEST)
    if is_pylock(path):
        return rows_in_pylock(text.decode())
    return _rows_in(json.loads(text, object_pairs_hook=without_duplicates))


def rows_in_pylock(text: str) -> list[LockedPackage]:
    """Return the rows in the section of opgraft of a ``pylock.toml``.

    Raises:
        ValueError: the text is none, or a row has another version than the package of its name.
    """
    from packaging.utils import canonicalize_version  # few lockfiles are of this kind

    section, versions = read_pylock(text)
    rows = _rows_in(section)
    for row in rows:
        locked = versions.get(normalized(row.name), {row.version})
        if canonicalize_version(row.version) not in map(canonicalize_version, locked):
            raise ValueError(
                f"[tool.opgraft] has {row.name} {row.version}, its packages have "
                f"{' and '.join(sorted(locked))}"
            )
    return rows


def _rows_in(content: Any) -> list[LockedPackage]:
    """Return the rows of a lockfile's content.

    Raises:
        ValueError: the content is none of a lockfile.
    """
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


def installed(name: str) -> Distribution | None:
    """Return the installed distribution of a name: the first one on ``sys.path``."""
    found = [each for each in distributions(name) if not isinstance(each, Problem)]
    found = [each for each in found if not is_stray(each)]
    if not found:
        return None
    places = {place_of(each): each for each in found}
    folder = getattr(place_of(found[0]), "parent", None)
    # A broken upgrade leaves the metadata of the former version in the folder.
    several = [each for place, each in places.items() if place and place.parent == folder]
    if len(several) > 1:
        # Metadata that cannot be read is a problem of its own.
        with suppress(ValueError, OSError):
            return several[installed_among(several)[0]]
    return found[0]


def as_installed(distribution: Distribution) -> LockedPackage:
    """Return the row of an installed distribution, without its dependencies.

    Raises:
        PluginError: the metadata cannot be read.
    """
    try:
        provider = provider_of(distribution)
        read = {offer.stands_in for offer in discover().offers if offer.provider == provider}
        if provider in discover().sections:
            read.add(SETTINGS_GROUP)
        # Groups of other hosts may change without harm.
        points = [point for point in distribution.entry_points if point.group in read]
        files = digest_of_wheel(_record_rows(distribution))
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise PluginError(f"its metadata cannot be read: {described(error)}") from error
    offers = sorted(f"{point.group}: {point.name} = {point.value}" for point in points)
    version, editable = str(provider.version), is_editable(distribution)
    return LockedPackage(provider.name, version, files, editable, tuple(offers))


def provider_of(distribution: Distribution) -> Provider:
    """Return the name and version of an installed distribution.

    Raises:
        ValueError, OSError: the metadata cannot be read.
    """
    fields = fields_of(distribution)
    return Provider(fields["name"][0], fields["version"][0])


def _record_rows(distribution: Distribution) -> Sequence[tuple[str, str, str]]:
    """Return the rows of the RECORD of a distribution.

    Raises:
        PluginError: there is no RECORD, or the RECORD is malformed.
        ValueError, OSError: the RECORD cannot be read.
    """
    text = text_of(distribution, "RECORD")
    if text is None:
        raise PluginError(
            "it has no RECORD that its files could be compared with, as pip and its like write "
            f"one: {_way_to_record(distribution)}"
        )
    try:
        rows = rows_of(text)
    except (csv.Error, ValueError) as error:
        again = _reinstall(distribution)
        raise PluginError(f"its RECORD is malformed: {described(error)}: {again}") from error
    root = _root_of(distribution)
    for path, digest, _ in rows:
        if digest and is_misplaced(path, root):
            raise PluginError(
                f"its RECORD is malformed: no installer would spell the path {path!a}: "
                f"{_reinstall(distribution)}"
            )
    return rows


def _reinstall(distribution: Distribution) -> str:
    """Return the next step for a distribution whose files are not those of its wheel."""
    name, version = distribution.name, distribution.version
    return (
        "reinstall it by your installer, for example by 'pip install --force-reinstall --no-deps "
        f"{name}=={version}'"
    )


def _way_to_record(distribution: Distribution) -> str:
    """Return the next step for a distribution without a RECORD."""
    place = place_of(distribution)
    for other in distributions(distribution.name):
        if isinstance(other, Problem) or place_of(other) == place or place is None:
            continue
        if text_of(other, "RECORD") is not None:
            return (
                f"remove {place}, which hides the installation in {other.locate_file('')}, or take "
                f"{place.parent} off sys.path (see PYTHONPATH)"
            )
    return "install it by pip or uv"


def _root_of(distribution: Distribution) -> str:
    """Return the folder of modules that the paths in RECORD begin at."""
    return os.path.abspath(str(distribution.locate_file("")))


def change_of(row: LockedPackage, found: LockedPackage, path: str) -> str | None:
    """Return the difference of an installed distribution from its row, or ``None``."""
    if found.version != row.version:
        return f"its version is {found.version}, {path} has {row.version}"
    # The source of an editable install is compared with nothing.
    if found.editable != row.editable:
        return f"it is {'an' if found.editable else 'no longer an'} editable install"
    if found.entry_points != row.entry_points:
        points = new_and_gone(row.entry_points, found.entry_points)
        return f"its entry points have changed ({points})"
    if found.files != row.files:
        return (
            "its RECORD lists other files or hashes: the SHA-256 of the list is "
            f"{found.files:.12}…, {path} has {row.files:.12}…"
        )
    return None


def new_and_gone(before: Sequence[str], after: Sequence[str]) -> str:
    """Return words for the difference of two lists; empty if there is none."""
    new = [f"new: {each}" for each in after if each not in before]
    gone = [f"gone: {each}" for each in before if each not in after]
    return ", ".join(new + gone)


def hashed_files(distribution: Distribution) -> list[str]:
    """Return the paths in the RECORD of a distribution that have a hash.

    Raises:
        PluginError: there is no RECORD, or the RECORD is malformed.
        ValueError, OSError: the RECORD cannot be read.
    """
    return [path for path, digest, _ in _record_rows(distribution) if digest]


def damage(distribution: Distribution) -> str | None:
    """Return a difference of the files of a distribution from its RECORD, or ``None``.

    The sentence ends with the next step.

    Raises:
        PluginError: the RECORD is malformed.
    """
    # RECORD itself and compiled bytecode have no hash.
    hashed = [row for row in _record_rows(distribution) if row[1]]
    places = places_of(path for path, _, _ in hashed)
    root = _root_of(distribution)
    for path, digest, size in hashed:
        for file in files_to_compare(path, root) if path in places else ():
            change = difference(file, path, digest, size)
            if change is not None:
                return f"{change}: {_reinstall(distribution)}"
    if is_editable(distribution):
        return None
    return stray_code(provider_of(distribution), distribution, places)
