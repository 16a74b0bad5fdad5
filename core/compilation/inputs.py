"""The call of a graph: the arguments of the model, and their tensors checked against those that it was captured for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from opgraft.errors import CompilationError, ConfigError
from torch import Tensor

_MOST_KNOWN = 1024
"""Combinations of sizes that are remembered as checked."""


_TERM = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)(?: ([+-] \d+))?")


class Term(NamedTuple):
    """A dynamic size, ``factor · name + offset``; the sizes of ``torch.export.Dim`` are such."""

    name: str
    factor: int
    offset: int

    def size(self, value: int) -> int:
        """Return the size where the symbol is ``value``."""
        return self.factor * value + self.offset

    def value(self, size: int) -> int | None:
        """Return what the symbol is where the size is ``size``; ``None`` where it cannot be."""
        value, rest = divmod(size - self.offset, self.factor)
        return None if rest else value


class Expected(NamedTuple):
    """A tensor that a graph takes: its name, its dtype and device, each size, a number or a term in a symbol, and
    whether the graph writes to it."""

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | str, ...]
    is_written: bool = False

    @property
    def dynamic(self) -> dict[int, Term]:
        """Map the dimensions whose size is dynamic to it.

        Raises:
            CompilationError: it is no term in one symbol.
        """
        return {
            dim: _term(size, self.name)
            for dim, size in enumerate(self.sizes)
            if isinstance(size, str)
        }


def _term(size: str, name: str) -> Term:
    found = _TERM.fullmatch(size)
    if found is None:
        raise CompilationError(
            f"the input {name} has the size {size} by the code of the model, which no call can be checked against: "
            "name by dynamic_shapes sizes that do not depend on others so"
        )
    factor, symbol, offset = found.groups()
    return Term(symbol, int(factor or 1), int((offset or "0").replace(" ", "")))


def symbols_of(expected: Iterable[Expected]) -> list[str]:
    """List the names of the dynamic sizes of inputs, in the order in which they come."""
    return [*dict.fromkeys(term.name for each in expected for term in each.dynamic.values())]


class Signature(NamedTuple):
    """The call of a graph, and what becomes of its results.

    Attributes:
        inputs: for each tensor that it takes the place among the flat inputs.
        constants: the other flat inputs, which must be what they were, by place.
        in_spec: the structure of ``(args, kwargs)``.
        out_spec: the structure of the result.
        expected: the tensors.
        bounds: by the name of a size, the smallest and the largest that ``dynamic_shapes`` give it, where they do.
        results: those that are constants, by their place among all.
    """

    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    in_spec: Any
    out_spec: Any
    expected: tuple[Expected, ...]
    bounds: Mapping[str, tuple[int, int]]
    results: Mapping[int, Any]

    def completed(self, computed: Sequence[Any]) -> list[Any]:
        """Return what is computed with the constants among the results in their places."""
        rest = iter(computed)
        return [
            self.results[n] if n in self.results else next(rest)
            for n in range(self.out_spec.num_leaves)
        ]

    def batch(self, setting: str) -> str:
        """Return the name of the one dynamic size, which a setting needs.

        Raises:
            ConfigError: there is not one.
        """
        names = symbols_of(self.expected)
        if len(names) != 1:
            raise ConfigError(
                f"compilation_config.{setting} is set, and the graph has {', '.join(names) or 'none'} for dynamic "
                "sizes, where one is expected, the batch: leave it out, or name one size by dynamic_shapes"
            )
        return names[0]

    def expect_within(self, setting: str, sizes: Iterable[int]) -> None:
        """Refuse sizes of the batch that it cannot have.

        Raises:
            ConfigError: one is beyond the bounds; or as ``batch``.
        """
        low, high = self.bounds.get(self.batch(setting), (1, sys.maxsize))
        for size in sizes:
            if not low <= size <= high:
                raise ConfigError(
                    f"compilation_config.{setting} has {size}, and dynamic_shapes give the size {low} to {high}: name "
                    "sizes within these bounds"
                )

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
            CompilationError: the other ones are not what they were, or one is no tensor.
        """
        try:
            flat = self.flat(args, kwargs)
        except ValueError as error:
            raise CompilationError(
                f"the compiled model was called with other arguments than its example had ({error}): pass the same ones"
            ) from error
        for place, value in self.constants.items():
            if not _is_same(flat[place], value):
                raise CompilationError(
                    f"the compiled model was called with {flat[place]!r} where its example had {value!r}, which is a "
                    "constant of the graph: compile it anew for the other value"
                )
        tensors = [flat[place] for place in self.inputs]
        for x, expected in zip(tensors, self.expected, strict=True):
            if not isinstance(x, Tensor):
                raise _unfit(expected, f"{x!r:.80}", "a tensor")
        return tensors


def _is_same(found: Any, known: Any) -> bool:
    """Tell whether a constant is what it was: of its type too, as 2.0 makes other dtypes than 2."""
    return type(found) is type(known) and bool(
        found == known or (found != found and known != known)
    )


