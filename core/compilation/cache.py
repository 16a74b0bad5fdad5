"""The cache of compiled code: a folder of entries that are written at once, checked when read, and bounded in size."""

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
from opgraft.base.text import described
from opgraft.config import CompilationConfig
from opgraft.config.environment import cache_home
from opgraft.errors import CacheEntryError, ConfigError
from opgraft.logger import logger

ENTRY, SUMS = "entry.json", "sums.json"
"""The files of an entry beside its own: its description, and the checksums of all the others."""

INDEX = "sources.json"
"""The file of the folder that remembers digests of sources."""

_LOCK, _WRITING = ".lock", ".writing"
_LARGEST = 1 << 26  # bytes of a description, and of the checksums
_PIECE = 1 << 20  # bytes that are read at a time
KEY = re.compile("[0-9a-f]{40}")
"""The name of an entry. Nothing of another name is touched, as the folder may have other things in it."""


class CacheFigures(NamedTuple):
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
        return {
            "folder": self.folder,
            "entries": self.entries,
            "bytes": self.nbytes,
            "limit": self.limit,
        }


class CompilationCache:
    """A folder of entries by key, each a folder of files with their checksums.

    Args:
        folder: for its owner alone.
        limit: bytes that entries may take; those that were not used for longest go first.
        make: make the folder where it is not there; a cache without one is empty.

    Raises:
        ConfigError: the folder is another user's, or others may write to it, or it cannot be made.
    """

    @classmethod
    def of(cls, settings: CompilationConfig, *, make: bool = True) -> CompilationCache:
        """Return the cache that settings name.

        Raises:
            ConfigError: its folder cannot be used.
        """
        try:
            folder = (
                Path(settings.cache_folder)
                if settings.cache_folder
                else cache_home() / "opgraft" / "compiled"
            )
            return cls(folder.expanduser(), settings.cache_bytes, make=make)
        except RuntimeError as error:
            raise ConfigError(
                f"compilation_config.cache_folder cannot be found: {described(error)}: name a folder by its full path"
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
        except (OSError, ValueError) as error:  # the latter of a name that no file has
            raise ConfigError(
                f"the folder {folder} of compilation_config.cache_folder cannot be used: {described(error)}"
            ) from error
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise ConfigError(
                f"the folder {folder} of compilation_config.cache_folder belongs to another user, or others may write "
                "to it, and code is loaded from it: name a folder of your own, of mode 0700"
            )

    def __contains__(self, key: str) -> bool:
        """Tell whether there is an entry, whole or not."""
        return (self.folder / key).is_dir()

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, for which other processes wait.

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
        """Return a descriptor that holds the lock; ``LOCK_NB`` for ``at_once`` raises where another one does."""
        path = self.folder / f"{key}{_LOCK}"
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | at_once)
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
            # Removed while this waited: nobody else would wait for this one.
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def read(self, key: str) -> tuple[Path, Mapping[str, Any]] | None:
        """Return the folder and the description of an entry, ``None`` where there is none.

        Raises:
            CacheEntryError: there is one, and it is damaged.
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
            os.utime(entry)
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise CacheEntryError(f"it cannot be read: {described(error)}") from error
        return entry, description

    @contextlib.contextmanager
    def written(self, key: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Give a folder to write files to and a description to fill, which together become the entry at the end.

        Who writes holds the lock of the key.
        """
        folder = self.folder / f"{key}{_WRITING}"
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir(mode=0o700)
        try:
            description: dict[str, Any] = {}
            yield folder, description
            (folder / ENTRY).write_text(json.dumps(description))
            (folder / SUMS).write_text(
                json.dumps({path.name: _sum(path) for path in sorted(folder.iterdir())})
            )
            self.discard(key)
            folder.rename(self.folder / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._make_room(key)

    def discard(self, key: str) -> None:
        """Remove an entry, where there is one, or what has its name and is none."""
        entry = self.folder / key
        if entry.is_symlink() or entry.is_file():
            entry.unlink(missing_ok=True)
        shutil.rmtree(entry, ignore_errors=True)

    def clear(self) -> int:
        """Remove all entries but those that somebody waits for or makes, and return how many there were."""
        entries = {key for _, _, key in self._entries()}
        (self.folder / INDEX).unlink(missing_ok=True)
        return len(entries & {key for key in self._keys() if self._removed(key)})

    @property
    def keys(self) -> list[str]:
        """List the entries, those that were not used for longest first."""
        return [key for _, _, key in self._entries()]

    def figures(self) -> CacheFigures:
        """Count entries and their bytes."""
        sizes = [size for _, size, _ in self._entries()]
        return CacheFigures(str(self.folder), len(sizes), sum(sizes), self.limit)

    def _keys(self, *endings: str) -> set[str]:
        """Return the keys of which there is something, or something that ends so."""
        if not self.folder.exists():
            return set()
        found = {
            path.stem
            for path in self.folder.iterdir()
            if path.suffix in (endings or ("", _LOCK, _WRITING))
        }
        return {key for key in found if KEY.fullmatch(key)}

    def _entries(self) -> list[tuple[int, int, str]]:
        """Return when each entry was last used, its bytes and its key; other processes may remove some meanwhile."""
        found = []
        for key in self._keys(""):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                entry = self.folder / key
                size = sum(file.stat().st_size for file in entry.iterdir())
                found.append((entry.stat().st_mtime_ns, size, key))
        return sorted(found)

    def _make_room(self, kept: str) -> None:
        """Remove entries that were not used for longest, until the rest fits beside the one that is ``kept``."""
        for key in self._keys(_WRITING):  # of processes that were killed; others hold their locks
            self._removed(key)
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        for _, size, key in entries:
            if total > self.limit and key != kept and self._removed(key):
                total -= size
                logger.info("the entry %s of the cache of compiled code goes, as it is full", key)

    def _removed(self, key: str) -> bool:
        """Remove all that there is of a key, and tell whether that was so: it is not while somebody has its lock."""
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
        OSError, ValueError: it cannot be read, or is no regular file.
    """
    sum_of = hashlib.sha256()
    with open(file, "rb", opener=without_waiting) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError(f"{file.name} is no regular file")
        while piece := opened.read(_PIECE):
            sum_of.update(piece)
    return sum_of.hexdigest()
