"""Reading a safetensors file in pieces, after its header was checked against the file.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from opgraft.errors import CheckpointError
from opgraft.files import without_waiting
from opgraft.models.extras import import_extra
from opgraft.models.lazy import MAPPED_BYTES, Bounds, LazyTensor, StoredTensor, cut_short
from opgraft.text import described

_LONGEST_HEADER = 100_000_000  # the library's own limit
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
DTYPES: Mapping[str, torch.dtype] = {
    key: getattr(torch, name) for key, name in _NAMES.items() if hasattr(torch, name)
}


@dataclass(frozen=True)
class Entry:
    """One tensor of the header: its dtype, its shape, and the bytes ``[begin, end)`` of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file. It is mapped, and mapped anew from time to time, so that it takes little memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._open = self._opened()

    def _opened(self) -> Any:
        library = import_extra("safetensors")
        try:
            return library.safe_open(self._path, framework="pt")
        except (library.SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._path} is no whole safetensors file ({error}): download or save it again"
            ) from error
        except RuntimeError as error:  # torch's, which maps the file
            raise CheckpointError(
                f"{self._path} cannot be mapped into memory: {described(error)}"
            ) from error

    def read(self, name: str, bounds: Bounds, dtype: torch.dtype) -> torch.Tensor:
        """Read a part of one tensor."""
        if self._read > MAPPED_BYTES:
            self._open, self._read = self._opened(), 0
        self._read += math.prod(map(len, bounds)) * dtype.itemsize
        if not bounds:
            tensor: torch.Tensor = self._open.get_tensor(name)
            return tensor
        part: torch.Tensor = self._open.get_slice(name)[
            tuple(slice(one.start, one.stop) for one in bounds)
        ]
        return part


class _Stored(StoredTensor):
    def __init__(self, file: SafetensorsFile, entry: Entry) -> None:
        super().__init__(entry.shape, entry.dtype)
        self._file, self._name = file, entry.name

    def read(self, bounds: Bounds) -> torch.Tensor:
        if not all(bounds):
            return torch.empty(tuple(map(len, bounds)), dtype=self.dtype)
        return self._file.read(self._name, bounds, self.dtype)


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Check a file and return its tensors by name. No tensor is read.

    Raises:
        CheckpointError: it is no whole and sound safetensors file; the message lists all that is wrong.
    """
    header, data_bytes = _header(path)
    header.pop("__metadata__", None)
    entries, problems = [], []
    for name, row in header.items():
        entry, problem = _entry(name, row)
        entries += [entry] if entry else []
        problems += [f"tensor {name!r:.200}: {problem}"] if problem else []
    problems += _misplaced(entries, data_bytes, complete=not problems)
    if problems:
        raise CheckpointError.listing(
            f"{path} is no sound safetensors file", problems, "download or save it again"
        )
    file = SafetensorsFile(path)
    return {entry.name: LazyTensor(_Stored(file, entry)) for entry in entries}


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the number of bytes of data behind it."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ValueError("it is no regular file")
            size = state.st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"it has {size} bytes, and a header of {length}")
            header = json.loads(file.read(length).decode(), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file ({error}): download or save it again"
        ) from error
    return header, size - 8 - length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"its header has {twice!r:.200} twice")
    return found


def _entry(name: str, row: object) -> tuple[Entry | None, str]:
    """Return the entry of one tensor, with no problem, or None and the problem."""
    if not isinstance(row, dict):
        return None, "its entry is no JSON object"
    dtype = DTYPES.get(row["dtype"]) if isinstance(row.get("dtype"), str) else None
    shape: Any = row.get("shape")
    offsets: Any = row.get("data_offsets")
    if dtype is None:
        return None, f"the dtype {row.get('dtype')!r:.50} is not known (known: {', '.join(DTYPES)})"
    if not _are_sizes(shape):
        return None, f"the shape is {shape!r:.100}, expected a list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return None, f"data_offsets is {offsets!r:.100}, expected two offsets"
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        return (
            None,
            f"the shape {shape!r:.100} in {row['dtype']} takes {needed} bytes, and it has {end - begin}",
        )
    return Entry(name, dtype, tuple(shape), begin, end), ""


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 1 << 63 for size in value
    )


def _misplaced(entries: list[Entry], data_bytes: int, *, complete: bool) -> Iterator[str]:
    """Yield what is wrong with the places of the tensors; holes only where all entries could be read."""
    ordered = sorted(entries, key=lambda entry: (entry.begin, entry.end))
    yield from cut_short([(entry.name, entry.end) for entry in ordered], data_bytes)
    for one, two in itertools.pairwise(ordered):
        if two.begin < one.end:
            yield f"tensors {one.name!r:.200} and {two.name!r:.200} overlap"
        elif two.begin > one.end and complete:
            yield f"{two.begin - one.end} bytes before tensor {two.name!r:.200} belong to no tensor"
    if complete:
        edges = (
            (ordered[0].begin, data_bytes - max(entry.end for entry in ordered))
            if ordered
            else (0, data_bytes)
        )
        yield from (
            f"{edge} bytes at an edge of the data belong to no tensor" for edge in edges if edge > 0
        )
