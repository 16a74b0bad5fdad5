"""``opgraft new``: a plugin to begin with. Imports no torch and no plugin."""

from __future__ import annotations

import re
from pathlib import Path

import click
from opgraft.cli.output import json_option, print_json, print_wrapped
from opgraft.errors import InputError
from opgraft.plugins.discovery import discover

_TEMPLATE = Path(__file__).resolve().parents[1] / "template"  # links, as of editable installs, copier refuses
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@click.command("new")
@click.argument("name")
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    show_default=True,
    help="The folder that gets the plugin's.",
)
@json_option
def command(name: str, output: Path, as_json: bool) -> None:
    """Make the folder opgraft-NAME with a plugin: a platform, two kernels, tests, CI.

    NAME is that of a device or a collection of kernels, such as acme-x1. The plugin works before a line is changed, on
    a simulated device.
    """
    folder = output / f"opgraft-{_named(name).replace('_', '-')}"
    if folder.exists():
        raise InputError(f"{folder} is there already: remove it, or choose another name or --output")
    files = _render(name, folder)
    if as_json:
        print_json("opgraft.new/1", {"folder": str(folder), "files": files})
        return
    print_wrapped(f"written: {folder} ({len(files)} files)")
    print_wrapped(f"next: cd {folder} && pip install -e '.[test]' && pytest --opgraft-brief")


def _named(name: str) -> str:
    """Check the name of a plugin.

    Raises:
        InputError: it cannot be the name of a distribution and a platform, or is taken.
    """
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise InputError(
            f"{name!r} cannot be the name of a plugin: use up to 40 lower-case letters and digits, with single hyphens "
            "between words, such as acme-x1"
        )
    taken = {offer.name for offer in discover().offers}
    if name.replace("-", "_") in taken:
        raise InputError(f"an installed platform or plugin is called {name.replace('-', '_')!r}: choose another name")
    return name


def _render(name: str, folder: Path) -> list[str]:
    """Write the files of a plugin and return their paths below the folder.

    Raises:
        InputError: copier is not installed, or the folder cannot be written.
    """
    try:
        import copier  # which takes as long to import as everything else here
    except ImportError as error:
        raise InputError(f"a plugin cannot be made ({error}): pip install 'opgraft[new]'") from error
    try:
        copier.run_copy(str(_TEMPLATE), folder, data={"name": name}, defaults=True, quiet=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
