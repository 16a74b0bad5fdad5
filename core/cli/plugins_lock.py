"""``opgraft plugins lock``: record installed distributions. Imports no torch and no plugin."""

from __future__ import annotations

import sys
from pathlib import Path

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
from opgraft.config.environment import LOCKFILE
from opgraft.plugins.locking import ALLOW_EDITABLE, lock_installed, write_rows
from opgraft.plugins.requirements import check_allow_list
from opgraft.registry.state import host_state

_FILE = GivenPath(dir_okay=False)


@click.command("lock", cls=SettingsCommand)
@click.option(
    "--output",
    metavar="FILE",
    type=_FILE,
    default="opgraft.lock",
    show_default=True,
    help="The lockfile.",
)
@click.option(
    ALLOW_EDITABLE, is_flag=True, help="Lock editable installs too, whose source is not compared."
)
@json_option
@with_settings
def command(output: str, allow_editable: bool, as_json: bool) -> None:
    """Write down what is installed, so that nothing else is imported.

    The file has the version, the entry points and a hash of the RECORD of every distribution with
    admitted platforms or plugins. The setting lockfile makes the file count. No distribution is
    imported. Exit code 1: a distribution cannot be locked, and is left out.
    """
    settings = host_state().settings()
    check_allow_list(settings)
    rows, left_out = lock_installed(settings, allow_editable=allow_editable)
    write_rows(Path(output), rows)
    if as_json:
        data = {
            "file": output,
            "distributions": [row.to_dict() for row in rows],
            "left_out": as_dicts(left_out),
        }
        print_json("opgraft.plugins.lock/1", data)
    else:
        for row in rows:
            mark = " (editable)" if row.editable else ""
            print_wrapped(f"locked: {row.name} {row.version}{mark}: {'; '.join(row.entry_points)}")
        for problem in left_out:
            print_wrapped(f"left out: {problem.provider}: {problem.reason}")
        print_wrapped(f"written to {output}: with {LOCKFILE}={output} nothing else is imported")
    sys.exit(1 if left_out else 0)
