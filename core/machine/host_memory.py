"""The memory of the host."""

from __future__ import annotations

import os
import re

from opgraft.machine.machine import Machine

MEMINFO = "/proc/meminfo"

_OF_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The most that the processes of a container may have, in the two versions of control groups."""


def host_memory() -> tuple[int, int]:
    """Return the memory of the host in bytes: all of it, and what a process can still have."""
    size = os.sysconf("SC_PAGE_SIZE")
    available = re.search(
        r"^MemAvailable:\s*(\d+) kB$", Machine().read(MEMINFO) or "", re.MULTILINE
    )
    free = int(available.group(1)) * 1024 if available else os.sysconf("SC_AVPHYS_PAGES") * size
    return os.sysconf("SC_PHYS_PAGES") * size, free


def memory_limit(machine: Machine | None = None) -> int:
    """Return the most memory in bytes that this process can have: that of the host, in a container less."""
    texts = [(machine or Machine()).read(path) or "" for path in _OF_GROUPS]
    return min(
        [host_memory()[0], *(int(text) for text in map(str.strip, texts) if text.isdecimal())]
    )
