"""Low-rank additions to the results of a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from opgraft.binding.functional import register_functional
from opgraft.ops.checks import (
    expect_floating,
    expect_integers,
    expect_same_device,
    expect_same_dtype,
    values_are_checked,
    values_are_known,
)
from opgraft.ops.fakes import nothing
from torch import Tensor
from torch.nn import functional as F

__all__ = ["add_lora_"]


@register_functional("lora", nothing, mutates=("y",))
def add_lora_(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> None:
    """Add ``x · aᵀ · bᵀ`` to ``y``, for each row with the matrices of the row's adapter.

    Source: Hu et al., arXiv:2106.09685, section 4.1. The rows of an adapter follow one another. A
    merged layer has one matrix ``a`` for each of its parts, one after another, and each part of the
    outputs reads the results of its own. Rows without an adapter are not computed. In compiled code
    the bounds are unknown, so all adapters compute all rows.

    For example, with ``bounds`` ``[2, 5, 5, 6]`` the first two rows have no adapter, the next three
    rows have adapter 0, no row has adapter 1, and the last row has adapter 2.

    Args:
        y: ``[rows, outputs]``, the results of the layer.
        x: ``[rows, inputs]``, of the same dtype.
        a: ``[adapters, parts · rank, inputs]``.
        b: ``[adapters, outputs, rank]``, multiplied by the scale of the adapter.
        bounds: the first row of each adapter, and the number of rows; int32 or int64
            ``[adapters + 1]``, ascending.
        sizes: the outputs of each part.

    Raises:
        ValueError: a shape, a dtype or a device does not fit, or the bounds do not ascend.
    """
    expect_fitting(y, x, a, b, bounds, sizes)
    if not values_are_known(bounds) or not values_are_known(x):
        _add_by_all(y, x, a, b, bounds, sizes)
        return
    rank = b.shape[2]
    outputs_of_parts = _outputs_of(sizes)
    for adapter, (start, end) in enumerate(pairwise(bounds.tolist())):
        if start == end:
            continue
        rows = y[start:end]
        wide = b[adapter]
        narrow = F.linear(x[start:end], a[adapter])
        narrow_of_parts = narrow.split(rank, dim=1)
        for of_part, outputs in zip(narrow_of_parts, outputs_of_parts, strict=True):
            matrix = wide[outputs].t()
            rows[:, outputs].addmm_(of_part, matrix)


def _outputs_of(sizes: Sequence[int]) -> list[slice]:
    """Return the outputs of each part."""
    ends = accumulate(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _add_by_all(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> None:
    """Let all adapters compute all rows, and add the results of each row's own adapter."""
    adapters, _, rank = b.shape
    rows = torch.arange(x.shape[0], device=x.device, dtype=bounds.dtype)
    # To the right: an adapter without rows has the same bound as the next one.
    adapter_of_row = torch.searchsorted(bounds, rows, right=True) - 1
    numbers = torch.arange(adapters, device=x.device)
    is_other = adapter_of_row[:, None] != numbers
    all_of_a = a.flatten(0, 1)
    narrow = F.linear(x, all_of_a)
    by_adapter = narrow.unflatten(1, (adapters, -1))
    own = by_adapter.masked_fill(is_other[:, :, None], 0)
    own_of_parts = own.split(rank, dim=2)
    for of_part, outputs in zip(own_of_parts, _outputs_of(sizes), strict=True):
        matrices = b[:, outputs].transpose(1, 2)
        matrix = matrices.flatten(0, 1)
        y[:, outputs].addmm_(of_part.flatten(1), matrix)


def expect_fitting(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, bounds: Tensor, sizes: Sequence[int]
) -> None:
    """Raise ``ValueError`` unless ``add_lora_`` takes the arguments."""
    op = "lora"
    expect_floating(op, "x", x)
    expect_integers(op, "bounds", bounds)
    wanted = _shapes(y, a, b, sizes)
    given = {"y": y, "x": x, "a": a, "b": b, "bounds": bounds}
    for name, tensor in given.items():
        if tensor.shape != wanted[name]:
            shape = tuple(tensor.shape)
            raise ValueError(f"{op}: {name} has shape {shape}, expected {tuple(wanted[name])}")
        expect_same_device(op, name, tensor, "x", x)
        if tensor is not bounds:
            expect_same_dtype(op, name, tensor, "x", x)
    if not values_are_checked(bounds):
        return
    values = bounds.tolist()
    if values != sorted(values) or values[0] < 0 or values[-1] != len(x):
        raise ValueError(
            f"{op}: bounds is {values!s:.80}, expected it to ascend from at least 0 to {len(x)}"
        )


def _shapes(y: Tensor, a: Tensor, b: Tensor, sizes: Sequence[int]) -> dict[str, Sequence[int]]:
    """Return the shapes that the arguments must have, by some of their dimensions."""
    rows = y.shape[:1]
    adapters = b.shape[:1]
    rank = b.shape[-1:].numel()
    inputs = a.shape[-1:]
    return {
        "y": (*rows, sum(sizes)),
        "x": (*rows, *inputs),
        "a": (*adapters, len(sizes) * rank, *inputs),
        "b": (*adapters, sum(sizes), rank),
        "bounds": (adapters.numel() + 1,),
    }
