"""The check of compiled code against the model, for sizes that compilers treat apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opgraft.compilation.inputs import Expected
from opgraft.errors import CompilationError
from torch import Tensor, nn

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 6e-2,
    torch.float16: 1e-2,
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), 8e-2),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), 0.15),
}
"""By dtype, the largest difference that counts as rounding, over the largest value of the result."""


def of_size(tensors: Sequence[Tensor], expected: Sequence[Expected], size: int) -> list[Tensor] | None:
    """Return inputs whose first dynamic size is ``size``, of the rows of others; ``None`` where no size is dynamic."""
    symbol = next((name for each in expected for name in each.dynamic.values()), None)
    if symbol is None:
        return None
    cut = list(tensors)
    for place, each in enumerate(expected):
        for dim, name in each.dynamic.items():
            if name == symbol:
                rows = torch.arange(size, device=cut[place].device) % cut[place].shape[dim]
                cut[place] = cut[place].index_select(dim, rows)
    return cut


def expect_alike(
    model: nn.Module,
    eager: Callable[[list[Tensor]], Sequence[Any]],
    compiled: Callable[[list[Tensor]], Sequence[Any]],
    tensors: Sequence[Tensor],
    size: int | None,
) -> None:
    """Compare compiled code with its model on inputs, and put the model's buffers back as they were.

    Args:
        model: whose name and buffers they are.
        eager: runs the model on flat inputs.
        compiled: runs the code likewise.
        tensors: the inputs; neither side sees what the other writes to them.
        size: of the batch in them; ``None`` where none is dynamic.

    Raises:
        CompilationError: the results differ by more than rounding.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    results = []
    for run in (eager, compiled):
        results.append(run([x.clone() for x in tensors]))
        for buffer, values in before:
            buffer.copy_(values)
    for expected, found in zip(*results, strict=True):
        if isinstance(expected, Tensor) and not _close(found, expected):
            where, advice = "", "use another compilation_config.backend, such as eager"
            if size is not None:
                where = f" where the dynamic size is {size}"
                advice = "where it branches on that size, name by dynamic_shapes the sizes that vary"
            raise CompilationError(
                f"{type(model).__name__} compiled differs from the model itself{where}, by more than rounding: {advice}"
            )


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    limit = TOLERANCE.get(expected.dtype, 0)
    if expected.dtype.is_floating_point and expected.itemsize == 1:  # of which torch computes nothing
        found, expected = found.float(), expected.float()
    finite = expected[expected.isfinite()] if expected.is_floating_point() else expected
    largest = float(finite.abs().max()) if finite.numel() and finite.dtype is not torch.bool else 0.0
    return torch.allclose(found, expected, rtol=0, atol=limit * largest, equal_nan=True)
