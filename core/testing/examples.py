"""Inputs of a form beyond those of its proof: sizes, layouts, values, settings and threads.

An ``Example`` describes one call in a line, so that a failure can be made smaller and printed. The
numbers are fresh in each process: no kernel knows them before it runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from opgraft.ops.spec import Arguments, Draw, OpSpec, placed
from torch import Tensor

Number = TypeVar("Number")

FRESH = int.from_bytes(os.urandom(4), "big")
"""The seed of this process. Plugins are imported later."""

PARAMETERS = ("weight", "bias")
"""Arguments that models keep in float32 beside inputs in half types."""


def _rows(values: Tensor) -> Tensor:
    """Return rows of zeros, small rows, large rows and usual ones, in turns."""
    factors = torch.tensor((0.0, 1e-3, 300.0, 1e-6, 1.0), dtype=values.dtype)
    rows = math.prod(values.shape[:-1])
    factor = factors[torch.arange(rows) % len(factors)]
    return values * factor.reshape(*values.shape[:-1], 1)


VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda values: values,
    "rows of all sizes": _rows,
    "far from zero": lambda values: values + 100.0,
    "multiples of 1/4": lambda values: (values * 4).round() / 4,
}
"""Changes of normally distributed values, by name."""


def _shifted(values: Tensor, before: int) -> Tensor:
    memory = values.new_empty(values.numel() + before)
    return memory[before:].view(values.shape)


def _gaps(values: Tensor, dim: int) -> Tensor:
    """Return room in a tensor that is longer on both ends of a dimension."""
    shape = list(values.shape)
    shape[dim] += 3
    memory = values.new_full(shape, math.nan)
    return memory.narrow(dim, 1, values.shape[dim])


def _thirds(values: Tensor) -> Tensor:
    """Return room in the middle third of each row, as of a fused projection of three parts."""
    *lead, size = values.shape
    # A kernel that reads beyond its third finds NaN.
    memory = values.new_full((*lead, 3 * size), math.nan)
    return memory.narrow(-1, size, size)


def _every_other(values: Tensor, dim: int) -> Tensor:
    shape = list(values.shape)
    shape[dim] *= 2
    memory = values.new_full(shape, math.nan)
    return memory.movedim(dim, 0)[::2].movedim(0, dim)


def _turned(values: Tensor, dim: int) -> Tensor:
    turned = values.transpose(dim, -1)
    memory = torch.empty_like(turned, memory_format=torch.contiguous_format)
    return memory.transpose(dim, -1)


PACKED, BROADCAST = "packed", "broadcast"

LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    PACKED: lambda values: _shifted(values, 0),
    "one element off": lambda values: _shifted(values, 1),
    "three elements off": lambda values: _shifted(values, 3),
    "parts of rows": lambda values: _gaps(values, -1),
    "a third of each row": _thirds,
    "parts of the batch": lambda values: _gaps(values, 0),
    "parts of the second last": lambda values: _gaps(values, -2),
    "every other row": lambda values: _every_other(values, 0),
    "every other element": lambda values: _every_other(values, -1),
    "columns": lambda values: _turned(values, -2),
    "batch last": lambda values: _turned(values, 0),
    # One entry stands for the whole batch.
    BROADCAST: lambda values: values[:1].clone().expand(values.shape),
}
"""Memory for values, by the name of the layout."""

_OF_VECTORS = ("one element off", "every other element")
"""Layouts of tensors with one dimension. A weight or bias is such a tensor."""


@dataclass(frozen=True)
class Example:
    """One call of a form.

    Attributes:
        variant: of the spec.
        dtype: of drawn tensors.
        lead: leading dimensions, as the spec takes them.
        size: as the spec takes it.
        layout: of all drawn tensors, a key of ``LAYOUTS``.
        values: a key of ``VALUES``.
        threads: of torch, during the call.
        settings: replace those of the variant.
        wide: True if parameters are in float32.
        int32: True if drawn integers have 32 bits.
        seed: draws other numbers.
    """

    variant: str
    dtype: torch.dtype
    lead: tuple[int, ...]
    size: int
    layout: str = PACKED
    values: str = "usual"
    threads: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    wide: bool = False
    int32: bool = False
    seed: int = dataclasses.field(default_factory=lambda: FRESH)

    def __repr__(self) -> str:
        """Return a program text without the fields that have their default."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.name == "seed":
                words.append(f"{field.name}={value!r}")
        return f"Example({', '.join(words)})"

    def arguments(self, spec: OpSpec, most: float = math.inf) -> Arguments:
        """Draw the arguments.

        Raises:
            ValueError: there would be more numbers than ``most``, or the spec refuses the sizes.
        """
        draw = _ExampleDraw(self, most)
        found = spec.inputs(draw, self.lead, self.size)
        for name, value in spec.variants[self.variant].items():
            # A variant may draw tensors, too, such as an optional bias.
            found[name] = value(draw, self.lead, self.size) if callable(value) else value
        found |= dict(self.settings)
        for name, value in found.items():
            if not isinstance(value, Tensor):
                continue
            if self.wide and name in PARAMETERS:
                value = value.float()
            found[name] = placed(value, spec.device)
        return found

    def smaller(self) -> Iterator[Example]:
        """Yield simpler examples, the simplest first."""
        for field in dataclasses.fields(self):
            has_default = field.default is not dataclasses.MISSING
            plain: dict[str, Any] = {field.name: field.default}
            if has_default and getattr(self, field.name) != field.default:
                yield dataclasses.replace(self, **plain)
        for place, extent in enumerate(self.lead):
            for less in _less(extent):
                lead = (*self.lead[:place], less, *self.lead[place + 1 :])
                yield dataclasses.replace(self, lead=lead)
        for less in _less(self.size):
            yield dataclasses.replace(self, size=less)


