"""The rows of a lockfile made from the installed distributions, and what differs from a file."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from importlib_metadata import Distribution
from opgraft.base.files import read_regular, replace_file
from opgraft.base.text import described
from opgraft.config import Settings
from opgraft.errors import InputError, PluginError
from opgraft.plugins.attestations import Attestations
from opgraft.plugins.discovery import HOST_DISTRIBUTION, discover, normalized
from opgraft.plugins.locking import (
    ALLOW_EDITABLE,
    LARGEST,
    SCHEMA,
    SIGNER,
    LockedPackage,
    as_installed,
    change_of,
    damage,
    installed,
    new_and_gone,
    read_rows,
    rows_in_pylock,
)
from opgraft.plugins.metadata import Problem, fields_of
from opgraft.plugins.pylock import is_pylock, with_section
from opgraft.plugins.requirements import FAULTS, unfit
from opgraft.registry.decision import Provider

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def write_rows(path: Path, rows: Iterable[LockedPackage]) -> None:
    """Write a lockfile in one step: a reader finds the former file or the new one.

    If the file is a ``pylock.toml``, only the section of opgraft changes.

    Raises:
        InputError: the file cannot be written.
    """
    content = {"schema": SCHEMA, "distributions": [row.to_dict() for row in rows]}
    try:
        if is_pylock(path.name):
            text = with_section(read_regular(path, LARGEST).decode(), content)
            # A row of another version than the package would admit nothing later.
            rows_in_pylock(text)
        else:
            text = f"{json.dumps(content, indent=2)}\n"
        replace_file(path, text, 0o644)  # a fleet's lockfile is for everyone
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise InputError(
            f"the lockfile {path} cannot be written: {why or described(error)}: name another by "
            "--output"
        ) from error


def lock_installed(
    settings: Settings, *, allow_editable: bool, attestations: Attestations | None = None
) -> tuple[list[LockedPackage], list[Problem]]:
    """Return the rows of admitted distributions and their dependencies, and what is left out.

    The lockfile of the settings has no say: somebody may be about to renew the file.
    """
    plugins: dict[str, LockedPackage] = {}
    needed: dict[str, LockedPackage] = {}
    left_out = []
    # What opgraft needs is imported before any plugin can be looked at.
    host = installed(HOST_DISTRIBUTION)
    trusted = {HOST_DISTRIBUTION, *(_needed_by(host, ()) if host else ())}
    for provider, reasons in _reasons_against(settings).items():
        if None in reasons:
            try:
                found = discover().distributions[provider]
                row = _row_to_lock(found, allow_editable, attestations)
                others = _needed_by(found, trusted)
                needed |= _rows_of_dependencies(others, trusted, allow_editable, attestations)
                row = row._replace(dependencies=tuple(sorted(others)))
                plugins[normalized(row.name)] = row
            except PluginError as error:
                left_out.append(Problem(provider, str(error)))
            continue
        first = reasons[0]
        # A list of the user is no fault.
        if first is not None and first.startswith(FAULTS):
            left_out.append(Problem(provider, first))
    # A plugin may need another plugin.
    rows = {**needed, **plugins}
    return [rows[name] for name in sorted(rows)], left_out


def lost_rows(path: Path, rows: Iterable[LockedPackage], left_out: Iterable[Problem]) -> list[str]:
    """Return the names in a lockfile that new rows lack, because they have been left out.

    Rows of what is not installed any more, or is on the deny list, are not lost but given up.
    """
    try:
        before = read_rows(str(path))
    except (OSError, ValueError, RecursionError):
        return []  # nothing can be lost of a file that admits nothing
    kept = {normalized(row.name) for row in rows}
    refused = {normalized(problem.provider.name) for problem in left_out} - kept
    return sorted(row.name for row in before if normalized(row.name) in refused)


def _reasons_against(settings: Settings) -> dict[Provider, list[str | None]]:
    """Return the reasons against the offers of each distribution, ``None`` for a used offer."""
    reasons: dict[Provider, list[str | None]] = {}
    for offer in discover().offers:
        if not offer.built_in:
            reasons.setdefault(offer.provider, []).append(unfit(offer, settings))
    return reasons


def _needed_by(
    distribution: Distribution, trusted: Collection[str]
) -> dict[str, Distribution | None]:
    """Return all dependencies of a distribution by normalized name, ``None`` if not installed.

    Args:
        distribution: the installed distribution.
        trusted: normalized names to leave out, with their dependencies.

    Raises:
        PluginError: a requirement cannot be read.
    """
    found: dict[str, Distribution | None] = {}
    # Each extra of a distribution has requirements of its own.
    waiting = [(distribution, "")]
    seen = set()
    for each, extra in waiting:
        for line in _requirements_of(each):
            try:
                requirement = _parsed(line)
                marker = requirement.marker
                applies = marker is None or marker.evaluate({"extra": extra})
            except (ValueError, LookupError) as error:
                is_own = each is distribution
                whose = "its requirement" if is_own else f"the requirement of {each.name}"
                raise PluginError(f"{whose} {line!r} is malformed: {error}") from error
            name = normalized(requirement.name)
            if not applies or name in trusted:
                continue
            if name not in found:
                found[name] = installed(name)
            other = found[name]
            for wanted in ("", *requirement.extras):
                if other is not None and (name, wanted) not in seen:
                    seen.add((name, wanted))
                    waiting.append((other, wanted))
    return found


# The command reads the same lines for each distribution that needs another one.
@functools.lru_cache(maxsize=4096)
def _parsed(line: str) -> Requirement:
    """Return a requirement. Do not modify it: the next caller gets the same object.

    Raises:
        ValueError: the line is malformed.
    """
    from packaging.requirements import Requirement  # starts do without

    return Requirement(line)


def _requirements_of(distribution: Distribution) -> list[str]:
    try:
        return fields_of(distribution).get("requires-dist", [])
    except (ValueError, OSError) as error:
        raise PluginError(f"its metadata cannot be read: {described(error)}") from error


def _rows_of_dependencies(
    others: Mapping[str, Distribution | None],
    trusted: Collection[str],
    allow_editable: bool,
    attestations: Attestations | None,
) -> dict[str, LockedPackage]:
    """Return the rows of installed dependencies by normalized name.

    Raises:
        PluginError: a dependency cannot be locked.
    """
    rows = {}
    for name, found in others.items():
        if found is not None:
            try:
                row = _row_to_lock(found, allow_editable, attestations)
                if row.entry_points:
                    # The lists may reject this plugin here, and admit it elsewhere.
                    its_own = sorted(_needed_by(found, trusted))
                    row = row._replace(dependencies=tuple(its_own))
                rows[name] = row
            except PluginError as error:
                raise PluginError(f"its dependency {name}: {error}") from error
    return rows


def _row_to_lock(
    distribution: Distribution, allow_editable: bool, attestations: Attestations | None
) -> LockedPackage:
    """Return the row of an installed distribution, without its dependencies.

    Raises:
        PluginError: the distribution cannot be locked.
    """
    row = as_installed(distribution)
    if row.editable and not allow_editable:
        raise PluginError(
            f"it is an editable install, whose source can change: {ALLOW_EDITABLE} locks it"
        )
    change = damage(distribution)
    if change:
        raise PluginError(change)
    if attestations is None:
        return row
    return row._replace(identity=attestations.identity_of(row.name, row.version, row.files))


def changes(
    before: Mapping[str, LockedPackage],
    after: Mapping[str, LockedPackage],
    left_out: Sequence[Problem],
    path: str,
    *,
    signers: bool,
) -> list[Problem]:
    """Return the differences of what is installed, or of another lockfile, from a lockfile.

    Args:
        before: the rows of the lockfile, by normalized name.
        after: the rows of the installed distributions, or of the other lockfile.
        left_out: distributions that cannot be locked now.
        path: of the lockfile.
        signers: compare the signers of wheels, too.
    """
    told = {normalized(problem.provider.name) for problem in left_out}
    for name in [*told]:
        # Rows of dependencies are made with that of the plugin.
        told |= set(before[name].dependencies) if name in before else set()
    found = [*left_out]
    for name in sorted({*before, *after} - told):
        was, now = before.get(name), after.get(name)
        if now is None:
            reason = "it is gone, nothing needs it any more, or the settings reject it"
        elif was is None:
            reason = f"it is not in {path}"
        else:
            reason = change_of(was, now, path) or _other_needs(was, now)
            if signers:
                reason = reason or _other_signer(was, now)
        row = now or was
        if row is not None and reason:
            found.append(Problem(Provider(row.name, row.version), reason))
    return found


def _other_needs(was: LockedPackage, now: LockedPackage) -> str:
    """Return the difference of the dependencies of two rows; empty if there is none."""
    names = new_and_gone(was.dependencies, now.dependencies)
    return f"its dependencies have changed ({names})" if names else ""


def _other_signer(was: LockedPackage, now: LockedPackage) -> str:
    """Return the difference of the signers of two rows; empty if there is none."""
    old, new = _signer(was), _signer(now)
    return f"its wheel was signed by {old}, and now is by {new}" if old != new else ""


def _signer(row: LockedPackage) -> str:
    """Return words for the signer of a row."""
    if row.identity is None:
        return "nobody known"
    issuer, source, build = (row.identity[key] for key in SIGNER)
    # Each release has a tag of its own. Another branch is another build.
    workflow, tag, _ = build.partition("@refs/tags/")
    return f"{source} ({workflow}{tag}), says {issuer}"
