"""Read the files of a plugin's source, with limits, because anybody may have made the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from opgraft.errors import InputError

LARGEST_FILE = 1 << 20
"""The most bytes of a source file."""

LARGEST_TREE = 64 << 20
"""The most bytes of all files."""

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
"""Folders that tools make. They are not copied."""


@dataclass(frozen=True)
class Source:
    """The files of a plugin.

    Attributes:
        root: the plugin's folder.
        files: path below the folder → content, sorted by paths.
    """

    root: Path
    files: Mapping[str, bytes]

    def module(self, dotted: str) -> str | None:
        """Return the path of a module's file, or None. A package has an ``__init__.py``."""
        path = dotted.replace(".", "/")
        for folder in ("", "src/"):
            for end in ("/__init__.py", ".py"):
                place = f"{folder}{path}{end}"
                if place in self.files:
                    return place
        return None


def read_source(root: Path) -> Source:
    """Return the files of a plugin's folder.

    Raises:
        InputError: one of these: the path is no folder; the folder has neither ``pyproject.toml``
            nor ``setup.py``; a link leads out of the folder; the files exceed the limits; or a
            file cannot be read.
    """
    if not root.is_dir():
        raise InputError(
            f"{root} is no folder: give that of a plugin's source, with its pyproject.toml or "
            "setup.py"
        )
    files: dict[str, bytes] = {}
    size = 0
    for path in _paths(root):
        name = path.relative_to(root).as_posix()
        _expect_inside(root, path)
        is_source = path.suffix in (".py", ".toml")
        content = _read(path, LARGEST_FILE if is_source else LARGEST_TREE)
        size += len(content)
        files[name] = content
        if size > LARGEST_TREE or len(files) > MOST_FILES:
            raise InputError(
                f"{root} has more than {MOST_FILES:,} files or {LARGEST_TREE >> 20} MiB: give the "
                "folder of the plugin alone, without what was built or downloaded"
            )
    if not {"pyproject.toml", "setup.py"} & files.keys():
        raise InputError(
            f"{root} has no pyproject.toml and no setup.py: give the folder that holds one of them"
        )
    return Source(root, dict(sorted(files.items())))


def _paths(root: Path) -> Iterator[Path]:
    """Yield the paths of all files, without files that tools make.

    Raises:
        InputError: a folder is a link.
    """
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
    """Raise an InputError unless the path is a file in the folder."""
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
            f"{path} has more than {most >> 20} MiB: remove it, or move it elsewhere, and port "
            "without it"
        )
    return content