def _less(extent: int) -> Iterator[int]:
    """Yield smaller extents, the smallest first, ever closer."""
    gap = extent - 1
    while gap > 0:
        yield extent - gap
        gap //= 2


class _ExampleDraw(Draw):
    """Draws values and layouts of an example."""

    def __init__(self, example: Example, most: float) -> None:
        numbers = (example.seed, example.variant, example.lead, example.size)
        super().__init__(numbers, example.dtype)
        self.example = example
        self.left = most

    def __call__(self, *shape: int) -> Tensor:
        self._count(shape)
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        # Weights and biases keep usual values.
        is_input = len(shape) > 1 or not self.example.lead
        if is_input and shape:
            values = VALUES[self.example.values](values)
        values = values.to(self.dtype)
        layout = self.example.layout
        if layout == PACKED or (len(shape) < 2 and layout not in _OF_VECTORS):
            return values
        view = LAYOUTS[layout](values)
        return view if layout == BROADCAST else view.copy_(values)

    def integers(self, low: int, high: int, shape: Any) -> Tensor:
        self._count(shape)
        drawn = super().integers(low, high, shape)
        return drawn.int() if self.example.int32 else drawn

    def _count(self, shape: Any) -> None:
        self.left -= math.prod(shape)
        if self.left < 0:
            raise ValueError(f"{self.example} has too many numbers")


SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 96, 127, 128, 129, 255, 256, 257)
LONG_SIZES = (
    *(512, 768, 1000, 1024, 1025, 1088, 1096, 1104, 1536, 2048, 2049, 2880, 3584),
    *(4096, 4097, 5120, 8192, 8193, 11008),
)
"""Sizes of real models, and sizes that leave a part of a tile over: 1088 is 8.5 tiles of 128."""

LONGEST_SIZES = (16384, 16385, 32769, 65537, 131073)
ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 257, 512, 513)
MANY_ROWS = (1025, 2049, 4097, 8195, 32769, 65537)
BLOCKS = ((33, 1024), (65, 257), (17, 4096))
THREADS = (2, 3, 5, 8)
LEADS: tuple[tuple[int, ...], ...] = ((), (0,), (2, 3, 2), (2, 3, 1, 2), (2, 0, 3))


