"""The memory of the host."""

from __future__ import annotations

import os
import re

from opgraft.machine.machine import Machine

MEMINFO = "/proc/meminfo"


def host_memory() -> tuple[int, int]:
    """Return the memory of the host in bytes: all of it, and what a process can still have."""
    size = os.sysconf("SC_PAGE_SIZE")
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", Machine().read(MEMINFO) or "", re.MULTILINE)
    free = int(available.group(1)) * 1024 if available else os.sysconf("SC_AVPHYS_PAGES") * size
    return os.sysconf("SC_PHYS_PAGES") * size, free
