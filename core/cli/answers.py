"""The stream that answers are written to, which nothing else gets hold of while a command runs.

Plugins print while they are loaded, and their kernels may print later: in Python, in C, or in a process that they
start. All of that goes to stderr, so that stdout holds the answer alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_STDERR = 2
_apart: list[TextIO] = []
"""The streams for answers of the commands that run, the innermost last; a test may run one within another."""


def answers() -> TextIO:
    """Return the stream that answers are written to."""
    return _apart[-1] if _apart else sys.stdout


@contextmanager
def answers_apart() -> Iterator[None]:
    """Keep stdout for ``answers`` alone; whatever else is written to it goes to stderr.

    Both streams are as before at the end, if a plugin has closed or replaced them meanwhile.
    """
    stdout, stderr = sys.stdout, sys.stderr
    number, errors = _number_of(stdout), _number_of(stderr)
    stream = stdout if number is None else _copy(stdout, number)
    kept = None if errors is None else os.dup(errors)
    _apart.append(stream)
    if number is None:  # such as a text that a test collects
        sys.stdout = sys.stderr
    else:
        divert(stdout, number)
    try:
        yield
    finally:
        _apart.remove(stream)
        sys.stdout, sys.stderr = stdout, stderr
        if number is not None:
            _flush(stdout)
            sys.stdout = _put_back(stdout, number, stream.fileno())
            stream.close()
        if errors is not None and kept is not None:
            sys.stderr = _put_back(stderr, errors, kept)
            os.close(kept)


def _put_back(stream: TextIO, number: int, copy: int) -> TextIO:
    """Let a descriptor be the file of its copy again; returns its stream, a new one if that was closed."""
    os.dup2(copy, number)
    if _is_open(stream):
        return stream
    encoding, errors = stream.encoding, stream.errors
    return open(number, "w", encoding=encoding, errors=errors, buffering=1, closefd=False)


def _is_open(stream: TextIO) -> bool:
    """Return False for a stream that was closed, or that has lost its buffer."""
    try:
        return not stream.closed
    except ValueError:  # its buffer was detached
        return False


@contextmanager
def stdout_for_answers() -> Iterator[None]:
    """Let stdout lead to the stream for answers, as ``input`` shows its prompt and what is typed on stdout."""
    number = _number_of(sys.stdout)
    if not _apart or number is None:
        yield
        return
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
    return open(os.dup(number), "w", encoding=stdout.encoding, errors=stdout.errors)


def _flush(stdout: TextIO) -> None:
    """Write out what Python and C keep for stdout."""
    with suppress(OSError, ValueError):  # its reader has gone, or a plugin has closed it
        stdout.flush()
    if "torch" in sys.modules:  # without torch nobody's C code has run
        import ctypes  # which torch has imported

        ctypes.CDLL(None).fflush(None)
