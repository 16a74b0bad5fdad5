"""The host's part of the Triton kernels: rows from tensors, tiles from shapes, and the launch.

No registered op stands around a launch. That is the cheapest call. Dynamo and Inductor trace the
launch itself, so a compiled model contains the kernel and plans its memory. Nothing is tuned at run
time: tiles follow from the shape, so the first call of a shape is like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton
from opgraft.binding.functional import Functional
from opgraft.ops.checks import values_are_known
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of the kernels. Kernels compute in float32, so float64 runs the native definition."""

WIDEST = 16384
"""Columns in the registers of a program. A program goes over wider rows in steps, twice."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if the CPU interprets kernels: ``TRITON_INTERPRET=1`` at the import of this module."""


class Tile(NamedTuple):
    """The share of one program: the numbers of rows and columns, powers of two, and of warps."""

    rows: int
    columns: int
    warps: int


def power_of_two(size: int, most: int = 2**30) -> int:
    """Return the least power of two from ``size`` on, but at most ``most``."""
    power = 1
    # Comparisons only: a compiler then leaves a size open between two powers.
    while power < size and power < most:
        power *= 2
    return power


def tile_of(width: int, elements: int, widest: int) -> Tile:
    """Return a tile of about ``elements``: several narrow rows, or one row of ``widest`` columns.

    A thread gets eight to sixteen elements, one or two loads of 16 bytes in half types, and more
    only for a wide row. The number of rows does not count, and may change from call to call without
    another compilation.
    """
    columns = power_of_two(width, widest)
    rows = max(1, elements // columns)
    warps = min(16, max(1, rows * columns // 512))
    return Tile(rows, columns, warps)


def as_rows(x: Tensor, width: int) -> Tensor:
    """Return ``x`` as ``[rows, width]`` with adjacent columns: a view, or a copy if need be."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(-1) == 1 or width == 1 else rows.contiguous()


def writable(x: Tensor) -> bool:
    """Return True if a kernel may write to ``x`` through ``as_rows``.

    The result of ``as_rows`` must be a view without shared elements.
    """
    if x.is_contiguous():
        return True
    return x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def entries_apart(x: Tensor) -> bool:
    """Return True if the entries of dimension 0 are contiguous, and share no element."""
    entry = x[:1]
    if not entry.is_contiguous():
        return False
    return x.stride(0) >= entry.numel() or x.shape[0] == 1


def apart(x: Tensor, y: Tensor) -> bool:
    """Return True if a kernel may write to both of two ``writable`` tensors.

    They must share no element for certain.
    """
    # Traced tensors have no addresses, and neither have tensors on meta.
    if torch.compiler.is_compiling() or x.is_meta:
        return x is not y
    if x is y or not (values_are_known(x) and values_are_known(y)):
        return False

    first, second = (x, y) if x.data_ptr() <= y.data_ptr() else (y, x)
    distance = (second.data_ptr() - first.data_ptr()) // x.element_size()
    last_of_first = 0
    for size, stride in zip(first.shape, first.stride(), strict=True):
        last_of_first += (size - 1) * stride
    if distance > last_of_first:
        return True

    # Query and key may be columns of one matrix, the result of one projection.
    if x.dim() != 2 or y.dim() != 2 or x.stride(0) != y.stride(0):
        return False
    row = x.stride(0)
    return first.shape[1] <= distance % row <= row - second.shape[1]


def replaces(
    form: Functional[Arguments, Result],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Register a kernel for a form. For float64 and tensors of the CPU, the definition runs."""

    def decorate(kernel: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(kernel)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if _launchable(args) and _launchable(kwargs.values()):
                return kernel(*args, **kwargs)
            return form.native(*args, **kwargs)

        return run

    return decorate


def _launchable(arguments: Iterable[object]) -> bool:
    for value in arguments:
        if not isinstance(value, Tensor):
            continue
        if value.is_floating_point() and value.dtype not in COMPUTED:
            return False
        if value.device.type == "cpu" and not INTERPRETED:
            return False
    return True


def launch(
    kernel: Any, programs: int, tile: Tile, first: Tensor, *others: Any, **constants: Any
) -> None:
    """Run ``kernel`` by ``programs`` programs, one tile each, on the device of ``first``.

    Args:
        kernel: the kernel.
        programs: the number of programs.
        tile: the share of a program; passed as ``tile_rows``, ``tile_columns`` and ``num_warps``.
        first: the first argument of the kernel.
        others: the other arguments.
        constants: the compile-time arguments, by name.
    """
    constants |= {"tile_rows": tile.rows, "tile_columns": tile.columns, "num_warps": tile.warps}
    index = first.device.index
    if (
        torch.compiler.is_compiling()
        or index is None
        or index == torch.accelerator.current_device_index()
    ):
        kernel[(programs,)](first, *others, **constants)
        return

    # Triton launches on the current device.
    with torch.accelerator.device_index(index):
        kernel[(programs,)](first, *others, **constants)
