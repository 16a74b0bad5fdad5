"""``opgraft plugins lock``: record installed distributions. Imports no torch and no plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from opgraft.config.environment import LOCKFILE, PLUGINS_DISABLE
from opgraft.plugins.admission import quarantined
from opgraft.plugins.attestations import Attestations
from opgraft.plugins.locking import ALLOW_EDITABLE, LockedPackage
from opgraft.plugins.making_locks import lock_installed, lost_rows, write_rows
from opgraft.plugins.requirements import check_allow_list
from opgraft.registry.decision import Provider
from opgraft.registry.state import host_state

_FILE = GivenPath(dir_okay=False)
_PATH = GivenPath(dir_okay=False, path_type=Path)
_FOLDER = GivenPath(file_okay=False, path_type=Path)


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
@click.option(
    "--identity",
    metavar="DIR",
    type=_FOLDER,
    help="Keep the attestations of the wheels in DIR, each FILE.whl beside FILE.whl.provenance.",
)
@click.option(
    "--trust-root",
    metavar="FILE",
    type=_PATH,
    help="The root of trust of the attestations [default: that of Sigstore].",
)
@click.option("--check", is_flag=True, help="Write nothing; say what would change in the file.")
@json_option
@with_settings
def command(
    output: str,
    allow_editable: bool,
    identity: Path | None,
    trust_root: Path | None,
    check: bool,
    as_json: bool,
) -> None:
    """Write down what is installed, so that nothing else is imported.

    The file has the version, the entry points and a hash of the files of every distribution with
    admitted platforms or plugins, and of the distributions that they need. The setting lockfile
    makes the file count. No distribution is imported. Exit code 1: a distribution cannot be locked,
    and is left out; with --check, the file would change. The file stays as it is if it has a row
    for a distribution that cannot be locked now.
    """
    if trust_root is not None and identity is None:
        raise click.UsageError("--trust-root needs --identity DIR, the folder of attestations")
    settings = host_state().settings()
    check_allow_list(settings)
    attestations = Attestations(identity, trust_root) if identity else None
    if check:
        found = changes_since(
            output, allow_editable=allow_editable, signers=True, attestations=attestations
        )
        end_with(found, output, as_json)
    rows, left_out = lock_installed(
        settings, allow_editable=allow_editable, attestations=attestations
    )
    # A file with fewer rows would refuse plugins that work today.
    lost = lost_rows(Path(output), rows, left_out)
    if not lost:
        write_rows(Path(output), rows)
    if as_json:
        data = {
            "file": output,
            "written": not lost,
            "distributions": [row.to_dict() for row in rows],
            "left_out": as_dicts(left_out),
        }
        print_json("opgraft.plugins.lock/2", data)
    else:
        for row in rows:
            _print_row(row, "to lock" if lost else "locked", identity)
        for problem in left_out:
            print_wrapped(f"left out: {problem.provider}: {problem.reason}")
        print_wrapped(_end(output, lost))
    sys.exit(1 if left_out else 0)


def _print_row(row: LockedPackage, verb: str, identity: Path | None) -> None:
    """Print a row of a lockfile, with the signer and a quarantine.

    Args:
        row: of a distribution.
        verb: the beginning of the line.
        identity: the folder with attestations, if asked for.
    """
    mark = " (editable)" if row.editable else ""
    offers = "; ".join(row.entry_points) or "needed by plugins"
    print_wrapped(f"{verb}: {row.name} {row.version}{mark}: {offers}")
    against = quarantined(Provider(row.name, row.version)) if row.entry_points else None
    if against:
        print_wrapped(f"  no process imports it: {against}")
    if row.identity:
        signer = f"{row.identity['source']} ({row.identity['build']})"
        print_wrapped(f"  signed by {signer}, says {row.identity['issuer']}")
    elif identity:
        print_wrapped(f"  without an attestation: {identity} has no wheel of it")


def _end(output: str, lost: Sequence[str]) -> str:
    """Return the last line: whether the file was written, and the next step."""
    if not lost:
        return f"written to {output}: with {LOCKFILE}={output} nothing else is imported"
    names = " and ".join(lost)
    return (
        f"not written: {output} stays as it was, as it would lose {names}. Follow the reasons "
        f"above and lock again; or, to lock without {names}, uninstall it, or lock with "
        f"{PLUGINS_DISABLE}={','.join(lost)}"
    )
