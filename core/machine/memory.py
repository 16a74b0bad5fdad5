"""The memory of this process: free pages of the heap, and huge pages for weights."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from threading import Thread

_HUGE_PAGE = 1 << 21
"""Bytes, on x86 and on ARM with pages of 4 KiB. Elsewhere the system refuses."""

_BLOCKS_BYTES = 1 << 25
"""Bytes of memory for ``HugeBlocks`` that are asked for at once."""

_CACHE_LINE = 64

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Advice to Linux. Python has no name for this one."""

_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_FAILED = ctypes.c_void_p(-1).value
"""Flags and the result of Linux's calls, without names in Python."""

_HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_APART = 1 << 13
"""The most bytes between two blocks that the C library maps one after the other."""


def release_free_memory() -> None:
    """Give the free pages of the heap back to the system, if the C library is glibc.

    Without this call, glibc gives back the end of the heap only. Free pages between blocks in use
    stay with the process.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


class HugeBlocks:
    """Memory in huge pages for blocks that are filled one after the other.

    Each page is made at the first write, so that a large block costs nothing before.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._taken = 0

    def take(self, size: int) -> tuple[mmap.mmap, int] | None:
        """Return memory and the place of ``size`` bytes; ``None`` if there are no huge pages."""
        if self._memory is None or self._taken + size > len(self._memory):
            self._memory = _huge_memory(max(size, _BLOCKS_BYTES))
            self._taken = 0
        if self._memory is None:
            return None
        start = self._taken
        self._taken += -(-size // _CACHE_LINE) * _CACHE_LINE
        return self._memory, start


def _huge_memory(size: int) -> mmap.mmap | None:
    if not _has_huge_pages():
        return None
    size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def forget_pages(memory: mmap.mmap, start: int, size: int) -> None:
    """Give back the pages within a part of a mapped file. Writes to these pages are lost."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        memory.madvise(mmap.MADV_DONTNEED, first, length)


def expect_huge_pages(blocks: Iterable[range]) -> None:
    """Ask Linux for huge pages below blocks of addresses, before anything is written to the blocks.

    Small pages take several times as long to fill, because the process asks the system for each of
    them. A later move to huge pages holds up the first requests. Blocks that follow one another
    share pages.
    """
    if not _has_huge_pages():
        return
    madvise = ctypes.CDLL(None).madvise
    spans = list(map(_pages, _joined(blocks)))
    for pages in spans:
        size = pages.stop - pages.start
        madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    # The C library has written a head before each block already: those pages have to move.
    _move(list(chain.from_iterable(spans)))


def move_to_huge_pages(blocks: Iterable[range], wait: float = 0) -> Thread | None:
    """Have Linux 6.1 or newer move blocks of addresses to huge pages, on a thread.

    A processor looks up the address of each page when it reads weights. On Zen 4 a token takes a
    tenth longer with small pages, and a third longer with codes of 8 bits.

    A huge page is made if blocks fill half of the page or more. Small weights lie between other
    memory, and the other memory moves with them. Memory may be given back meanwhile, because the
    thread neither reads nor writes.

    Args:
        blocks: ranges of addresses.
        wait: seconds until the thread begins. A move holds up every request for memory.

    Returns:
        The thread, or ``None`` if there is nothing to move or the system's setting is ``never``.
    """
    if not _has_huge_pages():
        return None
    pages = _mostly_filled(blocks)
    if not pages:
        return None
    thread = Thread(target=_move, args=(pages, wait), name="opgraft-huge-pages", daemon=True)
    thread.start()
    return thread


def move_from_files(blocks: Iterable[range]) -> None:
    """Move blocks of addresses from mapped files to huge pages of this process.

    The addresses stay. Other threads may read the blocks meanwhile, and must not write to them. The
    caller keeps the blocks in use until the end. Then the process needs the files no more.

    Args:
        blocks: ranges of addresses. Blocks outside of files, or in files that other processes see
            written, stay.
    """
    if not _has_huge_pages():
        return
    for span in _in_files(blocks):
        start = span.start
        while start < span.stop:
            border = (start // _HUGE_PAGE + 1) * _HUGE_PAGE
            stop = min(span.stop, border)
            if not _replace_pages(start, stop - start):
                return
            start = stop


def bytes_in_files(blocks: Iterable[range]) -> int:
    """Return the bytes that ``move_from_files`` would move."""
    spans = _in_files(blocks) if _has_huge_pages() else []
    return sum(map(len, spans))


def _in_files(blocks: Iterable[range]) -> list[range]:
    """Return the pages below blocks that are in mapped files."""
    files = _private_files()
    spans = []
    for span in _joined(blocks):
        # Whole pages, with the parts of other tensors on them.
        first = span.start // mmap.PAGESIZE * mmap.PAGESIZE
        last = -(-span.stop // mmap.PAGESIZE) * mmap.PAGESIZE
        for file in files:
            start = max(first, file.start)
            pages = range(start, min(last, file.stop))
            if pages:
                spans.append(pages)
    return spans


def _private_files() -> list[range]:
    """Return the addresses of files that are mapped for this process alone to write to."""
    found = []
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        # Such as "7f00-7f10 rw-p 00000000 fe:00 1234 /path": addresses, rights, inode and path.
        addresses, rights, _, _, inode, *_ = line.split(maxsplit=5)
        if rights != "rw-p" or inode == "0":
            continue
        first, _, last = addresses.partition("-")
        found.append(range(int(first, 16), int(last, 16)))
    return found


def _replace_pages(start: int, size: int) -> bool:
    """Put a copy of pages in their place. Return False if the system refuses."""
    system = _system()
    room_size = 2 * _HUGE_PAGE
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = system.mmap(None, room_size, rights, kind, -1, 0)
    if room == _FAILED:
        return False
    # As far from a border of huge pages as the pages: then a huge page stays one in the move.
    border = -(-room // _HUGE_PAGE) * _HUGE_PAGE
    place = border + start % _HUGE_PAGE
    if size == _HUGE_PAGE:
        system.madvise(place, size, _MADV_HUGEPAGE)
    ctypes.memmove(place, start, size)
    # One step for the readers: a read finds the old pages or the new ones.
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    moved = system.mremap(place, size, size, flags, start)
    # Not the whole room: another thread may have memory in the gap by now.
    end = place + size
    system.munmap(room, place - room)
    system.munmap(end, room + room_size - end)
    if moved != start:
        system.munmap(place, size)
    return bool(moved == start)


def _system() -> ctypes.CDLL:
    """Return Linux's calls for memory. Addresses and sizes are numbers."""
    library = ctypes.CDLL(None)
    address = ctypes.c_void_p
    size = ctypes.c_size_t
    number = ctypes.c_int
    library.mmap.restype = address
    library.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    library.mremap.restype = address
    library.mremap.argtypes = (address, size, size, number, address)
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = (address, size, number)
    return library


def _has_huge_pages() -> bool:
    if not _HUGE_PAGES_SETTING.is_file():
        return False
    return "[never]" not in _HUGE_PAGES_SETTING.read_text(encoding="ascii")


def _joined(blocks: Iterable[range]) -> Iterator[range]:
    """Yield the spans of blocks that follow one another."""
    # Starts with an empty span at 0, which fills no page.
    first = last = 0
    for block in sorted(blocks, key=lambda block: block.start):
        if block.start - last > _APART:
            yield range(first, last)
            first = block.start
        last = max(last, block.stop)
    yield range(first, last)


def _pages(span: range) -> range:
    """Return the addresses of the huge pages within a span."""
    first = -(-span.start // _HUGE_PAGE) * _HUGE_PAGE
    end = span.stop // _HUGE_PAGE * _HUGE_PAGE
    return range(first, end, _HUGE_PAGE)


def _mostly_filled(blocks: Iterable[range]) -> list[int]:
    """Return the addresses of the huge pages that blocks fill by half or more."""
    filled: Counter[int] = Counter()
    # A set, because tensors may share one block.
    for block in set(blocks):
        first = block.start // _HUGE_PAGE * _HUGE_PAGE
        for page in range(first, block.stop, _HUGE_PAGE):
            start = max(block.start, page)
            stop = min(block.stop, page + _HUGE_PAGE)
            filled[page] += stop - start
    return sorted(page for page, bytes_filled in filled.items() if 2 * bytes_filled >= _HUGE_PAGE)


def _move(pages: Sequence[int], wait: float = 0) -> None:
    time.sleep(wait)
    madvise = ctypes.CDLL(None).madvise
    for page in pages:
        # One call for each page, because a call ends at the first page that cannot be moved.
        madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
