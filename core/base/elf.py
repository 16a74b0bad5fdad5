"""The libraries that a native library asks the system's loader for, from its ELF file."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from opgraft.base.files import without_waiting

_MAGIC = b"\x7fELF"
_WIDE = 2
"""The class of files with addresses of 64 bits."""

_LITTLE = 1
"""The order of bytes with the lowest first."""

_LOADED, _DYNAMIC = 1, 2
"""Types of segments: mapped into memory, and with facts for the loader."""

_END, _NEEDED, _STRINGS = 0, 1, 5
"""Tags of facts: the end mark, a library by the place of its name, and the address of the names."""

_HEADERS = ("HHIIIIIHHH", "HHIQQQIHHH")
_SEGMENTS = ("III4xI", "I4xQQ8xQ")
_PAIRS = ("iI", "qQ")
"""Layouts of the header, a segment and a fact, for addresses of 32 and of 64 bits."""

_LONGEST = 4096  # bytes of a name
_MOST = 1 << 16  # facts of a file


def linked_libraries(path: str | Path) -> list[str] | None:
    """Return the names of the libraries that a file needs (``DT_NEEDED``), in its order.

    The answer is ``None`` if the file is no ELF file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or no regular file.
    """
    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        ident = file.read(16)
        if ident[:4] != _MAGIC or len(ident) < 16:
            return None
        is_wide = ident[4] == _WIDE
        order = "<" if ident[5] == _LITTLE else ">"
        try:
            return _needed(file, is_wide, order)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"it is a damaged ELF file: {error}") from error


def _needed(file: BinaryIO, is_wide: bool, order: str) -> list[str]:
    segments = list(_segments(file, is_wide, order))
    facts = _facts(file, segments, is_wide, order)
    names = []
    strings = 0
    for tag, value in facts:
        if tag == _NEEDED:
            names.append(value)
        elif tag == _STRINGS:
            strings = value
    if not names:
        return []
    start = _offset_of(strings, segments)
    return [_text_at(file, start + name) for name in names]


def _segments(file: BinaryIO, is_wide: bool, order: str) -> Iterator[tuple[int, ...]]:
    """Yield the type, the place in the file, the address in memory and the length of segments."""
    header = struct.Struct(order + _HEADERS[is_wide])
    segment = struct.Struct(order + _SEGMENTS[is_wide])
    fields = header.unpack(file.read(header.size))
    place = fields[4]
    size = fields[8]
    count = fields[9]
    for number in range(count):
        file.seek(place + number * size)
        content = file.read(segment.size)
        yield segment.unpack(content)


def _facts(
    file: BinaryIO, segments: Sequence[tuple[int, ...]], is_wide: bool, order: str
) -> list[tuple[int, ...]]:
    """Return the tags and values for the loader.

    The loader of glibc takes the last segment, by its address, and reads to the end mark. Of facts
    that are there twice, the last one counts.

    Raises:
        ValueError: the segment is not in the file.
    """
    begin = None
    for kind, _, address, _ in segments:
        if kind == _DYNAMIC:
            begin = address
    if begin is None:
        return []
    pair = struct.Struct(order + _PAIRS[is_wide])
    place = _offset_of(begin, segments)
    file.seek(place)
    content = file.read(_MOST * pair.size)
    whole = len(content) // pair.size * pair.size
    facts = []
    for fact in pair.iter_unpack(content[:whole]):
        if fact[0] == _END:
            break
        facts.append(fact)
    return facts


def _offset_of(address: int, segments: Sequence[tuple[int, ...]]) -> int:
    """Return the place in the file of an address in memory.

    Raises:
        ValueError: the address is not in the file.
    """
    place = None
    for kind, offset, begin, length in segments:
        is_inside = begin <= address < begin + length
        # A later segment is mapped over an earlier one.
        if kind == _LOADED and is_inside:
            place = address - begin + offset
    if place is None:
        raise ValueError("it is a damaged ELF file: an address leads out of it")
    return place


def _text_at(file: BinaryIO, place: int) -> str:
    file.seek(place)
    return os.fsdecode(file.read(_LONGEST).partition(b"\0")[0])
