"""The libraries that a native library asks the system's loader for, from its ELF file."""

from __future__ import annotations

import os
import struct
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

_NEEDED, _STRINGS = 1, 5
"""Tags of facts: the name of a library by its place among the names, and their address."""

_LONGEST = 4096  # bytes of a name
_MOST = 1 << 16  # segments of a file, and facts of a segment


def linked_libraries(path: str | Path) -> list[str] | None:
    """Return the names of the libraries that a file needs (``DT_NEEDED``), in its order.

    The answer is ``None`` if the file is no ELF file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    with open(path, "rb", opener=without_waiting) as file:
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
    header = struct.Struct(order + ("HHIQQQIHHH" if is_wide else "HHIIIIIHHH"))
    fields = header.unpack(file.read(header.size))
    place, size, count = fields[4], fields[8], fields[9]
    # Type, place in the file, address in memory, and length.
    segment = struct.Struct(order + ("I4xQQ8xQ" if is_wide else "IIIxxxxI"))
    loaded, facts = [], b""
    for number in range(count):
        file.seek(place + number * size)
        kind, offset, address, length = segment.unpack(file.read(segment.size))
        if kind == _LOADED:
            loaded.append((address, address + length, offset))
        elif kind == _DYNAMIC:
            file.seek(offset)
            facts = file.read(min(length, _MOST * 16))
    pair = struct.Struct(order + ("qQ" if is_wide else "iI"))
    tags = list(pair.iter_unpack(facts[: len(facts) // pair.size * pair.size]))
    names = [value for tag, value in tags if tag == _NEEDED]
    strings = next((value for tag, value in tags if tag == _STRINGS), 0)
    for start, end, offset in loaded:
        if start <= strings < end:
            return [_text(file, strings - start + offset + name) for name in names]
    return []


def _text(file: BinaryIO, place: int) -> str:
    file.seek(place)
    return os.fsdecode(file.read(_LONGEST).partition(b"\0")[0])
