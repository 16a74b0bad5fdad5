"""Read a safetensors file in pieces.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from opgraft.base.files import without_waiting
from opgraft.base.text import described
from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.lazy import (
    MAPPED_BYTES,
    Bounds,
    FilePart,
    LazyTensor,
    StoredTensor,
    cut_short,
)

_ADVICE = "download or save it again"
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
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {key: getattr(torch, name) for key, name in _NAMES.items() if hasattr(torch, name)}
)


class SafetensorsFile:
    """An open file in memory.

    The file is mapped anew after ``MAPPED_BYTES``, which frees the pages that were read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._mapped: _MappedTensors | None = None
        _expect_regular(path)
        self._open = self._opened()

    def _opened(self) -> Any:
        """Map the file. The library checks its header."""
        library = import_extra("safetensors")
        try:
            return library.safe_open(self._path, framework="pt")
        except (library.SafetensorError, OSError) as error:
            reason = _cut_short(self._path) or str(error)
            raise CheckpointError(
                f"{self._path} is no whole safetensors file ({reason}): {_ADVICE}"
            ) from error
        # torch maps the file.
        except RuntimeError as error:
            raise CheckpointError(
                f"{self._path} cannot be mapped into memory: {described(error)}"
            ) from error

    def tensors(self) -> dict[str, LazyTensor]:
        """Return the tensors by name. No tensor is read.

        Raises:
            CheckpointError: torch has no dtype for some tensors.
        """
        found: dict[str, LazyTensor] = {}
        problems = []
        # The library's object is no mapping.
        for name in self._open.keys():  # noqa: SIM118
            part = self._open.get_slice(name)
            dtype = DTYPES.get(part.get_dtype())
            if dtype is None:
                problems.append(f"tensor {name!r:.200}: torch has no dtype {part.get_dtype()}")
            else:
                found[name] = LazyTensor(_StoredTensor(self, name, part.get_shape(), dtype))
        if problems:
            advice = "save it with dtypes of this torch"
            raise CheckpointError.listing(f"{self._path} cannot be read", problems, advice)
        return found

    def read(self, name: str, bounds: Bounds, dtype: torch.dtype) -> torch.Tensor:
        """Read a part of one tensor."""
        if self._read > MAPPED_BYTES:
            self._open = self._opened()
            self._read = 0
        self._read += math.prod(map(len, bounds)) * dtype.itemsize
        # The library cannot slice a scalar.
        if not bounds:
            tensor: torch.Tensor = self._open.get_tensor(name)
            return tensor
        index = tuple(slice(one.start, one.stop) for one in bounds)
        part: torch.Tensor = self._open.get_slice(name)[index]
        return part

    def place(self, name: str, size: int) -> FilePart | None:
        """Return the bytes of one tensor in the mapped file; ``None`` if there are not ``size``."""
        if self._mapped is None:
            self._mapped = _mapped(self._path)
        start, end = self._mapped.offsets.get(name, (0, 0))
        memory = self._mapped.memory
        # The library has checked these bounds. Another process may have cut the file since.
        if memory is None or end > len(memory):
            return None
        if end - start != size:
            return None
        return FilePart(memory, start, size)


class _MappedTensors(NamedTuple):
    """A mapped file, and the first and last byte of each tensor.

    Attributes:
        memory: the file; ``None`` if it cannot be mapped.
        offsets: from the beginning of the file.
    """

    memory: mmap.mmap | None
    offsets: Mapping[str, tuple[int, int]]


def _mapped(path: Path) -> _MappedTensors:
    """Map a file, and read the places of its tensors."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            # A copy on write: nobody changes the file by a write to a weight.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8 : 8 + length])
        header.pop("__metadata__", None)
        begin = 8 + length
        offsets = {}
        for name, row in header.items():
            first, last = map(int, row["data_offsets"])
            offsets[name] = (begin + first, begin + last)
    # The file has changed since the library checked its header.
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return _MappedTensors(None, {})
    return _MappedTensors(memory, offsets)


class _StoredTensor(StoredTensor):
    def __init__(
        self, file: SafetensorsFile, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        self._file = file
        self._name = name

    def read(self, bounds: Bounds) -> torch.Tensor:
        # An empty range is false.
        if not all(bounds):
            return torch.empty(tuple(map(len, bounds)), dtype=self.dtype)
        return self._file.read(self._name, bounds, self.dtype)

    def place(self, bounds: Bounds) -> FilePart | None:
        # Whole rows lie one after another.
        rest = list(map(len, bounds[1:]))
        if rest != list(self.shape[1:]):
            return None
        # A scalar has no rows.
        if not bounds or not all(bounds):
            return None
        whole = self._file.place(self._name, self.shape.numel() * self.dtype.itemsize)
        if whole is None:
            return None
        rows = bounds[0]
        row_bytes = whole.size // self.shape[0]
        start = whole.start + rows.start * row_bytes
        return FilePart(whole.memory, start, len(rows) * row_bytes)


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Open a file and return its tensors by name. No tensor is read.

    Raises:
        CheckpointError: the file is no whole and sound safetensors file, or torch lacks a dtype.
    """
    return SafetensorsFile(path).tensors()


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], bytes]:
    """Read a small file once, as a whole. Return its tensors by name, and its bytes.

    Raises:
        CheckpointError: the file is no whole and sound safetensors file, or torch lacks a dtype.
    """
    library = import_extra("safetensors")
    _expect_regular(path)
    try:
        content = path.read_bytes()
        parts = library.deserialize(content)
    except (library.SafetensorError, OSError) as error:
        reason = _cut_short(path) or str(error)
        raise CheckpointError(
            f"{path} is no whole safetensors file ({reason}): {_ADVICE}"
        ) from error
    tensors = {}
    for name, part in parts:
        dtype = DTYPES.get(part["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{path} cannot be read: tensor {name!r:.200}: torch has no dtype {part['dtype']}: "
                "save it with dtypes of this torch"
            )
        # torch warns of memory that it may not write to, and takes no empty memory.
        data = bytearray(part["data"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(part["shape"])
    return tensors, content


def _expect_regular(path: Path) -> None:
    """Refuse a pipe or a device. The library would wait for data.

    Raises:
        CheckpointError: the file is a pipe or a device, or cannot be opened.
    """
    try:
        with open(path, "rb", opener=without_waiting) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file ({error}): {_ADVICE}"
        ) from error
    if not regular:
        raise CheckpointError(
            f"{path} is no whole safetensors file (it is no regular file): {_ADVICE}"
        )


def _cut_short(path: Path) -> str:
    """Return a description of a file without its end; empty if the file has another fault."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size - 8 - length
            header = json.loads(file.read(length if size >= 0 else 0))
        header.pop("__metadata__", None)
        ends = sorted((row["data_offsets"][1], name) for name, row in header.items())
        return next(cut_short([(name, end) for end, name in ends], size), "")
    # The header is damaged, too.
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ""
