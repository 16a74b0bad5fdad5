"""The heap of a process, measured in one of its own: what lies free between blocks in use is given back."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opgraft.platforms.cpu import allocator

_GAPS = """
import ctypes, re
from pathlib import Path
from opgraft.machine.memory import release_free_memory

def resident():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
size, count = 100_000, 640  # less than gets a mapping of its own
blocks = [libc.malloc(size) for _ in range(count)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[::2]:
    libc.free(block)
before = resident()
release_free_memory()
print((before - resident()) / (size * count / 2))
"""


@pytest.mark.skipif(not allocator._c_library().startswith("glibc"), reason="the C library is not glibc")
def test_gaps_between_blocks_are_given_back() -> None:
    """Nearly all pages of every other block, which freeing alone leaves with the process."""
    result = subprocess.run([sys.executable, "-c", _GAPS], capture_output=True, text=True, check=True)
    assert 0.85 < float(result.stdout) < 1.05
