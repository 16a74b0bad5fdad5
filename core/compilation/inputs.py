"""The call of a graph: find the tensors among the arguments, and check dtype, device and sizes."""

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
"""The number of checked combinations of sizes to remember."""

_TERM = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)(?: ([+-] \d+))?")


class Term(NamedTuple):
    """A dynamic size ``factor · name + offset``, like the sizes of ``torch.export.Dim``."""

    name: str
    factor: int
    offset: int

    def size(self, value: int) -> int:
        """Return the size for a value of the symbol."""
        return self.factor * value + self.offset

    def value(self, size: int) -> int | None:
        """Return the value of the symbol for a size; ``None`` if no value gives the size."""
        value, rest = divmod(size - self.offset, self.factor)
        return None if rest else value


class ExpectedInput(NamedTuple):
    """The description of an input of a graph.

    Attributes:
        name: the name of the input.
        dtype: the dtype.
        device: the device.
        sizes: a number for each fixed dimension, and a term in a symbol, such as ``2*batch``, for
            each dynamic one.
        is_written: the graph writes to the tensor.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | str, ...]
    is_written: bool = False

    @property
    def dynamic(self) -> dict[int, Term]:
        """The dynamic sizes by dimension.

        Raises:
            CompilationError: a size is no term in one symbol.
        """
        found = {}
        for dim, size in enumerate(self.sizes):
            if isinstance(size, str):
                found[dim] = _term(size, self.name)
        return found


def _term(size: str, name: str) -> Term:
    found = _TERM.fullmatch(size)
    if found is None:
        raise CompilationError(
            f"the input {name} has the size {size} by the code of the model, which no call can be "
            "checked against: name by dynamic_shapes sizes that do not depend on others so"
        )
    factor, symbol, offset = found.groups()
    return Term(symbol, int(factor or 1), int((offset or "0").replace(" ", "")))


def symbols_of(expected: Iterable[ExpectedInput]) -> list[str]:
    """List the names of the dynamic sizes of inputs, in the order of the inputs."""
    return [*dict.fromkeys(term.name for each in expected for term in each.dynamic.values())]


class Signature(NamedTuple):
    """The inputs and results of a graph, and their places in a call of the model.

    Attributes:
        inputs: the places of the graph's tensors among the flat inputs of a call.
        constants: the other flat inputs by place. Each call must have the same.
        in_spec: the structure of ``(args, kwargs)``.
        out_spec: the structure of the result.
        expected: the description of each tensor.
        bounds: by name, the smallest and the largest value of dynamic sizes with bounds in
            ``dynamic_shapes``.
        results: constants among the results, by place.
    """

    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    in_spec: Any
    out_spec: Any
    expected: tuple[ExpectedInput, ...]
    bounds: Mapping[str, tuple[int, int]]
    results: Mapping[int, Any]

    def completed(self, computed: Sequence[Any]) -> list[Any]:
        """Return all results: the computed ones, and the constants in their places."""
        rest = iter(computed)
        return [
            self.results[n] if n in self.results else next(rest)
            for n in range(self.out_spec.num_leaves)
        ]

    def batch(self, setting: str) -> str:
        """Return the name of the dynamic size, for a setting about the batch.

        Raises:
            ConfigError: the graph has no dynamic size, or several.
        """
        names = symbols_of(self.expected)
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise ConfigError(
                f"compilation_config.{setting} is set, and the graph has {known} for dynamic "
                "sizes, where one is expected, the batch: leave it out, or name one size by "
                "dynamic_shapes"
            )
        return names[0]

    def expect_within(self, setting: str, sizes: Iterable[int]) -> None:
        """Check sizes of the batch.

        Raises:
            ConfigError: a size is outside of the bounds; or as ``batch``.
        """
        low, high = self.bounds.get(self.batch(setting), (1, sys.maxsize))
        for size in sizes:
            if not low <= size <= high:
                raise ConfigError(
                    f"compilation_config.{setting} has {size}, and dynamic_shapes give the size "
                    f"{low} to {high}: name sizes within these bounds"
                )

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the flat inputs of a call.

        Raises:
            ValueError: the arguments have another structure.
        """
        found: list[Any] = self.in_spec.flatten_up_to((args, dict(kwargs)))
        return found

    def filled(self, flat: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """Return ``(args, kwargs)`` for flat inputs, with other tensors."""
        given = dict(zip(self.inputs, tensors, strict=True))
        values = [given.get(place, value) for place, value in enumerate(flat)]
        return self.in_spec.unflatten(values)

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors among the arguments of a call.

        Raises:
            CompilationError: a constant has another value than in the example, or an input is no
                tensor.
        """
        try:
            flat = self.flat(args, kwargs)
        except ValueError as error:
            raise CompilationError(
                "the compiled model was called with other arguments than its example had "
                f"({error}): pass the same ones"
            ) from error
        for place, value in self.constants.items():
            if not _is_same(flat[place], value):
                raise CompilationError(
                    f"the compiled model was called with {flat[place]!r} where its example had "
                    f"{value!r}, which is a constant of the graph: compile it anew for the other "
                    "value"
                )
        tensors = [flat[place] for place in self.inputs]
        for x, expected in zip(tensors, self.expected, strict=True):
            if not isinstance(x, Tensor):
                raise _unfit(expected, f"{x!r:.80}", "a tensor")
        return tensors


def _is_same(found: Any, known: Any) -> bool:
    """Return True if a constant has its former value and type: 2.0 makes other dtypes than 2."""
    if type(found) is not type(known):
        return False
    are_nan = found != found and known != known
    return bool(found == known or are_nan)


class InputCheck:
    """The check of a graph's inputs. It looks once at a combination of sizes, dtypes and devices.

    Args:
        expected: the description of each input.
        bounds: the bounds of dynamic sizes, see ``Signature``.
    """

    def __init__(
        self, expected: Sequence[ExpectedInput], bounds: Mapping[str, tuple[int, int]]
    ) -> None:
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
        """Check the inputs of a call.

        Raises:
            CompilationError: the graph was captured for other tensors.
        """
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
        """The smallest value of each dynamic size, by name."""
        return {name: self.bounds.get(name, (1, 1))[0] for name in symbols_of(self.expected)}

    def size_of(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the value of the first dynamic size in checked tensors; ``None`` without one."""
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
                "a compiled model was called with a tensor that requires a gradient, and has none: "
                "use torch.no_grad()"
            )
        symbols: dict[str, int] = {}
        for x, expected in zip(tensors, self.expected, strict=True):
            _expect_fitting(x, expected, symbols)
        for name, (low, high) in self.bounds.items():
            if not low <= symbols.get(name, low) <= high:
                expected = next(each for each in self.expected if name in symbols_of([each]))
                wanted = f"{low} to {high}, as dynamic_shapes say"
                raise _unfit(expected, f"the size {symbols[name]}", wanted)


