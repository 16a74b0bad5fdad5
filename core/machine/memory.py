"""The memory of this process: free pages of the heap, and huge pages for weights."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import Thread

_HUGE_PAGE = 1 << 21
"""Bytes, on x86 and on ARM with pages of 4 KiB. Elsewhere the system refuses."""

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
"""Advice to Linux. Python has no name for this one."""

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


@contextmanager
def without_collections() -> Iterator[None]:
    """Hold back Python's garbage collector while many objects are made that stay.

    The collector would look through all of them, for a tenth of a second.
    """
    # The program may have switched the collector off for good.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
