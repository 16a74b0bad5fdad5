"""Read a GGUF file in pieces: rows and columns of blocks, as numbers or as bytes."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from opgraft.base.files import without_waiting
from opgraft.errors import CheckpointError
from opgraft.models.extras import import_extra
from opgraft.models.gguf_header import TensorRow, read_header
from opgraft.models.lazy import MAPPED_BYTES, Bounds, LazyTensor, StoredTensor

PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
    }
)
"""Types without blocks. Their numbers are read without a change."""


@dataclass(frozen=True)
class GGUFFile:
    """The metadata and the tensors of a file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]


class _MappedFile:
    """The bytes of a file in memory.

    The file is mapped anew after ``MAPPED_BYTES``, which frees the pages that were read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._data = self._mapped()

    def _mapped(self) -> mmap.mmap:
        try:
            with open(self._path, "rb", opener=without_waiting) as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # mmap raises ValueError for an empty file.
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self._path} is no whole GGUF file ({error}): download or save it again"
            ) from error

    def header_bytes(self) -> memoryview:
        return memoryview(self._data)

    def array(self, row: TensorRow, width: int, bounds: Bounds) -> Any:
        """Return a copy of a part of the bytes of a tensor ``[..., width]``."""
        if self._read > MAPPED_BYTES:
            self._data = self._mapped()
            self._read = 0
        self._read += math.prod(map(len, bounds))
        numpy = import_extra("numpy")
        flat = numpy.frombuffer(self._data, numpy.uint8, row.end - row.begin, row.begin)
        whole = flat.reshape(*row.shape[:-1], width)
        index = tuple(slice(one.start, one.stop) for one in bounds)
        # A view would keep this mapping alive, with all pages that were read.
        return numpy.array(whole[index], order="C")


class _Blocks(StoredTensor):
    """The bytes of a tensor."""

    def __init__(self, file: _MappedFile, row: TensorRow) -> None:
        rows = math.prod(row.shape[:-1])
        self._width = (row.end - row.begin) // max(1, rows)
        super().__init__((*row.shape[:-1], self._width), torch.uint8, row.type)
        self._file = file
        self._row = row

    def read(self, bounds: Bounds) -> torch.Tensor:
        if not all(bounds):
            return torch.empty(tuple(map(len, bounds)), dtype=torch.uint8)
        return torch.from_numpy(self._file.array(self._row, self._width, bounds))


class _StoredTensor(StoredTensor):
    """The numbers of a tensor. Blocks become float32."""

    def __init__(self, file: _MappedFile, row: TensorRow) -> None:
        dtype = PLAIN.get(row.type, torch.float32)
        quantization = None if row.type in PLAIN else row.type
        super().__init__(row.shape, dtype, quantization)
        self._blocks = _Blocks(file, row)
        gguf = import_extra("gguf")
        self._type = gguf.GGMLQuantizationType[row.type]
        self._values, self._bytes = gguf.GGML_QUANT_SIZES[self._type]

    def blocks(self) -> StoredTensor:
        return self._blocks if self.quantization else super().blocks()

    def read(self, bounds: Bounds) -> torch.Tensor:
        columns = bounds[-1]
        # The columns may begin and end within a block.
        first = columns.start // self._values
        last = -(-columns.stop // self._values)
        width = range(first * self._bytes, last * self._bytes)
        blocks = self._blocks.read((*bounds[:-1], width))
        if not blocks.numel():
            return torch.empty(tuple(map(len, bounds)), dtype=self.dtype)
        if not self.quantization:
            return blocks.view(self.dtype)
        numbers = torch.from_numpy(_dequantize(blocks.numpy(), self._type))
        start = columns.start - first * self._values
        return numbers[..., start : start + len(columns)]


def _dequantize(blocks: Any, kind: Any) -> Any:
    """Return the float32 numbers of blocks."""
    return import_extra("gguf.quants").dequantize(blocks, kind)


@functools.cache
def _is_readable(name: str) -> bool:
    """Return True if the library can make numbers from the blocks of a type."""
    gguf = import_extra("gguf")
    kind = gguf.GGMLQuantizationType[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    # The library lists more types than it can read, and has no list of the latter.
    block = import_extra("numpy").zeros((1, size), "uint8")
    try:
        _dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def open_gguf(path: Path) -> GGUFFile:
    """Check a file and return its metadata and its tensors by name. No tensor is read.

    Raises:
        CheckpointError: the file is no whole and sound GGUF file, or has tensors of types that
            cannot be read. The message lists all faults.
        InputError: the library gguf is not installed.
    """
    file = _MappedFile(path)
    header = read_header(path, file.header_bytes())
    types = sorted({row.type for row in header.rows} - set(PLAIN))
    problems = [
        f"tensors of type {name}, which gguf cannot read"
        for name in types
        if not _is_readable(name)
    ]
    if problems:
        raise CheckpointError.listing(
            f"{path} cannot be loaded", problems, "take a file in another quantization"
        )
    tensors = {row.name: LazyTensor(_StoredTensor(file, row)) for row in header.rows}
    return GGUFFile(header.metadata, tensors)
