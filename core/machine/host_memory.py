"""The memory of the host."""

from __future__ import annotations

import os
import re

from opgraft.machine.machine import Machine

MEMINFO = "/proc/meminfo"

_OF_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The files with the memory limit of a container, in the two versions of control groups."""


def host_memory() -> tuple[int, int]:
    """Return the memory of the host in bytes: the total, and the part that a process can have."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    text = Machine().read(MEMINFO) or ""
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    if available:
        return total, int(available.group(1)) * 1024
    # Other systems tell the free pages only, without the caches.
    return total, os.sysconf("SC_AVPHYS_PAGES") * page


def memory_limit(machine: Machine | None = None) -> int:
    """Return the bytes that this process can have: the memory of the host, in a container less."""
    machine = machine or Machine()
    total, _ = host_memory()
    limits = [total]
    for path in _OF_GROUPS:
        text = (machine.read(path) or "").strip()
        # The text is "max" if there is no limit.
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)
