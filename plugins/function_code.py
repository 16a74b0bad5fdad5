"""The code and the default values of functions. A plugin can replace these within a function.

An assignment to ``f.__code__`` or ``f.__defaults__`` changes each call of ``f``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

from opgraft.plugins.changes import Change, equal

_CODE = operator.attrgetter("__code__")
_DEFAULTS = operator.attrgetter("__defaults__")
_KEYWORDS = operator.attrgetter("__kwdefaults__")
_ASSIGNED = ("__code__", "__defaults__")
_IN_PLACE = "__kwdefaults__"
"""The attribute with a dictionary, which a plugin can change without an assignment."""

_Parts = Mapping[str, Any]

Code = dict[FunctionType, _Parts]
"""By function: the values of the attributes that hold the code and the defaults."""


class _FunctionsOf(NamedTuple):
    """The functions among the definitions of a thing, and those with keyword-only arguments."""

    names: Mapping[str, Any]
    functions: tuple[FunctionType, ...]
    with_keywords: tuple[FunctionType, ...]


class CodeReader:
    """Reads the code of functions again and again, and copies it only if some code has changed."""

    def __init__(self) -> None:
        self._names: tuple[Mapping[str, Any], ...] = ()
        self._found: dict[int, _FunctionsOf] = {}
        self._functions: tuple[FunctionType, ...] = ()
        self._with_keywords: tuple[FunctionType, ...] = ()
        self._values: list[list[Any]] = []
        self._code: Code = {}

    def read(self, names: tuple[Mapping[str, Any], ...]) -> Code:
        """Return the code of all functions among definitions by name.

        Args:
            names: the definitions of each thing. If one changes, the thing has another mapping.
        """
        if names is not self._names:  # a definition was added, removed or replaced
            self._find_functions(names)
            # Last, so that an interrupt before has the functions found again.
            self._names = names
        now = self._values_now()
        if not equal(now, self._values):
            self._code = {function: self._parts(function) for function in self._functions}
            self._values = [*now[:2], [*map(_keywords_of, self._with_keywords)]]
        return self._code

    def _values_now(self) -> list[list[Any]]:
        """Return the code, the defaults and the defaults of keywords of all functions."""
        # Without a loop of Python's: there are 6,000 functions and more.
        codes = [*map(_CODE, self._functions)]
        defaults = [*map(_DEFAULTS, self._functions)]
        keywords = [*map(_KEYWORDS, self._with_keywords)]
        return [codes, defaults, keywords]

    def _find_functions(self, names: tuple[Mapping[str, Any], ...]) -> None:
        """Find the functions of changed definitions; those of the others are known."""
        self._found = {id(each): self._found.get(id(each)) or _found_in(each) for each in names}
        functions = chain.from_iterable(each.functions for each in self._found.values())
        keywords = chain.from_iterable(each.with_keywords for each in self._found.values())
        # A function may stand in several things.
        self._functions = tuple(dict.fromkeys(functions))
        self._with_keywords = tuple(dict.fromkeys(keywords))

    def _parts(self, function: FunctionType) -> _Parts:
        """Return the known parts of a function, or a copy of the present ones."""
        known = self._code.get(function)
        if known is None:
            return _parts_of(function)
        is_same = all(known[name] is getattr(function, name) for name in _ASSIGNED)
        if is_same and equal(known[_IN_PLACE], function.__kwdefaults__):
            return known
        return _parts_of(function)


def code_of(names: Iterable[Mapping[str, Any]]) -> Code:
    """Return the code of all functions among definitions by name."""
    return {function: _parts_of(function) for function in _functions_of(names)}


def changes_of_code(before: Code) -> Iterator[tuple[str, Change]]:
    """Yield the changes since, each with the module of the function."""
    for function, was in before.items():
        module = str(function.__module__)  # None of a function that torch compiles
        for name, value in _parts_of(function).items():
            # Equal code does the same, whoever has put it there.
            if equal(was[name], value):
                continue
            undo = partial(setattr, function, name, was[name])
            what = f"{module}.{function.__qualname__}.{name}"
            yield module, Change(what, undo, patch=module.startswith("torch"))


_INNER: Mapping[type, Callable[[Any], tuple[Any, ...]]] = {
    property: lambda value: (value.fget, value.fset),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    FunctionType: lambda value: (vars(value).get("__wrapped__"),),
}
"""By type: the functions inside of a definition."""


def _found_in(names: Mapping[str, Any]) -> _FunctionsOf:
    functions = tuple(_functions_of([names]))
    return _FunctionsOf(names, functions, tuple(filter(_takes_keywords, functions)))


def _takes_keywords(function: FunctionType) -> bool:
    return function.__code__.co_kwonlyargcount > 0


def _keywords_of(function: FunctionType) -> dict[str, Any] | None:
    """Return a copy of the defaults of keywords, since a plugin can write into the dictionary."""
    keywords = function.__kwdefaults__
    return None if keywords is None else dict(keywords)


def _parts_of(function: FunctionType) -> _Parts:
    return {
        "__code__": function.__code__,
        "__defaults__": function.__defaults__,
        _IN_PLACE: _keywords_of(function),
    }


def _functions_of(names: Iterable[Mapping[str, Any]]) -> Iterator[FunctionType]:
    """Yield each function once, also the methods of properties and what a decorator has wrapped."""
    values: list[Any] = []
    for each in names:
        values += tuple(each.values())
    seen = set[int]()
    # The list grows on the way. No recursion, as a function may wrap itself.
    for value in values:
        kind = type(value)  # not isinstance, which asks a proxy of a plugin
        if kind not in _INNER or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is FunctionType:
            yield value
        values += _INNER[kind](value)
