"""The heap of a process, measured in one of its own: free gaps are given back; weights and caches get huge pages."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest
from opgraft.machine import memory
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


@pytest.mark.skipif(
    not allocator._c_library().startswith("glibc"), reason="the C library is not glibc"
)
def test_gaps_between_blocks_are_given_back() -> None:
    """Nearly all pages of every other block, which freeing alone leaves with the process."""
    result = subprocess.run(
        [sys.executable, "-c", _GAPS], capture_output=True, text=True, check=True
    )
    assert 0.85 < float(result.stdout) < 1.05


_LOADED = """
move_to_huge_pages(range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in weights).join()
"""
_APART = f"""
memory = torch.zeros(32 << 20, dtype=torch.uint8)
weights = [memory[number << 20 :][: 3 << 18].fill_(number) for number in range(32)]
{_LOADED.strip()}
"""
_ASKED = """
weights = [torch.empty(1 << 20, dtype=torch.uint8) for number in range(32)]
expect_huge_pages(range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in weights)
[each.fill_(number) for number, each in enumerate(weights)]
"""
_FROZEN = """
freeze(torch.nn.ParameterList(torch.nn.Parameter(each, requires_grad=False) for each in weights))
[thread.join() for thread in threading.enumerate() if thread.name == "opgraft-huge-pages"]
"""
_CACHE = """
layers = {"layer": Attention(4, 64, 0.125)}
weights = list(CacheLayout.of(layers, 32, torch.float32).allocate(512, torch.device("cpu")).values())
[each.fill_(number) for number, each in enumerate(weights)]
"""
_WEIGHTS = """
import re, threading
from pathlib import Path
import torch
from opgraft import freeze
from opgraft.engine.runner.cache_layout import CacheLayout
from opgraft.machine.memory import expect_huge_pages, move_to_huge_pages
from opgraft.ops import Attention

weights = [torch.full((1 << 20,), number, dtype=torch.uint8) for number in range(32)]
{move}
assert all((each == number).all() for number, each in enumerate(weights))
print(int(re.search(r"AnonHugePages:\\s*(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) << 10)
"""


def _moves() -> bool:
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    setting = memory._HUGE_PAGES_SETTING
    return (
        sys.platform == "linux"
        and release >= (6, 1)
        and setting.is_file()
        and "[never]" not in setting.read_text()
    )


@pytest.mark.skipif(not _moves(), reason="the system has no huge pages on demand")
@pytest.mark.parametrize(
    "move",
    [_LOADED, _APART, _ASKED, _FROZEN, _CACHE],
    ids=["loaded", "apart", "asked before", "frozen", "cache"],
)
def test_what_a_model_reads_lies_in_huge_pages(move: str) -> None:
    """Weights that are smaller than such a page, which they fill together, and a cache; no number changes."""
    script = _WEIGHTS.replace("{move}", move)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) >= 16 << 20


def test_pages_lie_within_blocks_that_follow_one_another() -> None:
    """In any order of the blocks; what is less than a page, or beyond a gap, has none."""
    size = 1 << 21
    near = [range(5 * size, 5 * size + 999), range(2 * size + 1, 5 * size - 4096)]
    blocks = [*near, range(9 * size, 10 * size), range(20 * size + 1, 21 * size)]
    pages = [page for span in memory._joined(blocks) for page in memory._pages(span)]
    assert pages == [3 * size, 4 * size, 9 * size]


def test_pages_of_which_half_is_filled_are_moved() -> None:
    """By one block or several, the same one counted once; others stay where they are."""
    size = 1 << 21
    half = range(3 * size + 5, 3 * size + 5 + size // 2)
    blocks = [
        range(size // 4, 2 * size + 9),
        range(5 * size, 5 * size + size // 3),
        *[range(size // 4)] * 3,
    ]
    blocks += [
        range(5 * size + size // 2, 6 * size - size // 4),
        half,
        range(8 * size, 8 * size + size // 2 - 1),
    ]
    assert memory._mostly_filled(blocks) == [0, size, 3 * size, 5 * size]
