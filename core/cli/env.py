"""``opgraft env``: facts for a bug report, as Markdown. Imports no torch and no plugin."""

from __future__ import annotations

import json
import os
import platform as host
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click
from opgraft.base.files import read_regular
from opgraft.base.installed import version_of
from opgraft.base.text import described, printable
from opgraft.base.version import __version__
from opgraft.cli.offers import KINDS, admission, shown_offers
from opgraft.cli.output import (
    GivenPath,
    SettingsCommand,
    echo,
    json_option,
    print_json,
    print_wrapped,
    with_settings,
)
from opgraft.config import resolve
from opgraft.config.environment import known_variables
from opgraft.errors import ConfigError, InputError, OpgraftError
from opgraft.machine.machine import Machine
from opgraft.machine.scrubbing import Scrubber
from opgraft.plugins.discovery import discover
from opgraft.plugins.selection import decide_without_torch
from opgraft.registry.state import host_state

_PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "safetensors",
    "pluggy",
    "importlib-metadata",
    "click",
)
_FURTHER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD")


SCHEMA = "opgraft.env/2"
_LARGEST = 1 << 24  # bytes of a former report


@click.command("env", cls=SettingsCommand)
@click.option(
    "--diff",
    "former",
    metavar="FILE",
    type=GivenPath(dir_okay=False),
    help="Show the differences from a former output of 'opgraft env --json' alone.",
)
@json_option
@with_settings
def command(former: str | None, as_json: bool) -> None:
    """Print versions, hardware, plugins and settings for a bug report.

    Nothing is imported, so the settings are without the defaults of the platform and of plugins.
    Only variables for opgraft are shown. Ids of devices, the name of the host and the home folder
    are replaced, as in a recording. Exit code 1: with --diff, something differs.
    """
    report = _bug_report()
    if former is not None:
        _end_with_changes(former, _changes(_read(former), report), as_json)
    if as_json:
        print_json(SCHEMA, {"sections": report})
        return
    for title, rows in report.items():
        echo(f"### {title}\n")
        echo("| | |\n|---|---|" if rows else "(none)")
        for name, value in rows.items():
            echo(f"| {_cell(name)} | {_cell(value)} |")
        echo()


def _read(path: str) -> dict[str, dict[str, str]]:
    """Return the sections of a former report.

    Raises:
        InputError: the file is none.
    """
    try:
        content = json.loads(read_regular(path, _LARGEST))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r:.80}")
        sections: dict[str, dict[str, str]] = content["sections"]
        for rows in sections.values():
            if not all(isinstance(value, str) for value in rows.values()):
                raise ValueError("a section has a value that is no text")
    # The file may hold any JSON.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} is no output of 'opgraft env --json': {described(error)}"
        ) from error
    return sections


def _changes(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> list[dict[str, str | None]]:
    """Return the rows that differ between two reports, with ``None`` for a missing row."""
    found = []
    # Merged mappings have the names of both, in the order of the reports.
    for section in {**before, **after}:
        old = before.get(section, {})
        new = after.get(section, {})
        for name in {**old, **new}:
            if old.get(name) == new.get(name):
                continue
            row = {"section": section, "name": name}
            found.append({**row, "before": old.get(name), "after": new.get(name)})
    return found


def _end_with_changes(path: str, found: Sequence[dict[str, str | None]], as_json: bool) -> NoReturn:
    """Print the differences from a former report, and end the command."""
    if as_json:
        print_json("opgraft.env.diff/1", {"file": path, "changes": found})
    else:
        for row in found:
            values = f"{row['before'] or '(none)'} -> {row['after'] or '(none)'}"
            print_wrapped(f"{row['section']}: {row['name']}: {values}")
        if not found:
            print_wrapped(f"nothing differs from {path}")
    sys.exit(1 if found else 0)


def _bug_report() -> dict[str, dict[str, str]]:
    versions = {"opgraft": __version__, "Python": sys.version.split()[0], "system": host.platform()}
    versions.update({name: _version(name) for name in _PACKAGES})
    names = [name for name in (*known_variables(), *_FURTHER_VARIABLES) if name in os.environ]
    # One object for all sections: an id has the same substitute everywhere.
    scrubber = Scrubber()
    return {
        "Versions": versions,
        "Platform": _platform(scrubber),
        "Plugins": {name: scrubber.value(value) for name, value in _plugins().items()},
        "Settings": {name: scrubber.value(value) for name, value in _settings_in_force().items()},
        "Environment": {name: scrubber.value(os.environ[name]) for name in names},
    }


def _plugins() -> dict[str, str]:
    """Return platforms and plugins with their status before an import, and useless metadata."""
    try:
        settings = host_state().settings()
    # The section of the settings shows the error.
    except ConfigError:
        settings = resolve([])
    rows = {}
    for offer in shown_offers():
        status, reason = admission(offer, settings)
        verdict = f"{status}: {reason}" if reason else status
        rows[f"{KINDS[offer.group]} {offer.name}"] = f"{offer.provider} ({offer.value}): {verdict}"
    for problem in discover().problems:
        rows[f"ignored {problem.provider}"] = problem.reason
    return rows


def _settings_in_force() -> dict[str, str]:
    """Return every setting with its value and the origin of the value."""
    try:
        rows = host_state().settings().rows()
    except ConfigError as error:
        return {"error": str(error)}
    return {name: f"{value or '(not set)'} ({origin})" for name, value, origin in rows}


def _cell(text: str) -> str:
    """Return a text as one cell of a Markdown table."""
    return printable(text).replace("\\", "\\\\").replace("|", "\\|")


def _platform(scrubber: Scrubber) -> dict[str, str]:
    try:
        decision, unknown = decide_without_torch(host_state().settings(), Machine())
    except OpgraftError as error:
        return {"error": scrubber.value(str(error))}
    rows = {"selected": scrubber.value(f"{decision.chosen}: {decision.reason}")}
    if unknown:
        rows["not verified"] = scrubber.value(unknown)
    for candidate in decision.candidates:
        told = scrubber.value(candidate.reason)
        lines = candidate.evidence.lines() if candidate.evidence else ()
        evidence = "; ".join(map(scrubber.sentence, lines))
        rows[candidate.name] = f"{told} ({evidence})" if evidence else told
    return rows


def _version(package: str) -> str:
    return version_of(package) or "not installed"
