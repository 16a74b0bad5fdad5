"""The memory of this process: what is free in its heap, and the pages that weights lie in."""

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

_HUGE_PAGE = 1 << 21  # of x86, and of ARM with pages of 4 KiB; elsewhere the system refuses
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # for the second of which Python has no name
_HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_APART = 1 << 13
"""Bytes that the C library leaves at most between blocks that follow one another, each with a mapping of its own."""


def release_free_memory() -> None:
    """Give the pages of the heap that are free back to the system, where the C library can: glibc.

    By itself it gives back the end of the heap only. What lies between blocks in use stays with the process.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python's collector from looking through all objects, for what makes many that stay: a tenth of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def expect_huge_pages(blocks: Iterable[range]) -> None:
    """Have the system make huge pages of blocks of addresses that nothing was written to, where it can: Linux.

    To fill small pages takes several times as long, as the system has to be asked for each, and to move them later
    holds up the first requests. Blocks that follow one another share pages.
    """
    if not _has_huge_pages():
        return
    madvise = ctypes.CDLL(None).madvise
    spans = list(map(_pages, _joined(blocks)))
    for pages in spans:
        madvise(
            ctypes.c_void_p(pages.start), ctypes.c_size_t(pages.stop - pages.start), _MADV_HUGEPAGE
        )
    # Those that hold the head that the C library writes before each block.
    _move(list(chain.from_iterable(spans)))


def move_to_huge_pages(blocks: Iterable[range], wait: float = 0) -> Thread | None:
    """Have the system move blocks of addresses to huge pages, on a thread that is returned, where it can: Linux 6.1.

    ``None`` where there is nothing to move, or the system's setting is ``never``.

    A processor that reads weights waits at each page for its address: on Zen 4 a token takes a tenth longer by small
    pages, and a third with codes of 8 bits. A page that blocks fill by half or more becomes one with all that is in it,
    as weights of less than a page lie between other things. Memory that is given back meanwhile does no harm, as
    nothing is read or written here.

    Args:
        blocks: of addresses.
        wait: seconds until the thread begins, as moving holds up whatever asks for memory meanwhile.
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
    return _HUGE_PAGES_SETTING.is_file() and "[never]" not in _HUGE_PAGES_SETTING.read_text(
        encoding="ascii"
    )


def _joined(blocks: Iterable[range]) -> Iterator[range]:
    """Yield the spans of blocks that follow one another."""
    first = last = 0
    for block in sorted(blocks, key=lambda block: block.start):
        if block.start - last > _APART:
            yield range(first, last)
            first = block.start
        last = max(last, block.stop)
    yield range(first, last)


def _pages(span: range) -> range:
    """Return the addresses of the huge pages that a span fills."""
    return range(
        -(-span.start // _HUGE_PAGE) * _HUGE_PAGE, span.stop // _HUGE_PAGE * _HUGE_PAGE, _HUGE_PAGE
    )


def _mostly_filled(blocks: Iterable[range]) -> list[int]:
    """Return the addresses of the huge pages of which blocks fill half or more."""
    filled: Counter[int] = Counter()
    for block in set(blocks):
        for page in range(block.start // _HUGE_PAGE * _HUGE_PAGE, block.stop, _HUGE_PAGE):
            filled[page] += min(block.stop, page + _HUGE_PAGE) - max(block.start, page)
    return sorted(page for page, bytes_filled in filled.items() if 2 * bytes_filled >= _HUGE_PAGE)


def _move(pages: Sequence[int], wait: float = 0) -> None:
    time.sleep(wait)
    madvise = ctypes.CDLL(
        None
    ).madvise  # of one page each, as the first that cannot be moved ends a call
    for page in pages:
        madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)
