"""Listings of the public names of opgraft's versions, which are part of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgraft.errors import InputError, close_matches
from opgraft.files import read_regular
from opgraft.plugins.api_use import keywords_of
from opgraft.text import described

SCHEMA = "opgraft.api/1"
FOLDER = "api"
_TEXTS = ("signature", "since", "deprecated", "is")
_HERE = Path(__file__).parent / FOLDER
_LARGEST = 1 << 22  # bytes of a listing


@dataclass(frozen=True)
class Listing:
    """The public names of a version.

    Attributes:
        version: of opgraft.
        modules: those whose names are public.
        names: dotted name → ``signature``, ``since``, ``deprecated``, ``bases`` and ``is``, another name of the same.
    """

    version: str
    modules: frozenset[str]
    names: dict[str, dict[str, str | list[str]]]

    def find(self, name: str) -> str | None:
        """Return the name in the listing that a dotted name stands for, or ``None``.

        A member may be that of a base. What comes after a name that has it from elsewhere, as from torch, is no
        concern of ours.
        """
        if name in self.names:
            same = self.names[name].get("is")
            return str(same) if same else name
        owner, _, member = name.rpartition(".")
        found = self.find(owner) if owner else None
        if found is None:
            return None
        bases = self.names[found].get("bases", [])
        return next(
            (n for n in (f"{base}.{member}" for base in (found, *bases)) if n in self.names), found
        )

    def deprecation(self, name: str) -> str:
        """Say what takes the place of a name, or of its module, that will go; empty where it stays."""
        parts = name.split(".")
        ends = (
            self.names.get(".".join(parts[:count]), {}).get("deprecated")
            for count in range(len(parts), 0, -1)
        )
        return str(next(filter(None, ends), ""))

    def signature(self, name: str) -> str:
        return str(self.names[name].get("signature", ""))


def kept_versions() -> list[str]:
    """Return the versions of which a listing is kept."""
    return sorted(file.stem for file in _HERE.glob("*.json"))


def read_listing(version: str) -> Listing:
    """Return the listing of a version, or that in a file of that name.

    Raises:
        InputError: there is none, or the file is none.
    """
    path = Path(version) if version.endswith(".json") else _HERE / f"{version}.json"
    if not version.endswith(".json") and version not in kept_versions():
        near = close_matches(version, kept_versions())
        raise InputError(
            f"no listing of the public names of opgraft {version!r:.80} is kept: {near}"
        )
    try:
        return _listing(json.loads(read_regular(path, _LARGEST)))
    except (OSError, ValueError, SyntaxError, KeyError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{path} is no listing of the schema {SCHEMA}: {described(error)}"
        ) from error


def _listing(data: Any) -> Listing:
    if not isinstance(data, dict) or data["schema"] != SCHEMA:
        raise ValueError("its schema is another one")
    modules, names = data["modules"], data["names"]
    if not (_are_texts(modules) and isinstance(names, dict)):
        raise ValueError("its modules are no list of texts, or its names no table")
    for name, row in names.items():
        _check(name, row, names)
    return Listing(str(data["version"]), frozenset(modules), names)


def _check(name: str, row: Any, names: dict[str, Any]) -> None:
    """Reject a row that no tool has written.

    Raises:
        ValueError, SyntaxError: it is of another form.
    """
    if not (
        isinstance(row, dict)
        and _are_texts(row.get("bases", []))
        and _are_texts([row.get(key, "") for key in _TEXTS])
    ):
        raise ValueError(f"its row of {name!r:.80} is of another form")
    if row.get("is", name) not in names:
        raise ValueError(f"its row of {name!r:.80} stands for a name that it has not")
    keywords_of(row.get("signature", ""))


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
