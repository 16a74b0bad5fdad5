"""The limits of one rendering of a chat template: time, steps, characters and memory.

Each value that a template makes is weighed when it is made: a text by its characters, a list by what it holds.
Templates cannot change lists, so a weight is known for good, and one that holds another twice weighs twice as much at
once. What has a weight within the limit is printed, compared and sorted within one too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Namespace

MOST_CHARACTERS = 1 << 24
"""Written for a chat, and in any text or list on the way there; a million tokens have about a third of it."""
MOST_BYTES = 1 << 30
"""Of all texts and lists that a rendering makes, those included that it drops."""
MOST_PRODUCT = 1 << 27
"""Of the weight of a text and of what one of its methods takes, which no result is longer than."""
MOST_STEPS = 1_000_000
"""Turns of loops and calls of macros; and the largest number that functions take, which may be a width or a count."""
MOST_SECONDS = 10.0
MOST_BITS = 1 << 14
"""Of a whole number."""

_PER_ELEMENT = 64
"""Characters that an element of a list weighs beside its own, and bytes that it takes."""
_TEXTS = (str, bytes)
_NUMBERS = (int, float, type(None))
_HOLDERS = (Namespace, Cycler, LoopContext)
"""Objects whose contents can change, or are made behind the limits' back."""


@dataclass
class Budget:
    """The time, the steps, the characters and the bytes that a rendering has left."""

    deadline: float
    steps: int = MOST_STEPS
    characters: int = MOST_CHARACTERS
    bytes: int = MOST_BYTES
    weights: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Of lists by their identities, with the lists, so that these stay theirs."""

    def step(self) -> None:
        """Count a turn of a loop or a call of a macro."""
        self.steps -= 1
        if self.steps < 0:
            raise TemplateRuntimeError(
                f"it takes more than {MOST_STEPS} steps: a loop in it may have no end"
            )
        self._expect_time()

    def write(self, characters: int) -> None:
        """Count characters that are written."""
        self.characters -= characters
        if self.characters < 0:
            raise TemplateRuntimeError(f"it writes more than {MOST_CHARACTERS} characters")

    def made(self, value: Any) -> Any:
        """Return what an operation has made, within the limits; of an iterator, one of the same elements."""
        if isinstance(value, Iterator):
            elements = list(value)
            self.weigh(elements)
            return iter(elements)
        self.weigh(value)
        if isinstance(value, _TEXTS):
            self._charge(_bytes(value))
        return value

    def weigh(self, value: Any) -> int:
        """Return the weight of a value, about the characters of its text."""
        self._expect_time()
        weight = self._weight(value)
        expect_room(weight)
        return weight

    def take(self, values: Iterable[Any]) -> int:
        """Return the weight of what a function is called with, within the limits."""
        weight = 0
        for value in values:
            if isinstance(value, int):
                expect_count(value)
            weight += self.weigh(value)
        expect_room(weight)
        return weight

    def _weight(self, value: Any) -> int:
        if isinstance(value, _TEXTS):
            return 1 + len(value)
        if isinstance(value, _NUMBERS):
            if isinstance(value, int) and value.bit_length() > MOST_BITS:
                raise TemplateRuntimeError(f"it makes a number of more than {MOST_BITS} bits")
            return 1
        if not isinstance(value, Collection) or isinstance(value, range):
            return 1
        known = self.weights.get(id(value))
        if known is None:
            known = self.weights[id(value)] = value, self._weight_of_elements(value)
        return known[1]

    def _weight_of_elements(self, value: Collection[Any]) -> int:
        elements = [*value, *value.values()] if isinstance(value, Mapping) else value
        weight = _PER_ELEMENT * (1 + len(elements))
        expect_room(weight)
        self._charge(4 * _PER_ELEMENT + weight)  # with what is kept of it here
        for element in elements:
            if isinstance(element, _TEXTS):
                self._charge(_bytes(element))
            elif isinstance(element, _HOLDERS):
                raise TemplateRuntimeError("it puts a namespace, a cycler or a loop into a list")
            weight += self._weight(element)
        expect_room(weight)
        return weight

    def _charge(self, size: int) -> None:
        self.bytes -= size
        if self.bytes < 0:
            raise TemplateRuntimeError(
                f"it makes texts and lists of more than {MOST_BYTES} bytes in all"
            )

    def _expect_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise TemplateRuntimeError(f"it takes longer than {MOST_SECONDS:g} seconds")


def expect_room(weight: int) -> None:
    """Refuse what is too long."""
    if weight > MOST_CHARACTERS:
        raise TemplateRuntimeError(
            f"it makes a text or a list that is longer than {MOST_CHARACTERS}"
        )


def expect_product(weight: int, other: int) -> None:
    """Refuse a call that may make a text as long as both weights multiplied."""
    if weight * other > MOST_PRODUCT:
        raise TemplateRuntimeError(
            f"it calls what may make a text that is longer than {MOST_PRODUCT}, of {weight} and {other} characters"
        )


def expect_count(number: int) -> None:
    """Refuse a number that is too large for a width or a count."""
    if abs(number) > MOST_STEPS:
        shown = f"{number:.3g}" if number.bit_length() < 1000 else f"of {number.bit_length()} bits"
        raise TemplateRuntimeError(
            f"it calls a function with the number {shown}, at most {MOST_STEPS} is taken"
        )


def _bytes(text: str | bytes) -> int:
    return len(text) if text.isascii() else 4 * len(text)


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")


@contextmanager
def limited() -> Iterator[None]:
    """Give the templates that are rendered within the block one budget. Without it they cannot be rendered."""
    token = BUDGET.set(Budget(time.monotonic() + MOST_SECONDS))
    try:
        yield
    finally:
        BUDGET.reset(token)