class InputCheck:
    """The check of the inputs of a graph. A combination of sizes, dtypes and devices is looked at once.

    Args:
        expected: the tensors that it takes.
        bounds: of sizes, see ``Signature``.
    """

    def __init__(self, expected: Sequence[Expected], bounds: Mapping[str, tuple[int, int]]) -> None:
        self.expected = expected
        self.bounds = bounds
        places = (
            (at, dim, term)
            for at, each in enumerate(self.expected)
            for dim, term in each.dynamic.items()
        )
        self._batch = next(places, None)
        self._known: set[tuple[Any, ...]] = set()

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``CompilationError`` unless the graph was captured for such tensors."""
        kind = self.expected[0].device.type if self.expected else "cpu"
        state = (torch.is_grad_enabled(), torch.is_autocast_enabled(kind))
        key = (*((x.shape, x.dtype, x.device, x.layout, x.requires_grad) for x in tensors), *state)
        if key in self._known:
            return
        self._examine(tensors, *state)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(key)

    @property
    def smallest(self) -> dict[str, int]:
        """The smallest that each dynamic size may be."""
        return {name: self.bounds.get(name, (1, 1))[0] for name in symbols_of(self.expected)}

    def size_of(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the first dynamic size of tensors that fit, ``None`` where none is dynamic."""
        if self._batch is None:
            return None
        at, dim, term = self._batch
        return term.value(tensors[at].shape[dim])

    def _examine(self, tensors: Sequence[Tensor], gradients: bool, autocast: bool) -> None:
        if autocast:
            raise CompilationError(
                "a compiled model was called under autocast, but its dtypes are fixed: leave that"
            )
        if gradients and any(x.requires_grad for x in tensors):
            raise CompilationError(
                "a compiled model was called with a tensor that requires a gradient, and has none: use torch.no_grad()"
            )
        symbols: dict[str, int] = {}
        for x, expected in zip(tensors, self.expected, strict=True):
            if x.layout is not torch.strided:
                raise _unfit(expected, f"a tensor of the layout {x.layout}", str(torch.strided))
            if (x.dtype, x.device.type) != (expected.dtype, expected.device.type):
                raise _unfit(
                    expected, f"{x.dtype} on {x.device}", f"{expected.dtype} on {expected.device}"
                )
            if 0 in x.shape or not _fits(x, expected, symbols):
                sizes = ", ".join(map(str, expected.sizes))
                raise _unfit(expected, f"the shape {tuple(x.shape)}", f"[{sizes}], none of them 0")
        for name, (low, high) in self.bounds.items():
            if not low <= symbols.get(name, low) <= high:
                expected = next(each for each in self.expected if name in symbols_of([each]))
                raise _unfit(
                    expected, f"the size {symbols[name]}", f"{low} to {high}, as dynamic_shapes say"
                )


def expect_apart(tensors: Sequence[Tensor], expected: Sequence[Expected]) -> None:
    """Refuse two tensors that share memory, where the graph writes to one of them: it would not see that in the other.

    Raises:
        CompilationError: there are two.
    """
    for (x, first), (y, second) in combinations(zip(tensors, expected, strict=True), 2):
        if (first.is_written or second.is_written) and _share_memory(x, y):
            raise CompilationError(
                f"the compiled model was called with tensors that share memory for {first.name} and {second.name}, of "
                "which it writes to one: give each memory of its own, as by clone()"
            )


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors do; of other strides than each other, whether they lie in each other."""
    low, high = sorted((x, y), key=Tensor.data_ptr)
    distance, item = high.data_ptr() - low.data_ptr(), low.element_size()
    places = sorted(zip(low.stride(), low.shape, strict=True), reverse=True)
    if x.device != y.device or distance >= item * (
        1 + sum(stride * (size - 1) for stride, size in places)
    ):
        return False
    alike = (low.shape, low.stride(), item) == (high.shape, high.stride(), high.element_size())
    return not alike or (distance % item == 0 and _reaches(distance // item, places))


def _reaches(distance: int, places: Sequence[tuple[int, int]]) -> bool:
    """Tell whether two elements are so far apart, in dimensions of these strides and sizes, the largest first."""
    if not places or not places[0][0]:
        return distance == 0
    (stride, size), *rest = places
    steps = distance // stride
    return any(n < size and _reaches(abs(distance - n * stride), rest) for n in (steps, steps + 1))


def _fits(x: Tensor, expected: Expected, symbols: dict[str, int]) -> bool:
    """Tell whether a tensor has the sizes that are expected, and note what the symbols in them are."""
    if x.dim() != len(expected.sizes):
        return False
    for dim, found in enumerate(x.shape):
        term = expected.dynamic.get(dim)
        value = found if term is None else term.value(found)
        known = expected.sizes[dim] if term is None else symbols.setdefault(term.name, value or 0)
        if value != known:
            return False
    return True


def _unfit(expected: Expected, found: str, wanted: str) -> CompilationError:
    return CompilationError(
        f"the compiled model was called with {found} for {expected.name}, and was captured for {wanted}: call it so, "
        "or compile it anew with such an example and its dynamic_shapes"
    )
