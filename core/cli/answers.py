"""The stream for answers. While a command runs, nothing else can write to this stream.

Plugins print while they are loaded, and kernels may print later: in Python, in C, or in processes
of their own. All of this goes to stderr. So stdout has the answer alone.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_STDERR = 2

_HIGH = 512
"""The least number of a copied descriptor. Some libraries close all low numbers."""

_apart: list[TextIO] = []
"""The streams for answers of running commands, the innermost last.

A test may run one command within another.
"""


def answers() -> TextIO:
    """Return the stream for answers."""
    return _apart[-1] if _apart else sys.stdout


@contextmanager
def answers_apart() -> Iterator[None]:
    """Keep stdout for ``answers`` alone. All other output to stdout goes to stderr.

    At the end, both streams are as before, even if a plugin has closed or replaced one.
    """
    stdout = sys.stdout
    stderr = sys.stderr
    number = _number_of(stdout)
    errors = _number_of(stderr)
    stream = stdout if number is None else _copy(stdout, number)
    kept = None if errors is None else _duplicate(errors)
    _apart.append(stream)
    # A stream without a descriptor, such as a text of a test.
    if number is None:
        sys.stdout = sys.stderr
    else:
        divert(stdout, number)
    try:
        yield
    finally:
        _apart.remove(stream)
        sys.stdout = stdout
        sys.stderr = stderr
        if number is not None:
            _flush(stdout)
            sys.stdout = _put_back(stdout, number, stream.fileno())
            with suppress(OSError):
                stream.close()
        if errors is not None and kept is not None:
            sys.stderr = _put_back(stderr, errors, kept)
            with suppress(OSError):
                os.close(kept)


def _put_back(stream: TextIO, number: int, copy: int) -> TextIO:
    """Let a descriptor be the file of its copy again.

    Returns:
        The stream of the descriptor: a new one, if a plugin has closed it.
    """
    # A plugin may have closed the copy.
    with suppress(OSError):
        os.dup2(copy, number)
    if _is_open(stream):
        return stream
    encoding, errors = stream.encoding, stream.errors
    return open(number, "w", encoding=encoding, errors=errors, buffering=1, closefd=False)


def _is_open(stream: TextIO) -> bool:
    """Return False for a closed stream, and for a stream without its buffer."""
    try:
        return not stream.closed
    # The buffer was detached.
    except ValueError:
        return False


@contextmanager
def stdout_for_answers() -> Iterator[None]:
    """Let stdout be the stream for answers, for the prompt and the echo of ``input``."""
    number = _number_of(sys.stdout)
    if not _apart or number is None:
        yield
        return
    # readline writes to the descriptor, so another stream of Python would not do.
    os.dup2(_apart[-1].fileno(), number)
    try:
        yield
    finally:
        divert(sys.stdout, number)


def divert(stdout: TextIO, number: int = 1) -> None:
    """Let stdout, the descriptor ``number``, be stderr from now on."""
    _flush(stdout)
    os.dup2(_STDERR, number)


def _number_of(stream: TextIO) -> int | None:
    """Return the file descriptor of a stream, ``None`` if it has none."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _copy(stdout: TextIO, number: int) -> TextIO:
    """Open another stream to the file of stdout."""
    stdout.flush()
    return open(_duplicate(number), "w", encoding=stdout.encoding, errors=stdout.errors)


def _duplicate(number: int) -> int:
    """Return a copy of a descriptor with a high number, if this process may open one."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:
        return os.dup(number)


def _flush(stdout: TextIO) -> None:
    """Write the buffers of Python and C to stdout."""
    # Its reader has gone, or a plugin has closed the stream.
    with suppress(OSError, ValueError):
        stdout.flush()
    # Without torch, no C code of a plugin has run.
    if "torch" in sys.modules:
        # torch has imported this module.
        import ctypes

        ctypes.CDLL(None).fflush(None)
