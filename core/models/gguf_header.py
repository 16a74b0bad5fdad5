"""The header of a GGUF file: metadata and the places of the tensors, checked against the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the library
``gguf`` makes an array per token: a usual vocabulary takes seconds and 100 MB, and a damaged count
makes the reader run without end. The header is therefore read here. The library still has the
list of types and makes numbers from blocks.
"""

from __future__ import annotations

import array
import itertools
import math
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.lazy import cut_short

_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_SMALLEST_ROW = 24
"""Bytes of the shortest entry of a tensor, to tell a damaged count from a plausible one."""

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
"""Type of GGUF → the code of ``struct``."""

_ARRAYS = {**_SCALARS, 7: "B"}
"""Type of GGUF → the code of ``array``, which has no flags."""

_TensorInfo = tuple[str, tuple[int, ...], int, int]
"""Name, shape, number of the type, and offset of a tensor."""


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a file.

    Attributes:
        name: the name in the file.
        type: the name of the type, such as ``"Q4_K"``.
        shape: the fastest dimension is last.
        begin: the place of the first byte.
        end: the place after the last byte.
    """

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
    """A place in the bytes of a header.

    The methods raise ``ValueError`` instead of reading beyond the end.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.place = 0

    def take(self, length: int) -> memoryview:
        begin = self.place
        if length > len(self.data) - begin:
            raise ValueError(
                f"it ends at byte {len(self.data)}, within a header that needs {length} more"
            )
        self.place += length
        return self.data[begin : self.place]

    def number(self, code: str) -> Any:
        form = "<" + code
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        return self.number(_code(_SCALARS, kind))

    def _array(self) -> Any:
        kind = self.number("I")
        count = self.number("Q")
        if kind == _STRING:
            return self._texts(self._plausible(count, 8))
        numbers = array.array(_code(_ARRAYS, kind))
        numbers.frombytes(self.take(numbers.itemsize * count))
        # GGUF is little-endian, and array has the order of this machine.
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _texts(self, count: int) -> list[str]:
        """Read many texts, such as a vocabulary: in a third of the time of as many ``text``."""
        texts = []
        data = self.data
        place = self.place
        end = len(data)
        for _ in range(count):
            begin = place + _LENGTH.size
            if begin <= end:
                place = begin + _LENGTH.unpack_from(data, place)[0]
            if begin > end or place > end:
                raise ValueError(f"it ends at byte {end}, within a header that has more texts")
            texts.append(str(data[begin:place], "utf-8"))
        self.place = place
        return texts

    def _plausible(self, count: int, size: int) -> int:
        # A damaged count of 2**60 would keep a loop busy for years.
        if count * size > len(self.data) - self.place:
            raise ValueError(f"a count of {count} needs more bytes than the file has")
        return count

    def counts(self) -> tuple[int, int]:
        """Read the number of tensors and the number of pairs of metadata."""
        tensors = self.number("Q")
        pairs = self.number("Q")
        # A pair has at least the length of a key, and a type: half as many bytes as a tensor.
        return self._plausible(tensors, _SMALLEST_ROW), self._plausible(pairs, _SMALLEST_ROW // 2)


def _code(codes: Mapping[int, str], kind: int) -> str:
    if kind not in codes:
        raise ValueError(
            f"type {kind} of a value is not known here (arrays of arrays are not read)"
        )
    return codes[kind]


def _sound_rows(infos: Sequence[Any], start: int) -> tuple[list[Any], list[str]]:
    """Return a row for each sound tensor, and the faults of the others."""
    gguf = import_extra("gguf")
    rows = []
    times = Counter(name for name, *_ in infos)
    problems = [f"tensor {name!r:.200} occurs {n} times" for name, n in times.items() if n > 1]
    for info in infos:
        try:
            rows.append(_tensor_row(info, start, gguf))
        except ValueError as error:
            problems.append(f"tensor {info[0]!r:.200}: {error}")
    return rows, problems


def read_header(path: Path, data: memoryview) -> Header:
    """Read and check the header of a file.

    Args:
        path: the file, for messages.
        data: the bytes of the file.

    Raises:
        CheckpointError: the file is no whole and sound GGUF file. The message lists all faults of
            the tensors.
        InputError: the library ``gguf`` is not installed.
    """
    cursor = _Cursor(data)
    try:
        tensors, pairs = _read_counts(cursor)
        metadata = _read_metadata(cursor, pairs)
        infos = [_read_info(cursor) for _ in range(tensors)]
        alignment = _alignment(metadata)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no whole GGUF file ({error}): download or save it again"
        ) from error
    # The bytes of tensors begin at the next multiple of the alignment.
    start = -(-cursor.place // alignment) * alignment
    rows, problems = _sound_rows(infos, start)
    # The size of a tensor of an unknown type is not known, and would look like a gap.
    problems += _misplaced(rows, start, len(data), alignment, complete=not problems)
    if problems:
        raise CheckpointError.listing(
            f"{path} is no sound GGUF file", problems, "download or save it again"
        )
    return Header(metadata, tuple(rows))


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Read the beginning of a file: the numbers of tensors and of pairs of metadata."""
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        known = ", ".join(map(str, _VERSIONS))
        raise ValueError(f"version {version} is not read here (known: {known}, little-endian)")
    return cursor.counts()


def _alignment(metadata: Mapping[str, Any]) -> int:
    """Return the alignment of tensors in bytes."""
    alignment = metadata.get("general.alignment", 32)
    is_number = type(alignment) is int and alignment > 0
    # A power of two has one bit.
    if not is_number or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r:.50}, expected a power of two")
    return int(alignment)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"its metadata has {key!r:.200} twice")
        metadata[key] = cursor.value()
    return metadata


def _read_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.text()
    dimensions = cursor.number("I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(
            f"tensor {name!r:.200} has {dimensions} dimensions, at most {_MOST_DIMENSIONS} are "
            "possible"
        )
    sizes = tuple(cursor.number("Q") for _ in range(dimensions))
    kind = cursor.number("I")
    offset = cursor.number("Q")
    # GGUF has the fastest dimension first.
    return name, sizes[::-1], kind, offset


def _tensor_row(info: _TensorInfo, start: int, gguf: Any) -> TensorRow:
    """Return the row of a tensor.

    Args:
        info: the tensor's entry.
        start: the place of the first tensor's bytes.
        gguf: the library.

    Raises:
        ValueError: the type is not known, or rows are no whole blocks of the type.
    """
    name, shape, kind, offset = info
    try:
        known = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise ValueError(f"its type {kind} is not known to gguf") from error
    values, size = gguf.GGML_QUANT_SIZES[known]
    columns = shape[-1] if shape else 0
    if not shape or columns % values:
        raise ValueError(f"rows of {columns} are no whole blocks of {known.name} ({values} values)")
    begin = start + offset
    blocks = math.prod(shape) // values
    return TensorRow(name, known.name, shape, begin, begin + blocks * size)


def _misplaced(
    rows: list[TensorRow], start: int, size: int, alignment: int, *, complete: bool
) -> Iterator[str]:
    """Yield the faults in the places of tensors.

    Args:
        rows: the tensors.
        start: the place of the first tensor's bytes.
        size: bytes of the file.
        alignment: of the tensors, in bytes.
        complete: all rows could be read, so that bytes between tensors are a fault.
    """
    ordered = sorted(rows, key=lambda row: (row.begin, row.end))
    yield from cut_short([(row.name, row.end) for row in ordered], size)
    for row in ordered:
        if row.begin % alignment:
            yield (
                f"tensor {row.name!r:.200}: it begins at byte {row.begin}, which is no multiple "
                f"of {alignment}"
            )
    for one, two in itertools.pairwise(ordered):
        gap = two.begin - one.end
        # A gap below the alignment fills the row up to it.
        if gap < 0:
            yield f"tensors {one.name!r:.200} and {two.name!r:.200} overlap"
        elif gap >= alignment and complete:
            yield f"{gap} bytes before tensor {two.name!r:.200} belong to no tensor"
    if complete and ordered and ordered[0].begin > start:
        gap = ordered[0].begin - start
        yield f"{gap} bytes before tensor {ordered[0].name!r:.200} belong to no tensor"
