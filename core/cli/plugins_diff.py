"""``opgraft plugins diff``: what has changed since a lockfile. Imports no torch and no plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click
from opgraft.cli.offers import as_dicts
from opgraft.cli.output import (
    COMMAND_LINE,
    GivenPath,
    SettingsCommand,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.plugins.attestations import Attestations
from opgraft.plugins.discovery import normalized
from opgraft.plugins.locking import LockedPackage, lockfile
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
        found = changes(_rows_in(path), _rows_in(other), (), path)
    end_with(found, path, as_json)


def changes_since(
    path: str, *, allow_editable: bool, attestations: Attestations | None = None
) -> list[Problem]:
    """Return the differences of what is installed from a lockfile.

    Raises:
        ConfigError: the lockfile cannot be used.
    """
    before = _rows_in(path)
    settings = host_state().settings()
    rows, left_out = lock_installed(
        settings, allow_editable=allow_editable, attestations=attestations
    )
    after = {normalized(row.name): row for row in rows}
    return changes(before, after, left_out, path)


def _rows_in(path: str) -> dict[str, LockedPackage]:
    return lockfile(path, COMMAND_LINE).rows


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
