"""The cache of compiled code: a folder of entries that are written at once, checked when read, and bounded in size."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgraft.config import CompilationConfig
from opgraft.environment import cache_home
from opgraft.errors import CacheEntryError, ConfigError
from opgraft.logger import logger
from opgraft.text import described

_DESCRIPTION = "entry.json"
_SUMS = "sums.json"
_TEMPORARY = "writing-"


@dataclass(frozen=True)
class CacheFigures:
    """Totals of a cache.

    Attributes:
        folder: where it is.
        entries: in it.
        nbytes: that they take.
        limit: bytes that they may take.
    """

    folder: str
    entries: int
    nbytes: int
    limit: int

    def to_dict(self) -> dict[str, str | int]:
        """Return the totals as plain data."""
        return {"folder": self.folder, "entries": self.entries, "bytes": self.nbytes, "limit": self.limit}


class CompilationCache:
    """A folder of entries by key, each a folder of files with their checksums.

    Args:
        folder: made if it is not there, for its owner alone.
        limit: bytes that entries may take; those that were not used for longest go first.

    Raises:
        ConfigError: the folder is another user's, or others may write to it, or it cannot be made.
    """

    @classmethod
    def of(cls, settings: CompilationConfig) -> CompilationCache:
        """Return the cache that settings name.

        Raises:
            ConfigError: its folder cannot be used.
        """
        folder = Path(settings.cache_folder) if settings.cache_folder else cache_home() / "opgraft" / "compiled"
        return cls(folder.expanduser(), settings.cache_bytes)

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
        except OSError as error:
            raise ConfigError(
                f"the folder {folder} of compilation_config.cache_folder cannot be used: {error.strerror}"
            ) from error
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise ConfigError(
                f"the folder {folder} of compilation_config.cache_folder belongs to another user, or others may write "
                "to it, and code is loaded from it: name a folder of your own, of mode 0700"
            )

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, for which other processes wait."""
        with (self.folder / f"{key}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self, key: str) -> tuple[Path, Mapping[str, Any]] | None:
        """Return the folder and the description of an entry, ``None`` where there is none.

        Raises:
            CacheEntryError: there is one, and it is damaged.
        """
        entry = self.folder / key
        if not entry.is_dir():
            return None
        try:
            sums = json.loads((entry / _SUMS).read_text())
            for name, expected in sums.items():
                if _sum(entry / name) != expected:
                    raise CacheEntryError(f"{name} of it is damaged")
            description: dict[str, Any] = json.loads((entry / _DESCRIPTION).read_text())
            os.utime(entry)
        except (OSError, ValueError, AttributeError) as error:
            raise CacheEntryError(f"it cannot be read: {described(error)}") from error
        return entry, description

    @contextlib.contextmanager
    def written(self, key: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Give a folder to write files to and a description to fill, which together become the entry at the end."""
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder))
        try:
            description: dict[str, Any] = {}
            yield folder, description
            (folder / _DESCRIPTION).write_text(json.dumps(description))
            (folder / _SUMS).write_text(json.dumps({path.name: _sum(path) for path in sorted(folder.iterdir())}))
            self.discard(key)
            folder.rename(self.folder / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._make_room(key)

    def discard(self, key: str) -> None:
        """Remove an entry, where there is one."""
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def clear(self) -> int:
        """Remove all entries, and return how many there were."""
        entries = self._entries()
        for entry in entries:
            self.discard(entry.name)
        for rest in (*self.folder.glob(f"{_TEMPORARY}*"), *self.folder.glob("*.lock")):
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink(missing_ok=True)
        return len(entries)

    def figures(self) -> CacheFigures:
        """Count entries and their bytes."""
        sizes = [_size(entry) for entry in self._entries()]
        return CacheFigures(str(self.folder), len(sizes), sum(sizes), self.limit)

    def _entries(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith(_TEMPORARY)]

    def _make_room(self, kept: str) -> None:
        """Remove entries that were not used for longest, until the rest fits beside the one that is ``kept``."""
        entries = sorted((path for path in self._entries()), key=lambda path: path.stat().st_mtime_ns)
        total = sum(map(_size, entries))
        for entry in entries:
            if total <= self.limit:
                return
            if entry.name != kept:
                total -= _size(entry)
                logger.info("the entry %s of the cache of compiled code goes, as it is full", entry.name)
                self.discard(entry.name)


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
