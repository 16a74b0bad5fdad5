"""A folder for blocks on their way from one process to the other, gone after both."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from opgraft.config import CacheConfig
from opgraft.engine.runner.stored_blocks import make_key

_PREFIX = "opgraft-handover-"
_IN_MEMORY = Path("/dev/shm")  # noqa: S108  # a folder of mode 0700 is made there
_ROOM = 1 << 30
"""Free bytes of a folder in memory, at least. A container often has 64 MB."""


@contextmanager
def handover_folder(cache: CacheConfig) -> Iterator[CacheConfig]:
    """Yield settings of the cache with a store in a new folder, which is removed at the end.

    The folder is in memory, if there is room. Blocks take half of what is free, at most.
    """
    parent = _parent()
    _remove_abandoned(parent)
    folder, lock = _made(parent)
    try:
        key = folder / "key"
        make_key(key)
        # The folder may be in memory, and weights and cache need the rest.
        most = min(cache.store_bytes, shutil.disk_usage(folder).free // 2)
        yield replace(cache, store=str(folder), store_bytes=max(1, most), store_key=str(key))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _parent() -> Path:
    if os.access(_IN_MEMORY, os.W_OK) and shutil.disk_usage(_IN_MEMORY).free >= _ROOM:
        return _IN_MEMORY
    return Path(tempfile.gettempdir())


def _made(parent: Path) -> tuple[Path, int | None]:
    """Make a folder and lock it. The lock is ``None`` if the file system has no locks."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Another server that starts now may take the new folder for an abandoned one.
        with suppress(FileNotFoundError):
            lock = _locked(folder, wait=True)
            if folder.exists():
                return folder, lock
            if lock is not None:
                os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed. The system gives up their locks."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            # All users share the parent, and one may have put a link there.
            if folder.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path, *, wait: bool = False) -> int | None:
    """Lock a folder, and return the open file; ``None`` if another process has the lock."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(file)
        return None
    return file
