"""``opgraft new``: a plugin to begin with, or a port. Imports no torch."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import click
from opgraft.base.installed import source_of
from opgraft.base.text import described
from opgraft.cli.offers import shown_offers
from opgraft.cli.output import GivenPath, json_option, print_json, print_wrapped
from opgraft.config import NATIVE_CHOICE
from opgraft.errors import InputError, PluginError
from opgraft.plugins.admission import objection
from opgraft.plugins.bridges import Ported
from opgraft.plugins.discovery import HOST_DISTRIBUTION, PORTERS, discover
from opgraft.registry.declarations import ANY_PLATFORM
from opgraft.registry.state import host_state

# Resolved, because copier refuses links, such as those of editable installs.
_TEMPLATE = Path(__file__).resolve().parents[1] / "template"
_URL = re.compile(r"(opgraft\s*@\s*)?[a-z][a-z0-9+.-]*://\S+$")
_ARCHIVES = (".whl", ".gz", ".zip")
_RESERVED = (NATIVE_CHOICE, HOST_DISTRIBUTION, ANY_PLATFORM)
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@click.command("new")
@click.argument("name", required=False)
@click.option(
    "--from-vllm",
    "from_vllm",
    metavar="PATH",
    type=GivenPath(path_type=Path),
    help="Port the vLLM device plugin in that folder, in place of a new one; none of it is run.",
)
@click.option(
    "--output",
    metavar="DIR",
    type=GivenPath(file_okay=False, path_type=Path),
    default=".",
    show_default=True,
    help="The folder that gets the plugin's.",
)
@click.option(
    "--opgraft",
    "source",
    metavar="SOURCE",
    help="A URL or a path from which README and CI of the plugin install opgraft. "
    "[default: where this opgraft was installed from]",
)
@json_option
def command(
    name: str | None,
    from_vllm: Path | None,
    output: Path,
    source: str | None,
    as_json: bool,
) -> None:
    """Make the folder opgraft-NAME with a plugin: a platform, two kernels, tests, CI.

    NAME is the name of a device or of a collection of kernels, such as acme-x1. The plugin works
    before a line is changed, on a simulated device. By default, a port of a vLLM plugin has the
    name of the plugin's entry point.
    """
    if from_vllm is not None:
        if source is not None:
            raise click.UsageError("--opgraft is for a new plugin: leave it out with --from-vllm")
        _port(from_vllm, name, output, as_json)
        return
    if name is None:
        raise click.UsageError(
            "a new plugin needs a NAME; one of vLLM is ported by --from-vllm PATH"
        )
    folder = _folder(output, _checked_name(name))
    source = source_of("opgraft") if source is None else _checked(source)
    files = _render(name, folder, source)
    if as_json:
        print_json("opgraft.new/1", {"folder": str(folder), "files": files})
        return
    print_wrapped(f"written: {folder} ({len(files)} files)")
    print_wrapped(f"next: cd {folder} && pip install -e '.[test]' && pytest --opgraft-brief")
    if os.path.isabs(source):
        print_wrapped(
            f"its CI installs opgraft from {source}, which only this machine can read: set OPGRAFT "
            f"in .github/workflows/ci.yml to a URL, or give --opgraft URL"
        )


def _checked(source: str) -> str:
    """Return a source for pip: the given URL, or the whole path of a folder or an archive.

    Raises:
        InputError: the path has no distribution.
    """
    if _URL.match(source):
        return source
    path = Path(source).expanduser().absolute()
    if (path / "pyproject.toml").is_file() or (path.is_file() and path.suffix in _ARCHIVES):
        return str(path)
    raise InputError(
        f"--opgraft {source!r} is neither a URL nor a folder with a pyproject.toml nor an archive: "
        "give a checkout of opgraft, a wheel, or a URL such as git+https://host/opgraft.git"
    )


def _folder(output: Path, name: str) -> Path:
    folder = output / f"opgraft-{name.replace('_', '-')}"
    if folder.exists():
        raise InputError(
            f"{folder} is there already: remove it, or choose another name or --output"
        )
    return folder


def _port(path: Path, name: str | None, output: Path, as_json: bool) -> None:
    """Port a plugin of vLLM, and list the parts without a counterpart."""
    ported = _porter()(path)
    folder = _folder(output, _spelled(name or ported.name))
    if folder.resolve().is_relative_to(path.resolve()):
        raise InputError(f"{folder} lies in the plugin that is read: choose another --output")
    try:
        _write(ported.files, path, folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    if as_json:
        data = {
            "folder": str(folder),
            "files": sorted(ported.files),
            "uncovered": [vars(one) for one in ported.uncovered],
        }
        print_json("opgraft.new/1", data)
        return
    print_wrapped(f"written: {folder} ({len(ported.files)} files)")
    if ported.uncovered:
        print_wrapped(
            f"without a counterpart in opgraft ({len(ported.uncovered)}), code marked by a comment:"
        )
    for one in ported.uncovered:
        print_wrapped(f"  {one}")
    print_wrapped(
        f"next: read {folder / ported.guide}; cd {folder} && pip install -e . && opgraft plugins "
        "doctor"
    )


def _porter() -> Callable[[Path], Ported]:
    """Return the function of the installed bridge that rewrites plugins of vLLM.

    Raises:
        InputError: no bridge is installed, or a setting rejects the bridge.
        PluginError: the bridge cannot be imported.
    """
    offer = next((each for each in discover().of_group(PORTERS) if each.name == "vllm"), None)
    if offer is None:
        raise InputError(
            "a plugin of vLLM is ported by opgraft-vllm-bridge, which is not installed: "
            "pip install './reference_plugins/opgraft-vllm-bridge[port]' in a checkout of opgraft"
        )
    against = objection(offer, host_state().settings())
    if against:
        raise InputError(f"{offer.provider}, which ports plugins of vLLM, is not used: {against}")
    try:
        porter: Callable[[Path], Ported] = offer.load()
    # The module of a bridge may raise any error.
    except Exception as error:
        reason = f"{offer.value} of {offer.provider} cannot be loaded: {described(error)}"
        raise PluginError(f"{reason}: install it anew") from error
    return porter


def _write(files: Mapping[str, bytes], origin: Path, folder: Path) -> None:
    """Write all files or none, with the modes of their originals."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename is one step only within one file system.
    with tempfile.TemporaryDirectory(prefix=".opgraft-", dir=folder.parent) as beside:
        made = Path(beside, folder.name)
        for file, content in files.items():
            target = made / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            # New files of the port have no original.
            with suppress(FileNotFoundError):
                target.chmod((origin / file).stat().st_mode & 0o777)
        made.replace(folder)


