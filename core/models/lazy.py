"""Tensors that stay in their files. A read takes only the part that is indexed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from mmap import mmap
from typing import Any, NamedTuple

import torch

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk when a tensor is copied. The chunk's memory comes on top of the weights."""

MAPPED_BYTES = 1 << 22
"""A file is mapped anew after so many bytes, as pages that were read count as process memory."""

Bounds = tuple[range, ...]
"""A part of a tensor: a range of indices per dimension."""


class FilePart(NamedTuple):
    """Bytes of a file in memory, which are the numbers of a tensor one after another.

    Attributes:
        memory: the whole file. Writes do not reach the file.
        start: the first byte.
        size: the number of bytes.
    """

    memory: mmap
    start: int
    size: int


class StoredTensor(ABC):
    """One tensor of a file.

    Attributes:
        shape: the shape of the whole tensor.
        dtype: the dtype of the tensors that ``read`` returns.
        quantization: the format of the blocks, such as ``"Q4_1"``; ``None`` for plain numbers.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, quantization: str | None = None
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.quantization = quantization

    @abstractmethod
    def read(self, bounds: Bounds) -> torch.Tensor:
        """Read the part within ``bounds``. Do not write to the result."""

    def place(self, bounds: Bounds) -> FilePart | None:
        """Return the place of the part within ``bounds``; ``None`` if its bytes are not mapped."""
        return None

    def blocks(self) -> StoredTensor:
        """Return the bytes of the file, uint8 ``[..., bytes of a row]``.

        Raises:
            NotImplementedError: the tensor is not quantized.
        """
        raise NotImplementedError(f"a tensor of {self.dtype} has no quantized blocks")


class LazyTensor:
    """A tensor in a file, or a part of it, as a ``LoadedTensor``.

    Functions of torch accept and read a lazy tensor. ``Tensor.copy_`` reads in chunks.
    """

    def __init__(self, stored: StoredTensor, bounds: Bounds | None = None) -> None:
        self._stored = stored
        if bounds is None:
            bounds = tuple(map(range, stored.shape))
        self._bounds = bounds

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
        """Return the format of the blocks, such as ``"Q4_1"``; ``None`` for plain numbers."""
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
        """Return the part ``[start, start + length)`` of dimension ``dim`` without reading.

        Raises:
            IndexError: the part is not within the tensor.
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

    def place(self) -> FilePart | None:
        """Return the place in a mapped file; ``None`` if the numbers have to be read."""
        return self._stored.place(self._bounds)

    def blocks(self) -> LazyTensor:
        """Return the bytes of the file for this part, uint8.

        Raises:
            NotImplementedError: the tensor is not quantized.
            IndexError: the columns begin or end within a block.
        """
        stored = self._stored.blocks()
        # A row has as many blocks as its numbers fill, so that columns and bytes are proportional.
        columns = self._bounds[-1]
        all_columns = self._stored.shape[-1]
        all_bytes = stored.shape[-1]
        first, first_rest = divmod(columns.start * all_bytes, all_columns)
        last, last_rest = divmod(columns.stop * all_bytes, all_columns)
        if first_rest or last_rest:
            raise IndexError(
                f"columns [{columns.start}, {columns.stop}) cut a block of {self.quantization}"
            )
        return LazyTensor(stored, (*self._bounds[:-1], range(first, last)))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read ``tensor[index]``.

        Slices of step 1 at the beginning of the index read their part only. Other parts of the
        index apply after the read.
        """
        items = index if isinstance(index, tuple) else (index,)
        part = self
        dim = 0
        for item in items:
            # Stored tensors are read by ranges of step 1.
            if not isinstance(item, slice) or item.step not in (None, 1) or dim == self.ndim:
                break
            start, stop, _ = item.indices(self.shape[dim])
            part = part.narrow(dim, start, max(0, stop - start))
            dim += 1
        read = part._stored.read(part._bounds)
        if dim == len(items):
            return read
        # The first dimensions are cut already. An Ellipsis stands for dimensions after these.
        return read[(slice(None),) * dim + items[dim:]]

    def copy_to(self, target: torch.Tensor) -> None:
        """Read into a tensor of the same shape and any dtype, a chunk of rows at a time."""
        # A scalar has no rows, and copy_ itself expands a smaller tensor.
        if not self.ndim or self.shape != target.shape:
            target.copy_(self[...])
            return
        for start, length in self._chunks():
            target.narrow(0, start, length).copy_(self.narrow(0, start, length)[...])

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the first row and the number of rows of each chunk."""
        rows = self.shape[0]
        # A dimension may be 0, and one row may be larger than a chunk.
        row_bytes = self.numel() // max(1, rows) * self.dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for start in range(0, rows, step):
            yield start, min(step, rows - start)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        # A whole tensor would double the memory of a weight while it is copied.
        if function is torch.Tensor.copy_ and not isinstance(arguments[0], cls):
            target, lazy = arguments[:2]
            lazy.copy_to(target)
            return target
        read_arguments = [_read_value(value) for value in arguments]
        read_options = {key: _read_value(value) for key, value in (options or {}).items()}
        return function(*read_arguments, **read_options)


def _read_value(value: Any) -> Any:
    """Read the lazy tensors in an argument of a function of torch."""
    # torch.cat and its kin take a list of tensors.
    if isinstance(value, list | tuple):
        return type(value)(map(_read_value, value))
    return value[...] if isinstance(value, LazyTensor) else value


def cut_short(ends: Sequence[tuple[str, int]], size: int) -> Iterator[str]:
    """Yield a message if the file of some tensors ends too early.

    Args:
        ends: name and end of every tensor, in the order of the file.
        size: the bytes of data in the file.
    """
    beyond = [name for name, end in ends if end > size]
    if beyond:
        needed = max(end for _, end in ends)
        yield (
            f"the file is cut short: {size} of {needed} bytes are there, without all of "
            f"{len(beyond)} of {len(ends)} tensors, from {beyond[0]!r:.200} on"
        )
