"""Tensors that stay in their files: only the part that is asked for is read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

CHUNK_BYTES = 1 << 20
"""The most that is read at a time where a tensor is copied; what a chunk takes comes on top of the weights."""

MAPPED_BYTES = 1 << 22
"""A file is mapped anew after so many bytes: pages that were read count as memory of the process until then."""

Bounds = tuple[range, ...]
"""The part of a tensor that is meant: a range of indices per dimension."""


class StoredTensor(ABC):
    """One tensor of a file.

    Attributes:
        shape: its sizes.
        dtype: the dtype of what is read.
        quantization: the name of the format of its blocks, as ``"Q4_1"``; None where it is plain numbers.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, quantization: str | None = None
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.quantization = quantization

    @abstractmethod
    def read(self, bounds: Bounds) -> torch.Tensor:
        """Read the part within ``bounds``: a tensor of their lengths, not to be written to."""

    def blocks(self) -> StoredTensor:
        """Return the bytes as they are in the file, uint8 ``[..., bytes of a row]``.

        Raises:
            NotImplementedError: it is not quantized.
        """
        raise NotImplementedError(f"a tensor of {self.dtype} has no quantized blocks")


class LazyTensor:
    """A tensor in a file, or a part of one, as a ``LoadedTensor``.

    Functions of torch accept it and read it; ``Tensor.copy_`` reads it in chunks.
    """

    def __init__(self, stored: StoredTensor, bounds: Bounds | None = None) -> None:
        self._stored = stored
        self._bounds = tuple(map(range, stored.shape)) if bounds is None else bounds

    def __repr__(self) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.quantization or self.dtype})"

    @property
    def shape(self) -> torch.Size:
        return torch.Size(map(len, self._bounds))

    @property
    def dtype(self) -> torch.dtype:
        return self._stored.dtype

    @property
    def quantization(self) -> str | None:
        """Return the format of its blocks in the file, as ``"Q4_1"``; None where it is plain numbers."""
        return self._stored.quantization

    @property
    def ndim(self) -> int:
        return len(self._bounds)

    def dim(self) -> int:
        return len(self._bounds)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> LazyTensor:
        """Return the part ``[start, start + length)`` of dimension ``dim``, which is not read yet.

        Raises:
            IndexError: it is not within the tensor.
        """
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"dimension {dim} of a tensor of shape {tuple(self.shape)}")
        dim %= self.ndim
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise IndexError(
                f"[{start}, {start + length}) of dimension {dim}, which has {self.shape[dim]}"
            )
        bounds = list(self._bounds)
        bounds[dim] = bounds[dim][start : start + length]
        return LazyTensor(self._stored, tuple(bounds))

    def blocks(self) -> LazyTensor:
        """Return the same rows as the bytes of the file, uint8; a part of the columns has to fall on whole blocks.

        Raises:
            NotImplementedError: it is not quantized.
            IndexError: the columns do not fall on whole blocks.
        """
        stored = self._stored.blocks()
        columns, total, size = self._bounds[-1], self._stored.shape[-1], stored.shape[-1]
        first, last = columns.start * size, columns.stop * size
        if first % total or last % total:
            raise IndexError(
                f"columns [{columns.start}, {columns.stop}) cut a block of {self.quantization}"
            )
        return LazyTensor(stored, (*self._bounds[:-1], range(first // total, last // total)))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read ``tensor[index]``. Leading slices of step 1 read their part only; any other index reads the rest."""
        parts = index if isinstance(index, tuple) else (index,)
        part, dim = self, 0
        for item in parts:
            if not isinstance(item, slice) or item.step not in (None, 1) or dim == self.ndim:
                break
            start, stop, _ = item.indices(self.shape[dim])
            part, dim = part.narrow(dim, start, max(0, stop - start)), dim + 1
        read = part._stored.read(part._bounds)
        return read if dim == len(parts) else read[(slice(None),) * dim + parts[dim:]]

    def copy_to(self, target: torch.Tensor) -> None:
        """Read into a tensor of the same shape, converting to its dtype, a chunk of rows at a time."""
        if not self.ndim or self.shape != target.shape:
            target.copy_(self[...])
            return
        for start, length in self._chunks():
            target.narrow(0, start, length).copy_(self.narrow(0, start, length)[...])

    def _chunks(self) -> Iterator[tuple[int, int]]:
        rows = self.shape[0]
        row_bytes = max(1, self.numel() // max(1, rows) * self.dtype.itemsize)
        step = max(1, CHUNK_BYTES // row_bytes)
        return ((start, min(step, rows - start)) for start in range(0, rows, step))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.copy_ and not isinstance(arguments[0], cls):
            arguments[1].copy_to(arguments[0])
            return arguments[0]
        return function(
            *map(_read_value, arguments),
            **{key: _read_value(value) for key, value in (options or {}).items()},
        )


def _read_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_read_value, value))
    return value[...] if isinstance(value, LazyTensor) else value


def cut_short(ends: Sequence[tuple[str, int]], size: int) -> Iterator[str]:
    """Yield one sentence if tensors, each with the byte that it ends at, reach beyond the ``size`` of a file's data.

    Args:
        ends: name and end of every tensor, in the order of the file.
        size: bytes that there are.
    """
    beyond = [name for name, end in ends if end > size]
    if beyond:
        yield (
            f"the file is cut short: {size} of {max(end for _, end in ends)} bytes are there, without all of "
            f"{len(beyond)} of {len(ends)} tensors, from {beyond[0]!r:.200} on"
        )
