"""Keep freed memory in the process, so that large tensors need no new pages from the system."""

from __future__ import annotations

import ctypes
import os

from opgraft.base.log import logger

_TOP_PAD = 64 << 20

_OPTIONS = (
    # M_MMAP_MAX: no block gets a mapping of its own. The mapping would end with the block.
    (-4, 0),
    # M_TRIM_THRESHOLD: the free end of the heap never goes back to the system.
    (-1, -1),
    # M_TOP_PAD: the heap grows by more than was asked for.
    (-2, _TOP_PAD),
    # M_ARENA_MAX: threads share this heap. A heap of a thread has no room for 64 MiB.
    (-8, 1),
)
"""The parameters of mallopt(3) by number in glibc's malloc.h, with values."""


def keep_memory() -> str | None:
    """Have glibc keep freed memory for the rest of this process.

    By default, freed blocks of more than 32 MiB and the free end of the heap go back to the system.
    A new block then comes page by page, and the system clears each page. Kept memory is used again
    without that, once glibc has about ten blocks of a size. A second call changes nothing.

    Only the main thread, and threads with a first allocation after the call, use the kept heap.
    Other threads keep their heaps, and leave them to later threads.

    Returns:
        The reason if glibc cannot keep memory, else ``None``.
    """
    if not _c_library().startswith("glibc"):
        return "the C library is not glibc"
    mallopt = ctypes.CDLL(None).mallopt
    refused = [option for option, value in _OPTIONS if not mallopt(option, value)]
    return f"mallopt refuses option {refused[0]}" if refused else None


def keep_memory_or_warn() -> None:
    """Call ``keep_memory`` for the setting ``cpu_keep_memory``, and log a failure."""
    obstacle = keep_memory()
    if obstacle:
        logger.warning("cpu_keep_memory has no effect: %s", obstacle)


def _c_library() -> str:
    """Return the name and version of the C library, or an empty text."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""
