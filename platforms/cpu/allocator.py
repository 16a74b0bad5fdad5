"""Keeping freed memory in the process, so that large tensors are not paid for in page faults again and again."""

from __future__ import annotations

import ctypes
import os

from opgraft.logger import logger

_TOP_PAD = 64 << 20

_OPTIONS = (
    (-4, 0),  # M_MMAP_MAX: no block gets a mapping of its own, which would end with it
    (-1, -1),  # M_TRIM_THRESHOLD: what is free at the end of the heap is never given back
    (-2, _TOP_PAD),  # M_TOP_PAD: the heap grows by this much more than was asked for
    (
        -8,
        1,
    ),  # M_ARENA_MAX: threads share that heap; in one of their own no block of 64 MiB fits, and each gets a mapping
)
"""The parameters of mallopt(3), by their numbers in glibc's malloc.h, and their values."""


def keep_memory() -> str | None:
    """Have glibc keep the memory that is freed, for the rest of this process; what prevents it, or ``None``.

    By default a block of more than 32 MiB, and the end of a heap that has shrunk, go back to the system when they are
    freed, and come again page by page, each cleared on first touch. Kept, they are used again as they are, once glibc
    has some ten blocks of a size. Calling it again changes nothing.

    It holds for the main thread and those that allocate after it only: others keep the heap that they have, and leave
    it to a later thread when they end.
    """
    if not _c_library().startswith("glibc"):
        return "the C library is not glibc"
    refused = [option for option, value in _OPTIONS if not ctypes.CDLL(None).mallopt(option, value)]
    return f"mallopt refuses option {refused[0]}" if refused else None


def keep_memory_or_warn() -> None:
    """Call ``keep_memory``, which a setting has asked for; what prevents it goes to the log."""
    obstacle = keep_memory()
    if obstacle:
        logger.warning("cpu_keep_memory has no effect: %s", obstacle)


def _c_library() -> str:
    """Return the name and version of the C library where it tells them, else nothing."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""