def _expect_fitting(x: Tensor, expected: ExpectedInput, symbols: dict[str, int]) -> None:
    """Check one input of a call, and add the values of its dynamic sizes to ``symbols``.

    Raises:
        CompilationError: the graph was captured for another layout, dtype, device or shape.
    """
    if x.layout is not torch.strided:
        raise _unfit(expected, f"a tensor of the layout {x.layout}", str(torch.strided))
    if x.dtype != expected.dtype or x.device.type != expected.device.type:
        wanted = f"{expected.dtype} on {expected.device}"
        raise _unfit(expected, f"{x.dtype} on {x.device}", wanted)
    if 0 in x.shape or not _has_sizes(x, expected, symbols):
        sizes = ", ".join(map(str, expected.sizes))
        raise _unfit(expected, f"the shape {tuple(x.shape)}", f"[{sizes}], none of them 0")


def expect_apart(tensors: Sequence[Tensor], expected: Sequence[ExpectedInput]) -> None:
    """Check for shared memory among the inputs of a graph that writes to some of them.

    The graph was captured for tensors without shared memory, and would read old values.

    Raises:
        CompilationError: two tensors share memory, and the graph writes to one.
    """
    for (x, first), (y, second) in combinations(zip(tensors, expected, strict=True), 2):
        if (first.is_written or second.is_written) and _share_memory(x, y):
            raise CompilationError(
                "the compiled model was called with tensors that share memory for "
                f"{first.name} and {second.name}, of which it writes to one: give each memory of "
                "its own, as by clone()"
            )


def _share_memory(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have an element in common.

    Tensors with different strides count as sharing if their ranges of memory overlap.
    """
    if x.device != y.device:
        return False
    low, high = sorted((x, y), key=Tensor.data_ptr)
    distance = high.data_ptr() - low.data_ptr()
    item = low.element_size()
    places = sorted(zip(low.stride(), low.shape, strict=True), reverse=True)
    last = sum(stride * (size - 1) for stride, size in places)
    if distance >= item * (1 + last):
        return False
    is_alike = low.shape == high.shape and low.stride() == high.stride()
    if not is_alike or item != high.element_size():
        return True
    return distance % item == 0 and _reaches(distance // item, places)


def _reaches(distance: int, places: Sequence[tuple[int, int]]) -> bool:
    """Return True if two elements of a tensor can lie at a distance.

    Args:
        distance: in elements.
        places: the stride and size of each dimension, the largest stride first.
    """
    if not places or not places[0][0]:
        return distance == 0
    (stride, size), *rest = places
    steps = distance // stride
    return any(n < size and _reaches(abs(distance - n * stride), rest) for n in (steps, steps + 1))


def _has_sizes(x: Tensor, expected: ExpectedInput, symbols: dict[str, int]) -> bool:
    """Return True if a tensor has the expected sizes.

    Args:
        x: the tensor.
        expected: the description.
        symbols: the values of dynamic sizes in earlier tensors. New ones are added.
    """
    if x.dim() != len(expected.sizes):
        return False
    for dim, found in enumerate(x.shape):
        term = expected.dynamic.get(dim)
        if term is None:
            if found != expected.sizes[dim]:
                return False
            continue
        value = term.value(found)
        if value != symbols.setdefault(term.name, value or 0):
            return False
    return True


def _unfit(expected: ExpectedInput, found: str, wanted: str) -> CompilationError:
    return CompilationError(
        f"the compiled model was called with {found} for {expected.name}, and was captured for "
        f"{wanted}: call it so, or compile it anew with such an example and its dynamic_shapes"
    )