def shortest_lead(spec: OpSpec) -> tuple[int, ...]:
    """Return the fewest leading dimensions of a spec without a zero."""
    return min((lead for lead in spec.leads if min(lead, default=0) > 0), key=len)


def usual_size(spec: OpSpec) -> int:
    """Return the size of small inputs."""
    return max(spec.sizes[:2])


def layouts_of(spec: OpSpec) -> list[str]:
    """Return the layouts for a form. Nothing is written to a tensor that is broadcast."""
    return [layout for layout in LAYOUTS if layout != BROADCAST or not spec.functional.mutates]


def sweep(
    spec: OpSpec, variant: str, dtype: torch.dtype, *, brief: bool = False
) -> Iterator[Example]:
    """Yield an example for each corner: sizes, rows, dimensions, layouts, values, settings.

    Args:
        spec: of the form.
        variant: of the spec. The first one has more sizes and rows, which take most of the time:
            no kernel has a loop of its own for each variant.
        dtype: of drawn tensors.
        brief: take every other number of a list.
    """
    make = partial(Example, variant, dtype)
    if variant == next(iter(spec.variants)):
        yield from _of_sizes(spec, make, brief=brief)
    yield from _of_layouts(spec, make, brief=brief)
    rest = shortest_lead(spec)[1:]
    usual = usual_size(spec)
    for values in VALUES:
        for size in _some((usual, 64, 513), brief):
            yield make((9, *rest), size, values=values)
    for threads in _some(THREADS, brief):
        yield make((13, *rest), usual, threads=threads)
        yield make((101, *rest), 64, threads=threads)
    yield make((13, *rest), usual, int32=True)
    for settings in other_settings(spec, variant):
        for size in _some((usual, 64), brief):
            yield make((9, *rest), size, settings=settings)
            yield make((9, *rest), size, values="rows of all sizes", settings=settings)


def _some(numbers: Sequence[Number], brief: bool) -> Sequence[Number]:
    """Return all numbers, or every other one."""
    return numbers[1::2] if brief else numbers


def _of_sizes(spec: OpSpec, make: Callable[..., Example], *, brief: bool) -> Iterator[Example]:
    """Yield examples of many numbers of elements and rows."""
    short = shortest_lead(spec)
    rest = short[1:]
    for sizes in (SIZES, LONG_SIZES, LONGEST_SIZES):
        for size in _some(sizes, brief):
            yield make(short, size)
    for rows in _some(ROWS, brief):
        yield make((rows, *rest), usual_size(spec))
    for rows in _some(MANY_ROWS, brief):
        yield make((rows, *rest), min(spec.sizes))
    for rows, size in _some(BLOCKS, brief):
        yield make((rows, *rest), size)


def _of_layouts(spec: OpSpec, make: Callable[..., Example], *, brief: bool) -> Iterator[Example]:
    """Yield examples of other numbers of dimensions, and of each layout."""
    usual = usual_size(spec)
    for lead in LEADS:
        yield make(lead, usual)
    longest = max(spec.leads, key=lambda lead: (min(lead, default=0) > 0, len(lead)))
    few = (5, *shortest_lead(spec)[1:])
    # A kernel may take another path for each number of dimensions.
    by_length = {len(lead): lead for lead in spec.leads if min(lead, default=0) > 0}
    leads = () if brief else dict.fromkeys((longest, few, *by_length.values()))
    for layout in layouts_of(spec):
        yield make(longest, usual, layout=layout)
        for lead in leads:
            yield make(lead, 16, layout=layout)


def other_settings(spec: OpSpec, variant: str) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield other numbers in place of each number among the settings of a variant."""
    own = spec.variants[variant]
    for name, parameter in inspect.signature(spec.functional.native).parameters.items():
        value = own.get(name, parameter.default)
        # Another seed gives other numbers, as it should.
        if name == spec.functional.random:
            continue
        if type(value) is float:
            yield ((name, value * 0.5),)
            yield ((name, value * 3 + 0.01),)
        if type(value) is int:
            for other in (value + 1, value + 2, 2 * value + 2):
                yield ((name, other),)