def _checked_name(name: str) -> str:
    """Check the name of a plugin.

    Raises:
        InputError: the name is in use, or cannot be the name of a distribution and a platform.
    """
    taken = {offer.name for offer in shown_offers()}
    own = _spelled(name).replace("-", "_")
    if own in _RESERVED:
        raise InputError(f"{own!r} has a meaning of its own in settings: choose another name")
    if own in taken:
        raise InputError(f"an installed platform or plugin is called {own!r}: choose another name")
    return name


def _spelled(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise InputError(
            f"{name!r} cannot be the name of a plugin: use up to 40 lower-case letters and digits, "
            "with single hyphens between words, such as acme-x1"
        )
    return name


def _render(name: str, folder: Path, source: str) -> list[str]:
    """Write the files of a plugin.

    Args:
        name: of the plugin.
        folder: of the plugin.
        source: where README and CI of the plugin install opgraft from.

    Returns:
        The paths of the files below the folder.

    Raises:
        InputError: copier is not installed, or the folder cannot be written.
    """
    try:
        # The import takes as long as everything else here.
        import copier
    except ImportError as error:
        raise InputError(
            f"a plugin cannot be made ({error}): pip install 'opgraft[new]'"
        ) from error
    try:
        data = {"name": name, "source": source}
        copier.run_copy(str(_TEMPLATE), folder, data=data, defaults=True, quiet=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
