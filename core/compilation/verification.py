"""Compare compiled code with the model, for sizes of the batch with separate code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.compilation.inputs import ExpectedInput
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
"""By dtype, the largest difference that counts as rounding, as a share of the largest value."""


def of_sizes(
    tensors: Sequence[Tensor], expected: Sequence[ExpectedInput], sizes: Mapping[str, int]
) -> list[Tensor]:
    """Return inputs with other dynamic sizes, made of the rows of the given tensors.

    Args:
        tensors: the inputs.
        expected: the description of each input.
        sizes: by name, the new values of dynamic sizes.
    """
    cut = list(tensors)
    for place, each in enumerate(expected):
        for dim, term in each.dynamic.items():
            if term.name not in sizes:
                continue
            x = cut[place]
            size = term.size(sizes[term.name])
            # Rows are repeated if there are too few.
            rows = torch.arange(size, device=x.device) % x.shape[dim]
            cut[place] = x.index_select(dim, rows)
    return cut


def expect_alike(
    model: nn.Module,
    eager: Callable[[list[Tensor]], Sequence[Any]],
    compiled: Callable[[list[Tensor]], Sequence[Any]],
    tensors: Sequence[Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Compare compiled code with the model on inputs, and restore the model's buffers.

    Args:
        model: the model, for its name and buffers.
        eager: runs the model on flat inputs.
        compiled: runs the code on flat inputs.
        tensors: the inputs. Each side gets copies, and may write to them.
        sizes: by name, the values of the dynamic sizes in the inputs.

    Raises:
        CompilationError: the results differ by more than rounding.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    results = []
    for run in (eager, compiled):
        # Both draw the same random numbers, and leave the generator as it was.
        with torch.random.fork_rng([]):
            copies = [x.clone() for x in tensors]
            results.append(_results(model, run, copies, sizes))
        for buffer, values in before:
            buffer.copy_(values)
    for expected, found in zip(*results, strict=True):
        if _is_alike(found, expected):
            continue
        advice = ""
        if sizes:
            advice = "where it branches on that size, name by dynamic_shapes the sizes that vary; "
        raise CompilationError(
            f"{type(model).__name__} compiled differs from the model itself{_where(sizes)}, by "
            f"more than rounding: {advice}where it draws random numbers, or its code does "
            "otherwise the next time, it has no graph; else use another "
            "compilation_config.backend, such as eager"
        )


def _is_alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return _close(found, expected)
    return bool(found == expected)


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
    # The model may raise anything.
    except Exception as error:
        raise CompilationError(
            f"{type(model).__name__} fails{_where(sizes)}: {described(error)}: name by "
            "dynamic_shapes a size that leaves this out, as torch.export.Dim(name, min=3)"
        ) from error


def _where(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return ""
    values = " and ".join(map(str, sizes.values()))
    return f" where the dynamic size is {values}"


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    limit = TOLERANCE.get(expected.dtype, 0)
    # torch has no arithmetic on floats of 8 bits.
    if expected.dtype.is_floating_point and expected.itemsize == 1:
        found = found.float()
        expected = expected.float()
    finite = expected[expected.isfinite()] if expected.is_floating_point() else expected
    largest = 0.0
    if finite.numel() and finite.dtype is not torch.bool:
        largest = float(finite.abs().max())
    return torch.allclose(found, expected, rtol=0, atol=limit * largest, equal_nan=True)
