"""The cache of compiled code: a folder of entries with checksums, bounded in size.

An entry appears in one step: a process writes to another folder, and renames the folder at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opgraft.base.files import read_regular, without_waiting
from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.config import CompilationConfig
from opgraft.config.environment import cache_home
from opgraft.errors import CacheEntryError, ConfigError

ENTRY = "entry.json"
"""The file of an entry with the description."""

SUMS = "sums.json"
"""The file of an entry with the checksums of all other files."""

INDEX = "sources.json"
"""The file in the folder of a cache with digests of sources."""

_LOCK = ".lock"
_WRITING = ".writing"
_REMOVED = ".removed"
_LARGEST = 1 << 26
"""The largest number of bytes of a description, and of the checksums."""

_PIECE = 1 << 20
"""The number of bytes to read at a time."""

KEY = re.compile("[0-9a-f]{40}")
"""The name of an entry. Files of other names in the folder belong to others, and stay."""


class CacheFigures(NamedTuple):
    """Totals of a cache.

    Attributes:
        folder: the folder of the cache.
        entries: the number of entries.
        nbytes: the bytes of all entries.
        limit: the bytes that entries may take.
    """

    folder: str
    entries: int
    nbytes: int
    limit: int

    def to_dict(self) -> dict[str, str | int]:
        """Return the totals as plain data."""
        return {
            "folder": self.folder,
            "entries": self.entries,
            "bytes": self.nbytes,
            "limit": self.limit,
        }


class CompilationCache:
    """A folder of entries by key. An entry is a folder of files with checksums.

    Args:
        folder: only the owner may write to this folder.
        limit: the bytes that entries may take. The least recently used entries go first.
        make: make a missing folder. Without a folder, the cache is empty.

    Raises:
        ConfigError: the folder belongs to another user, or others may write to it, or it cannot be
            made.
    """

    @classmethod
    def of(cls, settings: CompilationConfig, *, make: bool = True) -> CompilationCache:
        """Return the cache of the settings.

        Raises:
            ConfigError: the folder cannot be used.
        """
        given = settings.cache_folder
        try:
            folder = Path(given) if given else cache_home() / "opgraft" / "compiled"
            return cls(folder.expanduser(), settings.cache_bytes, make=make)
        # There is no home folder.
        except RuntimeError as error:
            raise ConfigError(
                f"compilation_config.cache_folder cannot be found: {described(error)}: name a "
                "folder by its full path"
            ) from error

    def __init__(self, folder: Path, limit: int, *, make: bool = True) -> None:
        self.folder = folder
        self.limit = limit
        try:
            if make:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif not folder.exists():
                return
            state = folder.stat()
        # ValueError stands for a name with a null byte.
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the folder {folder} of compilation_config.cache_folder cannot be used: "
                f"{described(error)}"
            ) from error
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise ConfigError(
                f"the folder {folder} of compilation_config.cache_folder belongs to another user, "
                "or others may write to it, and code is loaded from it: name a folder of your own, "
                "of mode 0700"
            )

    def __contains__(self, key: str) -> bool:
        """Return True if there is an entry, damaged or not."""
        return (self.folder / key).is_dir()

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key. Other processes wait for the lock.

        Raises:
            CacheEntryError: the folder takes no file, as on a full disk.
        """
        try:
            lock = self._lock(key)
        except OSError as error:
            raise CacheEntryError(
                f"the folder {self.folder} takes no file: {described(error)}"
            ) from error
        try:
            yield
        finally:
            os.close(lock)

    def _lock(self, key: str, at_once: int = 0) -> int:
        """Return a descriptor with the lock of a key.

        With ``LOCK_NB`` for ``at_once``, a lock of another process raises ``BlockingIOError``.
        """
        path = self.folder / f"{key}{_LOCK}"
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | at_once)
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
            # Removed meanwhile: other processes would wait for another file.
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def read(self, key: str) -> tuple[Path, Mapping[str, Any]] | None:
        """Return the folder and the description of an entry; ``None`` without an entry.

        Raises:
            CacheEntryError: the entry is damaged.
        """
        if key not in self:
            return None
        entry = self.folder / key
        try:
            sums = json.loads(read_regular(entry / SUMS, _LARGEST))
            if sums.keys() | {SUMS} != {path.name for path in entry.iterdir()}:
                raise CacheEntryError(
                    "it is damaged: its files are others than those that have checksums"
                )
            for name, expected in sums.items():
                if _sum(entry / name) != expected:
                    raise CacheEntryError(f"{name} of it is damaged")
            description: dict[str, Any] = json.loads(read_regular(entry / ENTRY, _LARGEST))
            # The time tells the last use.
            os.utime(entry)
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise CacheEntryError(f"it cannot be read: {described(error)}") from error
        return entry, description

    @contextlib.contextmanager
    def written(self, key: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield a folder for files and a description to fill. Both become the entry at the end.

        The caller holds the lock of the key.
        """
        folder = self.folder / f"{key}{_WRITING}"
        # A killed process may have left a folder.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            description: dict[str, Any] = {}
            yield folder, description
            (folder / ENTRY).write_text(json.dumps(description))
            sums = {path.name: _sum(path) for path in sorted(folder.iterdir())}
            (folder / SUMS).write_text(json.dumps(sums))
            self.discard(key)
            folder.rename(self.folder / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._make_room(key)

    def discard(self, key: str) -> None:
        """Remove an entry, or a file or link of the same name."""
        entry = self.folder / key
        if entry.is_symlink() or entry.is_file():
            entry.unlink(missing_ok=True)
        # An entry also disappears in one step: a killed process leaves no part of it.
        removed = self.folder / f"{key}{_REMOVED}"
        shutil.rmtree(removed, ignore_errors=True)
        with contextlib.suppress(OSError):
            entry.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def clear(self) -> int:
        """Remove all entries without a lock, and return the number of removed entries."""
        entries = {key for _, _, key in self._entries()}
        (self.folder / INDEX).unlink(missing_ok=True)
        removed = {key for key in self._keys() if self._removed(key)}
        return len(entries & removed)

    @property
    def keys(self) -> list[str]:
        """The keys of the entries, the least recently used first."""
        return [key for _, _, key in self._entries()]

    def figures(self) -> CacheFigures:
        """Count entries and bytes."""
        sizes = [size for _, size, _ in self._entries()]
        return CacheFigures(str(self.folder), len(sizes), sum(sizes), self.limit)

    def _keys(self, *endings: str) -> set[str]:
        """Return the keys of files and folders with one of the endings; by default with any."""
        if not self.folder.exists():
            return set()
        wanted = endings or ("", _LOCK, _WRITING, _REMOVED)
        found = {path.stem for path in self.folder.iterdir() if path.suffix in wanted}
        return {key for key in found if KEY.fullmatch(key)}

    def _entries(self) -> list[tuple[int, int, str]]:
        """Return the time of the last use, the bytes and the key of each entry, sorted."""
        found = []
        for key in self._keys(""):
            # Other processes may remove an entry meanwhile.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                entry = self.folder / key
                size = sum(file.stat().st_size for file in entry.iterdir())
                found.append((entry.stat().st_mtime_ns, size, key))
        return sorted(found)

    def _make_room(self, kept: str) -> None:
        """Remove the least recently used entries until the rest fits; the entry ``kept`` stays."""
        # Folders of killed processes go. The lock protects those of living processes.
        for key in self._keys(_WRITING, _REMOVED):
            self._removed(key)
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        for _, size, key in entries:
            if total > self.limit and key != kept and self._removed(key):
                total -= size
                logger.info("the entry %s of the cache of compiled code goes, as it is full", key)

    def _removed(self, key: str) -> bool:
        """Remove all files of a key; return False if another process holds the lock."""
        try:
            lock = self._lock(key, fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            self.discard(key)
            shutil.rmtree(self.folder / f"{key}{_WRITING}", ignore_errors=True)
            (self.folder / f"{key}{_LOCK}").unlink(missing_ok=True)
        finally:
            os.close(lock)
        return True


def _sum(file: Path) -> str:
    """Return the checksum of a file.

    Raises:
        OSError, ValueError: the file cannot be read, or is no regular file.
    """
    sum_of = hashlib.sha256()
    with open(file, "rb", opener=without_waiting) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError(f"{file.name} is no regular file")
        while piece := opened.read(_PIECE):
            sum_of.update(piece)
    return sum_of.hexdigest()
