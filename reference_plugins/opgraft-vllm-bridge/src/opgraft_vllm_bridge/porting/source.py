"""The files of a plugin's source, read with limits: a folder from somewhere holds what its maker put there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from opgraft.errors import InputError

LARGEST_FILE = 1 << 20
"""Bytes of a file of source."""
LARGEST_TREE = 64 << 20
"""Bytes of all files."""
MOST_FILES = 5_000

_MADE = frozenset(
    {
        ".git",
        ".hg",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".venv",
        "__pycache__",
        "build",
        "dist",
    }
)
"""Folders that tools make, which no copy needs."""


@dataclass(frozen=True)
class Source:
    """A plugin's folder, and the contents of its files by their paths below it, which are sorted."""

    root: Path
    files: Mapping[str, bytes]

    def module(self, dotted: str) -> str | None:
        """Return the file of a module, of a package its ``__init__.py``; ``None`` where it is not here."""
        path = dotted.replace(".", "/")
        places = (
            f"{folder}{path}{end}" for folder in ("", "src/") for end in ("/__init__.py", ".py")
        )
        return next((place for place in places if place in self.files), None)


def read_source(root: Path) -> Source:
    """Read a plugin's folder.

    Raises:
        InputError: it is no folder with a ``pyproject.toml`` or ``setup.py``, a link leads out of it, it holds more
            than the limits allow, or something in it cannot be read.
    """
    if not root.is_dir():
        raise InputError(
            f"{root} is no folder: give that of a plugin's source, with its pyproject.toml or setup.py"
        )
    files: dict[str, bytes] = {}
    size = 0
    for path in _paths(root):
        name = path.relative_to(root).as_posix()
        _expect_inside(root, path)
        content = _read(path, LARGEST_FILE if path.suffix in (".py", ".toml") else LARGEST_TREE)
        size += len(content)
        files[name] = content
        if size > LARGEST_TREE or len(files) > MOST_FILES:
            raise InputError(
                f"{root} has more than {MOST_FILES:,} files or {LARGEST_TREE >> 20} MiB: give the folder of the plugin "
                "alone, without what was built or downloaded"
            )
    if not {"pyproject.toml", "setup.py"} & files.keys():
        raise InputError(
            f"{root} has no pyproject.toml and no setup.py: give the folder that holds one of them"
        )
    return Source(root, dict(sorted(files.items())))


def _paths(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _MADE and not name.endswith(".egg-info")
        )
        linked = next((name for name in folders if Path(folder, name).is_symlink()), None)
        if linked:
            raise InputError(
                f"{Path(folder, linked)} is a link to a folder, which is not followed: remove it"
            )
        yield from (Path(folder, name) for name in sorted(names) if not name.endswith(".pyc"))


def _expect_inside(root: Path, path: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise InputError(
            f"{path} is a link that leads out of {root}: remove it, or put a copy in its place"
        )
    if not path.is_file():
        raise InputError(f"{path} is no file that can be copied: remove it")


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise InputError(
            f"{path} has more than {most >> 20} MiB: remove it, or move it elsewhere, and port without it"
        )
    return content
