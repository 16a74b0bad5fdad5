"""The call of a graph: the arguments of the model, and their tensors checked against those that it was captured for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    @property
    def dynamic(self) -> dict[int, str]:
        """Map the dimensions whose size is dynamic to the names of their symbols."""
        return {dim: size for dim, size in enumerate(self.sizes) if isinstance(size, str)}


def expected_of(module: fx.GraphModule) -> tuple[Expected, ...]:
    """Return the tensors that a graph takes."""
    return tuple(_expected(node) for node in module.graph.nodes if node.op == "placeholder")


@dataclass(frozen=True)
class Signature:
    """The call of a graph, and what becomes of its results.

    Attributes:
        inputs: for each tensor that it takes the place among the flat inputs.
        constants: the other flat inputs, which must be what they were, by place.
        in_spec: the structure of ``(args, kwargs)``.
        out_spec: the structure of the result.
        expected: the tensors.
        bounds: by the name of a size, the smallest and the largest that ``dynamic_shapes`` give it, where they do.
    """

    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    in_spec: Any
    out_spec: Any
    expected: tuple[Expected, ...]
    bounds: Mapping[str, tuple[int, int]]

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the flat inputs of a call.

        Raises:
            ValueError: their structure is another one.
        """
        found: list[Any] = self.in_spec.flatten_up_to((args, dict(kwargs)))
        return found

    def filled(self, flat: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """Return ``(args, kwargs)`` of flat inputs, with other tensors."""
        given = dict(zip(self.inputs, tensors, strict=True))
        return self.in_spec.unflatten([given.get(place, value) for place, value in enumerate(flat)])

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors among the arguments of a call.

        Raises:
            CompilationError: the other ones are not what they were.
        """
        try:
            flat = self.flat(args, kwargs)
        except ValueError as error:
            raise CompilationError(
                f"the compiled model was called with other arguments than its example had ({error}): pass the same ones"
            ) from error
        for place, value in self.constants.items():
            if flat[place] is not value and flat[place] != value:
                raise CompilationError(
                    f"the compiled model was called with {flat[place]!r} where its example had {value!r}, which is a "
                    "constant of the graph: compile it anew for the other value"
                )
        return [flat[place] for place in self.inputs]


class InputCheck:
    """The check of the inputs of a graph. A combination of sizes, dtypes and devices is looked at once.

    Args:
        expected: the tensors that it takes.
        bounds: of sizes, see ``Signature``.
    """

    def __init__(self, expected: Sequence[Expected], bounds: Mapping[str, tuple[int, int]]) -> None:
        self.expected = expected
        self.bounds = bounds
        places = ((at, dim) for at, each in enumerate(self.expected) for dim in each.dynamic)
        self._batch = next(places, None)
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

    @property
    def smallest(self) -> int:
        """The smallest that the first dynamic size may be."""
        if self._batch is None:
            return 1
        return self.bounds.get(self.expected[self._batch[0]].dynamic[self._batch[1]], (1, 1))[0]

    def size_of(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the first dynamic size of tensors that fit, ``None`` where none is dynamic."""
        return None if self._batch is None else tensors[self._batch[0]].shape[self._batch[1]]

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
        for name, (low, high) in self.bounds.items():
            if not low <= symbols.get(name, low) <= high:
                expected = next(each for each in self.expected if name in each.dynamic.values())
                raise _unfit(expected, f"the size {symbols[name]}", f"{low} to {high}, as dynamic_shapes say")


def _expected(node: fx.Node) -> Expected:
    value: Tensor = node.meta["val"]
    sizes = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return Expected(node.name, value.dtype, value.device, sizes)


def _unfit(expected: Expected, found: str, wanted: str) -> CompilationError:
    return CompilationError(
        f"the compiled model was called with {found} for {expected.name}, and was captured for {wanted}: call it so, "
        "or compile it anew with such an example and its dynamic_shapes"
    )
