"""Low-rank additions to the results of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    FLOATING,
    expect_floating,
    expect_integers,
    expect_same_device,
    expect_same_dtype,
    values_are_known,
)
from opgraft.ops.fakes import nothing
from torch import Tensor
from torch.nn import functional as F

__all__ = ["add_lora_"]

_INTEGERS = (torch.int32, torch.int64)
_HOST = torch.device("cpu")


@register_functional("lora", nothing, mutates=("y",))
def add_lora_(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> None:
    """Add ``x · aᵀ · bᵀ`` to ``y``, for each row with the matrices of the row's adapter.

    Source: Hu et al., arXiv:2106.09685, section 4.1. The rows of an adapter follow one another. A
    merged layer has one matrix ``a`` for each of its parts, one after another, and each part of the
    outputs reads the results of its own. Rows without an adapter are not computed. In compiled code
    the bounds are unknown, so all adapters compute all rows. An embedding has ids instead of
    inputs: the product with ``aᵀ`` is then a look-up in the columns of ``a``.

    For example, with ``bounds`` ``[2, 5, 5, 6]`` the first two rows have no adapter, the next three
    rows have adapter 0, no row has adapter 1, and the last row has adapter 2.

    Args:
        y: ``[rows, outputs]``, the results of the layer.
        x: ``[rows, inputs]``, of the same dtype; or the ids ``[rows]`` of an embedding, int32 or
            int64.
        a: ``[adapters, parts · rank, inputs]``.
        b: ``[adapters, outputs, rank]``, multiplied by the scale of the adapter.
        bounds: the first row of each adapter, and the number of rows; int32 or int64
            ``[adapters + 1]``, ascending. On the host, nobody waits for the device to read them.
        sizes: the outputs of each part.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or the bounds do not ascend.
    """
    expect_fitting(y, x, a, b, bounds, sizes)
    if not values_are_known(bounds) or not values_are_known(x):
        _add_by_all(y, x, a, b, bounds, sizes)
        return

    outputs_of_parts = list(sizes)
    ranks_of_parts = [b.shape[2]] * len(sizes)
    for adapter, (start, end) in enumerate(pairwise(_checked(bounds, len(x)))):
        if start == end:
            continue
        narrow = _narrow(x[start:end], a[adapter])
        of_parts = narrow.split_with_sizes(ranks_of_parts, 1)
        outputs = y[start:end].split_with_sizes(outputs_of_parts, 1)
        matrices = b[adapter].t().split_with_sizes(outputs_of_parts, 1)
        for of_part, output, matrix in zip(of_parts, outputs, matrices, strict=True):
            output.addmm_(of_part, matrix)


def _narrow(x: Tensor, a: Tensor) -> Tensor:
    """Return ``x · aᵀ``; for ids, the columns of ``a``."""
    return F.linear(x, a) if x.is_floating_point() else F.embedding(x, a.t())


def _add_by_all(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> None:
    """Let all adapters compute all rows, and add the results of each row's own adapter."""
    adapters, _, rank = b.shape
    rows = torch.arange(x.shape[0], device=x.device, dtype=bounds.dtype)
    bounds = bounds.to(x.device)

    # To the right: an adapter without rows has the same bound as the next one.
    adapter_of_row = torch.searchsorted(bounds, rows, right=True) - 1
    numbers = torch.arange(adapters, device=x.device)
    is_other = adapter_of_row[:, None] != numbers

    all_of_a = a.flatten(0, 1)
    narrow = _narrow(x, all_of_a)
    by_adapter = narrow.view(x.shape[0], adapters, len(sizes) * rank)
    # Zeros for other adapters, so that one product serves the rows of all adapters.
    own = by_adapter.masked_fill(is_other[:, :, None], 0)

    of_parts = own.split_with_sizes([rank] * len(sizes), 2)
    outputs = y.split_with_sizes(list(sizes), 1)
    all_of_b = b.transpose(1, 2).flatten(0, 1)
    matrices = all_of_b.split_with_sizes(list(sizes), 1)

    for of_part, output, matrix in zip(of_parts, outputs, matrices, strict=True):
        output.addmm_(of_part.flatten(1), matrix)


def expect_fitting(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> None:
    """Raise ``ValueError`` unless ``add_lora_`` takes the arguments."""
    op = "lora"
    wanted = _shapes(y, x, a, b, sizes)
    # Every call of a layer asks. The checks with messages take many times as long.
    if _shapes_agree(y, x, a, b, bounds, wanted):
        return

    expect_floating(op, "y", y)
    if not x.is_floating_point():
        expect_integers(op, "x", x)
    expect_integers(op, "bounds", bounds)
    given = {"y": y, "x": x, "a": a, "b": b, "bounds": bounds}
    for name, tensor in given.items():
        if tensor.shape != wanted[name]:
            shape = tuple(tensor.shape)
            raise ValueError(f"{op}: {name} has shape {shape}, expected {tuple(wanted[name])}")
        if tensor is bounds and tensor.device.type == "cpu":
            continue
        expect_same_device(op, name, tensor, "y", y)
        if name in ("a", "b") or tensor.is_floating_point():
            expect_same_dtype(op, name, tensor, "y", y)


def _shapes_agree(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    bounds: Tensor,
    shapes: Mapping[str, Sequence[int]],
) -> bool:
    """Return True if dtypes, devices and shapes are right."""
    dtype = y.dtype
    device = y.device

    if dtype not in FLOATING or bounds.dtype not in _INTEGERS:
        return False
    if not a.dtype is b.dtype is dtype or x.dtype not in (dtype, *_INTEGERS):
        return False
    if not x.device == a.device == b.device == device or bounds.device not in (device, _HOST):
        return False
    if y.shape != shapes["y"] or x.shape != shapes["x"] or bounds.shape != shapes["bounds"]:
        return False
    return a.shape == shapes["a"] and b.shape == shapes["b"]


def _shapes(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the arguments must have, by some of their dimensions."""
    rows = y.shape[0] if y.dim() else 0
    adapters = b.shape[0] if b.dim() else 0
    rank = b.shape[-1] if b.dim() else 0
    inputs = a.shape[-1] if a.dim() else 0

    outputs = sum(sizes)
    return {
        "y": (rows, outputs),
        "x": (rows, inputs) if x.is_floating_point() else (rows,),
        "a": (adapters, len(sizes) * rank, inputs),
        "b": (adapters, outputs, rank),
        "bounds": (adapters + 1,),
    }


def _checked(bounds: Tensor, rows: int) -> list[int]:
    """Return the values of the bounds.

    Raises:
        ValueError: the bounds do not ascend to the number of rows.
    """
    values: list[int] = bounds.tolist()
    if values != sorted(values) or values[0] < 0 or values[-1] != rows:
        raise ValueError(
            f"lora: bounds is {values!s:.80}, expected it to ascend from at least 0 to {rows}"
        )
    return values
