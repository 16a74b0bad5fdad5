"""Results of the doctor, kept until one of their conditions changes.

The name of each file is a digest of all conditions of the result.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from importlib_metadata import Distribution
from opgraft.base import version
from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.config.environment import lasting_variables
from opgraft.errors import OpgraftError
from opgraft.machine.machine import Machine
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import discover, is_editable
from opgraft.plugins.memory import Memory, files_of, states_of
from opgraft.plugins.metadata import text_of
from opgraft.plugins.selection import decide_platform
from opgraft.registry.state import host_state

_MEMORY = Memory("doctor", most=16)
_OF_DISTRIBUTIONS = (".dist-info", ".egg-info", ".pth")


@dataclass(frozen=True)
class KeptResult:
    """A result, and the time in UTC."""

    since: str
    report: Mapping[str, Any]


def key() -> str | None:
    """Return a digest of the conditions of a result.

    Conditions are versions, files, settings, variables, drivers and devices. Returns ``None`` if
    one may change without a trace: the source of an editable install, or unreadable metadata.
    """
    try:
        # Any part may raise. Without the part, its changes would go unnoticed.
        settings = host_state().settings()
        lockfile = settings.config.lockfile
        parts = {
            "python": [sys.version, sys.executable, sys.path],
            "installed": sorted(_installed()),
            "opgraft": sorted(states_of(own_files())),
            "offers": list(map(_described, discover().distributions.values())),
            "problems": list(map(str, discover().problems)),
            "objections": [objection(offer, settings) for offer in discover().offers],
            "settings": list(settings.rows()),
            "lockfile": states_of([lockfile] if lockfile else []),
            "variables": lasting_variables(),
            "platform": decide_platform(settings, Machine())[1].to_dict(),
        }
    except (OpgraftError, OSError, ValueError, csv.Error) as error:
        logger.debug("no result of the doctor is kept: %s", described(error))
        return None
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def look_up(key: str) -> KeptResult | None:
    """Return the result of a key. An unusable one is reported, and counts as missing."""
    try:
        data = _MEMORY.read(key)
        return KeptResult(**data) if data is not None else None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        # A file may have been written by another version, or torn by a full disk.
        path = _MEMORY.path(key)
        words = f"the kept result {path} cannot be used and is made anew: {described(error)}"
        logger.warning("%s", printable(words))
        return None


def keep(key: str, report: Mapping[str, Any]) -> None:
    """Keep a result, if possible. Only the newest results are kept."""
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        _MEMORY.write(key, asdict(KeptResult(since, report)))
    except (OSError, RuntimeError) as error:
        words = f"the result is not kept, as its file cannot be written: {described(error)}"
        logger.info("%s", printable(words))


def _installed() -> Iterator[str]:
    """Yield the names of the metadata of all distributions. They contain the versions."""
    for folder in sys.path:
        # Not every entry is a folder.
        with suppress(OSError):
            for name in os.listdir(folder):
                if name.endswith(_OF_DISTRIBUTIONS):
                    yield name


def own_files() -> Iterator[str]:
    """Yield the source files of opgraft."""
    package = os.path.dirname(os.path.dirname(version.__file__))
    for folder, _, names in os.walk(package):
        for name in names:
            if name.endswith(".py"):
                yield os.path.join(folder, name)


def _described(distribution: Distribution) -> list[Any]:
    """Return the RECORD of a distribution, and the states of its files.

    Raises:
        ValueError: the files may change without a trace.
    """
    record = text_of(distribution, "RECORD")
    # RECORD lists no source of an editable install.
    if record is None or is_editable(distribution):
        raise ValueError(f"nothing tells when {distribution.name} changes")
    return [record, states_of(files_of(distribution))]
