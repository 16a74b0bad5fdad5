"""Files of others, read with limits, and files of opgraft's own that readers find whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 16  # bytes that are read at a time where nothing tells how many there are


def read_regular(path: str | Path, largest: int) -> bytes:
    """Return what a file holds; of a pipe nothing is waited for.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or has more than ``largest`` bytes.
    """
    with open(path, "rb", opener=without_waiting, buffering=0) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is no regular file")
        content = _read_at_most(file, largest + 1, state.st_size)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest:,} bytes")
    return content


def _read_at_most(file: RawIOBase, most: int, size: int) -> bytes:
    """Read a file up to its end or so many bytes; a file of /proc has a size of 0, whatever it holds."""
    pieces: list[bytes] = []
    while most > 0 and (piece := file.read(min(most, size + 1 if size else _PIECE))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def without_waiting(path: str | Path, flags: int) -> int:
    """Open a file, a pipe without waiting for its other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def replace_file(path: Path, content: str | bytes, mode: int) -> None:
    """Write a file in one step; raises as ``replacing``."""
    with replacing(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Give a file to write that takes the place of another one at the end, and none where that is not reached.

    A reader finds the former one or this one. A link stays, and what it leads to changes.

    Raises:
        OSError: it cannot be written, or is there and no regular file.
    """
    import tempfile  # costs 3 ms, which only who writes should pay

    path = Path(os.path.realpath(path))
    if _is_other(path):
        raise FileExistsError(errno.EEXIST, "it is no regular file")
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.chmod(name, mode)  # a temporary file is for its owner alone
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):  # where it was interrupted when it had been replaced
            os.unlink(name)
        raise


def _is_other(path: Path) -> bool:
    """Tell of something that a file would take the place of, such as /dev/null."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
