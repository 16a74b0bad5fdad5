"""The tensors that a graph is called with, checked against those that it was captured for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opgraft.errors import CompilationError
from torch import Tensor, fx

_MOST_KNOWN = 1024
"""Combinations of sizes that are remembered as checked."""


@dataclass(frozen=True)
class Expected:
    """A tensor that a graph takes: its name, its dtype and device, and each size, a number or the name of a symbol."""

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | str, ...]


class InputCheck:
    """The check of the inputs of a graph. A combination of sizes, dtypes and devices is looked at once.

    Args:
        module: the graph.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.expected = tuple(_expected(node) for node in module.graph.nodes if node.op == "placeholder")
        self._known: set[tuple[Any, ...]] = set()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``CompilationError`` unless the graph was captured for such tensors."""
        kind = self.expected[0].device.type if self.expected else "cpu"
        state = (torch.is_grad_enabled(), torch.is_autocast_enabled(kind))
        key = (*((x.shape, x.dtype, x.device, x.requires_grad) for x in tensors), *state)
        if key in self._known:
            return
        self._examine(tensors, *state)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(key)

    def _examine(self, tensors: Sequence[Tensor], gradients: bool, autocast: bool) -> None:
        if autocast:
            raise CompilationError("a compiled model was called under autocast, but its dtypes are fixed: leave that")
        if gradients and any(x.requires_grad for x in tensors):
            raise CompilationError(
                "a compiled model was called with a tensor that requires a gradient, and has none: use torch.no_grad()"
            )
        symbols: dict[str, int] = {}
        for x, expected in zip(tensors, self.expected, strict=True):
            if (x.dtype, x.device.type) != (expected.dtype, expected.device.type):
                raise _unfit(expected, f"{x.dtype} on {x.device}", f"{expected.dtype} on {expected.device}")
            alike = x.dim() == len(expected.sizes) and all(
                symbols.setdefault(size, found) == found if isinstance(size, str) else size == found
                for size, found in zip(expected.sizes, x.shape, strict=True)
            )
            if not alike or 0 in x.shape:
                sizes = ", ".join(map(str, expected.sizes))
                raise _unfit(expected, f"the shape {tuple(x.shape)}", f"[{sizes}], none of them 0")


def _expected(node: fx.Node) -> Expected:
    value: Tensor = node.meta["val"]
    sizes = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return Expected(node.name, value.dtype, value.device, sizes)


def _unfit(expected: Expected, found: str, wanted: str) -> CompilationError:
    return CompilationError(
        f"the compiled model was called with {found} for {expected.name}, and was captured for {wanted}: call it so, "
        "or compile it anew with such an example and its dynamic_shapes"
    )
