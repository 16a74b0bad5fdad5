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
from opgraft.cli.plugins_diff import LOCKFILE as DEFAULT
from opgraft.cli.plugins_diff import changes_since, end_with
from opgraft.config.environment import LOCKFILE
from opgraft.plugins.making_locks import ALLOW_EDITABLE, lock_installed, write_rows
from opgraft.plugins.requirements import check_allow_list
from opgraft.registry.state import host_state

_FILE = GivenPath(dir_okay=False)


@click.command("lock", cls=SettingsCommand)
@click.option(
    "--output",
    metavar="FILE",
    type=_FILE,
    default=DEFAULT,
    show_default=True,
    help="The lockfile, or a pylock.toml that gets a section [tool.opgraft].",
)
@click.option(
    ALLOW_EDITABLE, is_flag=True, help="Lock editable installs too, whose source is not compared."
)
@click.option("--check", is_flag=True, help="Write nothing; say what would change in the file.")
@json_option
@with_settings
def command(output: str, allow_editable: bool, check: bool, as_json: bool) -> None:
    """Write down what is installed, so that nothing else is imported.

    The file has the version, the entry points and a hash of the files of every distribution with
    admitted platforms or plugins, and of the distributions that they need. The setting lockfile
    makes the file count. No distribution is imported. Exit code 1: a distribution cannot be locked,
    and is left out; with --check, the file would change.
    """
    settings = host_state().settings()
    check_allow_list(settings)
    if check:
        end_with(changes_since(output, allow_editable=allow_editable), output, as_json)
    rows, left_out = lock_installed(settings, allow_editable=allow_editable)
    write_rows(Path(output), rows)
    if as_json:
        data = {
            "file": output,
            "distributions": [row.to_dict() for row in rows],
            "left_out": as_dicts(left_out),
        }
        print_json("opgraft.plugins.lock/2", data)
    else:
        for row in rows:
            mark = " (editable)" if row.editable else ""
            offers = "; ".join(row.entry_points) or "needed by plugins"
            print_wrapped(f"locked: {row.name} {row.version}{mark}: {offers}")
        for problem in left_out:
            print_wrapped(f"left out: {problem.provider}: {problem.reason}")
        print_wrapped(f"written to {output}: with {LOCKFILE}={output} nothing else is imported")
    sys.exit(1 if left_out else 0)
