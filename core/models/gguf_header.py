"""The header of a GGUF file: metadata and the places of the tensors, checked against the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the library ``gguf`` makes an array
per token, which takes seconds and 100 MB for a usual vocabulary, and runs on without end where a count is damaged. So
the header is read here; what types there are and how blocks become numbers is the library's to say.
"""

from __future__ import annotations

import array
import itertools
import math
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.lazy import cut_short

_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_SMALLEST_ROW = 24
"""Bytes of the shortest entry of a tensor; a count that would need more than the file has is damaged."""

_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_ARRAYS = {**_SCALARS, 7: "B"}  # the codes of struct are those of array, but for flags


@dataclass(frozen=True)
class TensorRow:
    """One tensor: the name of its type, its shape with the fastest dimension last, its bytes ``[begin, end)``."""

    name: str
    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The metadata by key, and the tensors."""

    metadata: Mapping[str, Any]
    rows: tuple[TensorRow, ...]


class _Cursor:
    """A place in the bytes of a header, which never moves beyond their end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.place = 0

    def take(self, length: int) -> memoryview:
        if length > len(self.data) - self.place:
            raise ValueError(
                f"it ends at byte {len(self.data)}, within a header that needs {length} more"
            )
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        return self._array() if kind == _ARRAY else self.number(_code(_SCALARS, kind))

    def _array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self._texts(self._plausible(count, 8))
        numbers = array.array(_code(_ARRAYS, kind))
        numbers.frombytes(self.take(numbers.itemsize * count))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _texts(self, count: int) -> list[str]:
        """Read many texts, such as a vocabulary, in a third of the time that one by one takes."""
        texts, data, place, end = [], self.data, self.place, len(self.data)
        for _ in range(count):
            begin = place + _LENGTH.size
            place = begin + _LENGTH.unpack_from(data, place)[0] if begin <= end else end + 1
            if place > end:
                raise ValueError(f"it ends at byte {end}, within a header that has more texts")
            texts.append(str(data[begin:place], "utf-8"))
        self.place = place
        return texts

    def _plausible(self, count: int, size: int) -> int:
        if count * size > len(self.data) - self.place:
            raise ValueError(f"a count of {count} needs more bytes than the file has")
        return count

    def counts(self) -> tuple[int, int]:
        """Read how many tensors and how many pairs of metadata follow."""
        tensors, pairs = self.number("Q"), self.number("Q")
        return self._plausible(tensors, _SMALLEST_ROW), self._plausible(pairs, _SMALLEST_ROW // 2)


def _code(codes: Mapping[int, str], kind: int) -> str:
    if kind not in codes:
        raise ValueError(
            f"type {kind} of a value is not known here (arrays of arrays are not read)"
        )
    return codes[kind]


def read_header(path: Path, data: memoryview) -> Header:
    """Read and check the header of a file whose bytes are ``data``.

    Raises:
        CheckpointError: it is no whole and sound GGUF file; the message lists all that is wrong with its tensors.
    """
    cursor = _Cursor(data)
    try:
        tensors, pairs = _begin(cursor)
        metadata = _pairs(cursor, pairs)
        infos = [_info(cursor) for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r:.50}, expected a power of two")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no whole GGUF file ({error}): download or save it again"
        ) from error
    start = -(-cursor.place // alignment) * alignment
    rows, problems = [], [f"tensor {name!r:.200} occurs {n} times" for name, n in _repeated(infos)]
    for name, shape, kind, offset in infos:
        row, problem = _row(name, shape, kind, start + offset)
        rows += [row] if row else []
        problems += [f"tensor {name!r:.200}: {problem}"] if problem else []
    problems += _misplaced(rows, start, len(data), alignment, complete=not problems)
    if problems:
        raise CheckpointError.listing(
            f"{path} is no sound GGUF file", problems, "download or save it again"
        )
    return Header(metadata, tuple(rows))


def _begin(cursor: _Cursor) -> tuple[int, int]:
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(
            f"version {version} is not read here (known: {', '.join(map(str, _VERSIONS))}, little-endian)"
        )
    return cursor.counts()


def _pairs(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"its metadata has {key!r:.200} twice")
        metadata[key] = cursor.value()
    return metadata


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(
            f"tensor {name!r:.200} has {dimensions} dimensions, at most {_MOST_DIMENSIONS} are possible"
        )
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.number("I"), cursor.number("Q")


def _repeated(infos: list[tuple[str, tuple[int, ...], int, int]]) -> Iterator[tuple[str, int]]:
    return ((name, n) for name, n in Counter(info[0] for info in infos).items() if n > 1)


def _row(name: str, shape: tuple[int, ...], kind: int, begin: int) -> tuple[TensorRow | None, str]:
    """Return the row of one tensor, with no problem, or None and the problem."""
    gguf = import_extra("gguf")
    try:
        known = gguf.GGMLQuantizationType(kind)
    except ValueError:
        return None, f"its type {kind} is not known to gguf"
    block, size = gguf.GGML_QUANT_SIZES[known]
    if not shape or shape[-1] % block:
        return (
            None,
            f"rows of {shape[-1] if shape else 0} are no whole blocks of {known.name} ({block} values)",
        )
    return TensorRow(name, known.name, shape, begin, begin + math.prod(shape) // block * size), ""


def _misplaced(
    rows: list[TensorRow], start: int, size: int, alignment: int, *, complete: bool
) -> Iterator[str]:
    """Yield what is wrong with the places of the tensors; holes only where all rows could be read."""
    ordered = sorted(rows, key=lambda row: (row.begin, row.end))
    yield from cut_short([(row.name, row.end) for row in ordered], size)
    for row in ordered:
        if row.begin % alignment:
            yield f"tensor {row.name!r:.200}: it begins at byte {row.begin}, which is no multiple of {alignment}"
    for one, two in itertools.pairwise(ordered):
        if two.begin < one.end:
            yield f"tensors {one.name!r:.200} and {two.name!r:.200} overlap"
        elif two.begin - one.end >= alignment and complete:
            yield f"{two.begin - one.end} bytes before tensor {two.name!r:.200} belong to no tensor"
    if complete and ordered and ordered[0].begin > start:
        yield f"{ordered[0].begin - start} bytes before tensor {ordered[0].name!r:.200} belong to no tensor"
