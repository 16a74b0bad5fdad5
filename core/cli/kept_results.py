"""Results of the doctor, kept for as long as nothing has changed that they depend on.

Each lies in a file of its own in the user's folder of states, whose name is a digest of all that it depends on.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from importlib_metadata import Distribution
from opgraft import version
from opgraft.base.files import read_regular, replace_file
from opgraft.base.text import described, printable
from opgraft.config.environment import lasting_variables, state_home
from opgraft.errors import OpgraftError
from opgraft.logger import logger
from opgraft.machine.machine import Machine
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import discover, is_editable
from opgraft.plugins.metadata import text_of
from opgraft.plugins.selection import decide_platform
from opgraft.registry.state import host_state

_LARGEST = 1 << 24  # bytes of a file
_MOST = 16  # files, of which the oldest go
_OF_DISTRIBUTIONS = (".dist-info", ".egg-info", ".pth")


@dataclass(frozen=True)
class Kept:
    """A result, and when it was found out, in UTC."""

    since: str
    report: Mapping[str, Any]


def key() -> str | None:
    """Return a digest of all that a result depends on: versions, files, settings, variables, drivers and devices.

    ``None`` where something may change without a trace: the source of an editable install, or metadata that cannot be
    read.
    """
    try:
        settings = host_state().settings()
        parts = {
            "python": [sys.version, sys.executable, sys.path],
            "installed": sorted(_installed()),
            "opgraft": sorted(_states(_own_files())),
            "offers": [
                _described(distribution) for distribution in discover().distributions.values()
            ],
            "problems": list(map(str, discover().problems)),
            "objections": [objection(offer, settings) for offer in discover().offers],
            "settings": list(settings.rows()),
            "lockfile": list(_states(filter(None, [settings.config.lockfile]))),
            "variables": lasting_variables(),
            "platform": decide_platform(settings, Machine())[1].to_dict(),
        }
    except (OpgraftError, OSError, ValueError, csv.Error) as error:
        logger.debug("no result of the doctor is kept: %s", described(error))
        return None
    return _digest(json.dumps(parts).encode())


def look_up(key: str) -> Kept | None:
    """Return the result of that key; one that cannot be used does not count."""
    path = _path(key)
    if path is None:
        return None
    try:
        digest, _, text = read_regular(path, _LARGEST).partition(b"\n")
        if digest.decode() != _digest(text):
            raise ValueError("it is not as it was written")
        return Kept(**json.loads(text))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        logger.warning(
            "%s",
            printable(
                f"the kept result {path} cannot be used and is made anew: {described(error)}"
            ),
        )
        return None


def keep(key: str, report: Mapping[str, Any]) -> None:
    """Keep a result where that is possible, and the newest of others."""
    path = _path(key)
    if path is None:
        return
    text = json.dumps(asdict(Kept(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), report)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, f"{_digest(text.encode())}\n{text}", 0o600)
        for old in sorted(path.parent.iterdir(), key=os.path.getmtime, reverse=True)[_MOST:]:
            old.unlink()
    except OSError as error:
        logger.info(
            "%s",
            printable(f"the result is not kept, as {path} cannot be written: {described(error)}"),
        )


def _path(key: str) -> Path | None:
    with suppress(RuntimeError):  # nobody knows where the home folder is
        return state_home() / "opgraft" / "doctor" / f"{key}.json"
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _installed() -> Iterator[str]:
    """Yield the metadata of what is installed, by whose names versions are told."""
    for folder in sys.path:
        with suppress(OSError):
            yield from (name for name in os.listdir(folder) if name.endswith(_OF_DISTRIBUTIONS))


def _own_files() -> Iterator[str]:
    for folder, _, names in os.walk(os.path.dirname(version.__file__)):
        yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))


def _described(distribution: Distribution) -> list[Any]:
    """Describe what is installed of a distribution: its RECORD, and the state of the files that are listed there.

    Raises:
        ValueError: they may change without a trace.
    """
    record = text_of(distribution, "RECORD")
    if record is None or is_editable(distribution):
        raise ValueError(f"nothing tells when {distribution.name} changes")
    files = (
        str(distribution.locate_file(row[0])) for row in csv.reader(record.splitlines()) if row
    )
    return [_digest(record.encode()), list(_states(files))]


def _states(files: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Yield files with their size and the time of their last change; those that are not there have none."""
    for file in files:
        try:
            state = os.stat(file)
            yield file, state.st_size, state.st_mtime_ns
        except FileNotFoundError:
            yield file, -1, 0
