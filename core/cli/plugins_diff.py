"""``opgraft plugins diff``: what has changed since a lockfile. Imports no torch and no plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click
from opgraft.cli.offers import as_dicts
from opgraft.cli.output import (
    GivenPath,
    SettingsCommand,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.errors import InputError
from opgraft.plugins.attestations import Attestations
from opgraft.plugins.discovery import normalized
from opgraft.plugins.locking import LockedPackage, Lockfile, read_rows, reason_of
from opgraft.plugins.making_locks import changes, lock_installed
from opgraft.plugins.metadata import Problem
from opgraft.registry.state import host_state

LOCKFILE = "opgraft.lock"
"""The lockfile, if nothing names another."""

_FILE = GivenPath(dir_okay=False)


@click.command("diff", cls=SettingsCommand)
@click.argument("file", required=False, type=_FILE)
@click.argument("other", required=False, type=_FILE)
@json_option
@with_settings
def command(file: str | None, other: str | None, as_json: bool) -> None:
    """Show what has changed since a lockfile was written.

    FILE is the lockfile, by default that of the settings, or opgraft.lock. It is compared with what
    is installed, or with the lockfile OTHER. No distribution is imported. Exit code 1: something
    differs.
    """
    path = file or host_state().settings().config.lockfile or LOCKFILE
    if other is None:
        found = changes_since(path, allow_editable=True)
    else:
        found = changes(_rows_in(path), _rows_in(other), (), path, signers=True)
    end_with(found, path, as_json)


def changes_since(
    path: str,
    *,
    allow_editable: bool,
    signers: bool = False,
    attestations: Attestations | None = None,
) -> list[Problem]:
    """Return the differences of what is installed from a lockfile.

    Args:
        path: of the lockfile.
        allow_editable: editable installs are no difference.
        signers: compare the signers of wheels, too.
        attestations: who has signed the installed wheels.

    Raises:
        InputError: the lockfile cannot be read.
    """
    before = _rows_in(path)
    settings = host_state().settings()
    rows, left_out = lock_installed(
        settings, allow_editable=allow_editable, attestations=attestations
    )
    # Spellings of one name differ between metadata and lockfiles, as in Foo_Bar and foo-bar.
    after = {normalized(row.name): row for row in rows}
    return changes(before, after, left_out, path, signers=signers)


def _rows_in(path: str) -> dict[str, LockedPackage]:
    """Return the rows of a lockfile by normalized name.

    Raises:
        InputError: the lockfile cannot be read.
    """
    try:
        return Lockfile(path, read_rows(path)).rows
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"the lockfile {path} cannot be compared: {reason_of(error)}. Name another, or write "
            f"it by 'opgraft plugins lock --output {path}'"
        ) from error


def end_with(found: Sequence[Problem], path: str, as_json: bool) -> NoReturn:
    """Print differences from a lockfile, and end the command: with exit code 1 if there are any."""
    if as_json:
        print_json("opgraft.plugins.diff/1", {"file": path, "changes": as_dicts(found)})
    else:
        for change in found:
            print_wrapped(f"changed: {change.provider}: {change.reason}")
        if not found:
            print_wrapped(f"nothing differs from {path}")
    sys.exit(1 if found else 0)
