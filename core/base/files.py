"""Read files of others with limits, and replace files in one step."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 16
"""Bytes to read at a time from a file without a known size."""


def read_regular(path: str | Path, largest: int) -> bytes:
    """Return the content of a file, without waiting for a pipe.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no regular file, or has more than ``largest`` bytes.
    """
    with open(path, "rb", opener=without_waiting, buffering=0) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is no regular file")
        # One byte more tells that a file is too large.
        content = _read_at_most(file, largest + 1, state.st_size)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest:,} bytes")
    return content


def _read_at_most(file: RawIOBase, most: int, size: int) -> bytes:
    """Read a file to the end, or ``most`` bytes. Files of /proc have a ``size`` of 0."""
    pieces: list[bytes] = []
    while most > 0 and (piece := file.read(min(most, size + 1 if size else _PIECE))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def without_waiting(path: str | Path, flags: int) -> int:
    """Open a file. A pipe is opened without waiting for the other end."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def replace_file(path: Path, content: str | bytes, mode: int) -> None:
    """Write a file in one step.

    Raises:
        OSError: as ``replacing``.
    """
    with replacing(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Yield a file for writing. At the end of the block, the file takes the place of ``path``.

    A reader finds the former file or the new one, never a part. After an exception, the former file
    stays. A link stays, and the file behind the link changes.

    Raises:
        OSError: the file cannot be written, or ``path`` is no regular file.
    """
    # Readers need not pay for this import of 3 ms.
    import tempfile

    # The file behind a link is replaced, not the link.
    path = Path(os.path.realpath(path))
    if _is_other(path):
        raise FileExistsError(errno.EEXIST, "it is no regular file")
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            # Without this, a crash could leave an empty file in place of the former one.
            os.fsync(descriptor)
        # A temporary file is for the owner alone.
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        # After the replacement, the temporary name is gone.
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _is_other(path: Path) -> bool:
    """Return True if the path leads to something besides a regular file, such as /dev/null."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
