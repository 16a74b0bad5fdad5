"""The host's part of the Triton kernels: rows from tensors, tiles from shapes, and the launch.

Kernels are launched as they are, not behind a registered op: that is the cheapest call, and Dynamo and Inductor trace
the launch itself, so that a compiled model contains the kernel and plans its memory. Nothing is tuned at run time:
tiles follow from the shape, so that the first call of a shape is like any other.
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
"""The dtypes that the kernels take; they compute in float32, so float64 runs the native definition."""

WIDEST = 16384
"""Columns that a program holds in registers at once; it goes over wider rows in steps, twice."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True where kernels are interpreted on the CPU: ``TRITON_INTERPRET=1`` when this module was imported."""


class Tile(NamedTuple):
    """The share of one program: that many rows and columns, powers of two, by so many warps."""

    rows: int
    columns: int
    warps: int


def power_of_two(size: int, most: int = 2**30) -> int:
    """Return the least power of two from ``size`` on, but at most ``most``.

    By comparisons: a size that a compiler leaves open then stays open, between two powers.
    """
    power = 1
    while power < size and power < most:
        power *= 2
    return power


def tile_of(width: int, elements: int, widest: int) -> Tile:
    """Return a tile of about ``elements``: several narrow rows, or one wide row, or ``widest`` columns of it.

    A thread gets eight to sixteen elements, one or two loads of 16 bytes in half types; more only where a row needs
    them. The number of rows has no say, so that it may change from call to call without another compilation.
    """
    columns = power_of_two(width, widest)
    rows = max(1, elements // columns)
    return Tile(rows, columns, min(16, max(1, rows * columns // 512)))


def as_rows(x: Tensor, width: int) -> Tensor:
    """View ``x`` as ``[rows, width]`` with adjacent columns; copy it where the strides do not allow it."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(-1) == 1 or width == 1 else rows.contiguous()


def writable(x: Tensor) -> bool:
    """Tell whether ``as_rows`` is a view of ``x`` for certain, through which a kernel may write: no shared element."""
    return x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])


def entries_apart(x: Tensor) -> bool:
    """Tell whether each entry of the first dimension is contiguous and shares no element with another."""
    entry = x[:1]
    return entry.is_contiguous() and (x.stride(0) >= entry.numel() or x.shape[0] == 1)


def apart(x: Tensor, y: Tensor) -> bool:
    """Tell whether a kernel may write both of two ``writable`` tensors: they share no element, for certain.

    What Dynamo traces has no addresses, and neither have ``meta`` tensors; they are apart unless they are one object.
    """
    if torch.compiler.is_compiling() or x.is_meta:
        return x is not y
    if x is y or not (values_are_known(x) and values_are_known(y)):
        return False
    first, second = sorted((x, y), key=Tensor.data_ptr)
    distance = (second.data_ptr() - first.data_ptr()) // x.element_size()
    if distance > sum(
        (size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True)
    ):
        return True
    # Columns of one matrix, as query and key are in the result of one projection, take turns row by row.
    columns = x.dim() == y.dim() == 2 and x.stride(0) == y.stride(0)
    return columns and first.shape[1] <= distance % x.stride(0) <= x.stride(0) - second.shape[1]


def replaces(
    form: Functional[Arguments, Result],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Register a kernel for a form; what it cannot take, float64 and tensors of the CPU, goes to the definition."""

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
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.dtype not in COMPUTED:
                return False
            if value.device.type == "cpu" and not INTERPRETED:
                return False
    return True


def launch(
    kernel: Any, programs: int, tile: Tile, first: Tensor, *others: Any, **constants: Any
) -> None:
    """Run ``kernel``, whose first argument is ``first``, by that many programs of a tile each, on its device."""
    constants |= {"tile_rows": tile.rows, "tile_columns": tile.columns, "num_warps": tile.warps}
    index = first.device.index
    if (
        torch.compiler.is_compiling()
        or index is None
        or index == torch.accelerator.current_device_index()
    ):
        kernel[(programs,)](first, *others, **constants)
    else:
        with torch.accelerator.device_index(index):  # Triton launches on the current device
            kernel[(programs,)](first, *others, **constants)
