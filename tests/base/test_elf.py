"""The libraries that a native library links, as the system's loader reads them."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from opgraft.base.elf import linked_libraries

NEEDED, STRINGS = 1, 5
NAMES = b"\0libharmless.so\0libevil.so\0".ljust(64, b"\0")
HARMLESS, EVIL = 1, 16
LOADED, DYNAMIC = 1, 2
BEGIN = 0x1000
"""The address in memory of the first byte of the file."""

Facts = Sequence[tuple[int, int]]


def library(*lists: Facts, places: Sequence[int] | None = None) -> bytes:
    """An ELF file of 64 bits with one segment for each list of facts.

    The names of the libraries lie at ``BEGIN + 512``, other names at ``BEGIN + 576``.

    Args:
        lists: tags and values for the loader.
        places: of the segments in the file, by the file; by default those of their addresses.
    """
    contents = [b"".join(struct.pack("<qQ", *fact) for fact in facts) for facts in lists]
    begins = [1024 * number for number in range(1, len(lists) + 1)]
    said = places or begins
    segments = [struct.pack("<IIQQQQQQ", LOADED, 4, 0, BEGIN, BEGIN, 4096, 4096, 4096)]
    for begin, place, content in zip(begins, said, contents, strict=True):
        sizes = (len(content), len(content), 8)
        segments.append(
            struct.pack("<IIQQQQQQ", DYNAMIC, 4, place, BEGIN + begin, BEGIN + begin, *sizes)
        )
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, len(segments), 0, 0, 0
    )
    file = bytearray(4096)
    parts = {0: header + b"".join(segments), 512: NAMES, 576: b"\0other\0"}
    for place, content in [*parts.items(), *zip(begins, contents, strict=True)]:
        file[place : place + len(content)] = content
    return bytes(file)


TABLE = (STRINGS, BEGIN + 512)
OTHER = (STRINGS, BEGIN + 577 - HARMLESS)

CASES = {
    "in the order of the file": (
        library([(NEEDED, EVIL), (NEEDED, HARMLESS), TABLE]),
        ["libevil.so", "libharmless.so"],
    ),
    "the last of two tables of names": (
        library([(NEEDED, HARMLESS), OTHER, TABLE]),
        ["libharmless.so"],
    ),
    "nothing behind the end mark": (
        library([(NEEDED, EVIL), TABLE, (0, 0), (NEEDED, HARMLESS), OTHER]),
        ["libevil.so"],
    ),
    "the last of two segments": (
        library([(NEEDED, HARMLESS), TABLE], [(NEEDED, EVIL), TABLE]),
        ["libevil.so"],
    ),
    "a segment by its address": (
        library([(NEEDED, HARMLESS), TABLE], [(NEEDED, EVIL), TABLE], places=[1024, 1024]),
        ["libevil.so"],
    ),
    "no libraries": (library([TABLE]), []),
    "no facts": (library(), []),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_libraries_are_those_that_the_loader_takes(tmp_path: Path, kind: str) -> None:
    """A file may say two things, and only the one that the loader reads counts."""
    content, expected = CASES[kind]
    file = tmp_path / "native.so"
    file.write_bytes(content)
    assert linked_libraries(file) == expected


def test_what_is_no_library(tmp_path: Path) -> None:
    """Text has none; a pipe, a short file and an address outside of the file are errors."""
    file = tmp_path / "native.so"
    file.write_text("no library")
    assert linked_libraries(file) is None
    file.write_bytes(library([(NEEDED, EVIL), TABLE])[:80])
    with pytest.raises(ValueError, match="damaged ELF file"):
        linked_libraries(file)
    file.write_bytes(library([(NEEDED, EVIL), (STRINGS, 7)]))
    with pytest.raises(ValueError, match="an address leads out of it"):
        linked_libraries(file)
    os.mkfifo(tmp_path / "pipe.so")
    with pytest.raises(ValueError, match="no regular file"):
        linked_libraries(tmp_path / "pipe.so")
