"""Locking what a test has installed, and what a lockfile says then."""

from __future__ import annotations

from pathlib import Path

import opgraft
from opgraft import OpgraftConfig
from opgraft.config import Settings, resolve
from opgraft.plugins.admission import objection
from opgraft.plugins.discovery import PLUGIN_GROUP, discover
from opgraft.plugins.making_locks import lock_installed, write_rows

PLUGIN = "import opgraft\nplatforms = 'any'\n@opgraft.hookimpl\ndef opgraft_veto(): pass\n"


def settings_of(path: Path) -> Settings:
    return resolve([("OPGRAFT_LOCKFILE", OpgraftConfig(lockfile=str(path)))])


def lock(path: Path, *, allow_editable: bool = False) -> list[str]:
    """Lock what is installed, as the command does; returns the reasons of what was left out."""
    opgraft.reset()
    rows, left_out = lock_installed(resolve([]), allow_editable=allow_editable)
    write_rows(path, rows)
    return [problem.reason for problem in left_out]


def reason(path: Path, name: str = "acme") -> str | None:
    """What a fresh process says against the plugin."""
    opgraft.reset()
    (offer,) = (offer for offer in discover().of_group(PLUGIN_GROUP) if offer.name == name)
    return objection(offer, settings_of(path))
