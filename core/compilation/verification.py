"""The check of compiled code against the model, for sizes that compilers treat apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.compilation.inputs import Expected
from opgraft.errors import CompilationError, OpgraftError
from torch import Tensor, nn

TOLERANCE = MappingProxyType(
    {
        torch.float64: 1e-9,
        torch.float32: 1e-3,
        torch.bfloat16: 6e-2,
        torch.float16: 1e-2,
        **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), 8e-2),
        **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), 0.15),
    }
)
"""By dtype, the largest difference that counts as rounding, over the largest value of the result."""


def of_sizes(
    tensors: Sequence[Tensor], expected: Sequence[Expected], sizes: Mapping[str, int]
) -> list[Tensor]:
    """Return inputs of other dynamic sizes, by name, made of the rows of those that are given."""
    cut = list(tensors)
    for place, each in enumerate(expected):
        for dim, term in each.dynamic.items():
            if term.name in sizes:
                rows = (
                    torch.arange(term.size(sizes[term.name]), device=cut[place].device)
                    % cut[place].shape[dim]
                )
                cut[place] = cut[place].index_select(dim, rows)
    return cut


def expect_alike(
    model: nn.Module,
    eager: Callable[[list[Tensor]], Sequence[Any]],
    compiled: Callable[[list[Tensor]], Sequence[Any]],
    tensors: Sequence[Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Compare compiled code with its model on inputs, and put the model's buffers back as they were.

    Args:
        model: whose name and buffers they are.
        eager: runs the model on flat inputs.
        compiled: runs the code likewise.
        tensors: the inputs; neither side sees what the other writes to them.
        sizes: that were given to dynamic ones in them, by name.

    Raises:
        CompilationError: the results differ by more than rounding.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    results = []
    for run in (eager, compiled):
        with torch.random.fork_rng([]):  # both draw the numbers that are to come
            results.append(_results(model, run, [x.clone() for x in tensors], sizes))
        for buffer, values in before:
            buffer.copy_(values)
    for expected, found in zip(*results, strict=True):
        if not (
            _close(found, expected) if isinstance(expected, Tensor) else bool(found == expected)
        ):
            advice = ""
            if sizes:
                advice = (
                    "where it branches on that size, name by dynamic_shapes the sizes that vary; "
                )
            raise CompilationError(
                f"{type(model).__name__} compiled differs from the model itself{_where(sizes)}, by more than rounding: "
                f"{advice}where it draws random numbers, or its code does otherwise the next time, it has no graph; "
                "else use another compilation_config.backend, such as eager"
            )


def _results(
    model: nn.Module,
    run: Callable[[list[Tensor]], Sequence[Any]],
    tensors: list[Tensor],
    sizes: Mapping[str, int],
) -> Sequence[Any]:
    try:
        return run(tensors)
    except OpgraftError:
        raise
    except Exception as error:  # whatever the model raises
        raise CompilationError(
            f"{type(model).__name__} fails{_where(sizes)}: {described(error)}: name by dynamic_shapes a size that "
            "leaves this out, as torch.export.Dim(name, min=3)"
        ) from error


def _where(sizes: Mapping[str, int]) -> str:
    return f" where the dynamic size is {' and '.join(map(str, sizes.values()))}" if sizes else ""


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    limit = TOLERANCE.get(expected.dtype, 0)
    # Of which torch computes nothing.
    if expected.dtype.is_floating_point and expected.itemsize == 1:
        found, expected = found.float(), expected.float()
    finite = expected[expected.isfinite()] if expected.is_floating_point() else expected
    largest = (
        float(finite.abs().max()) if finite.numel() and finite.dtype is not torch.bool else 0.0
    )
    return torch.allclose(found, expected, rtol=0, atol=limit * largest, equal_nan=True)
