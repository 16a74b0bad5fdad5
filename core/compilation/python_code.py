"""Python code: find the user's modules, digest functions, and find the globals of a function."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

COVERED = frozenset({"opgraft", "torch", *sys.stdlib_module_names}) - {"__main__"}
"""Packages in the key of the cache by version or by all sources."""

_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_covered(name: str) -> bool:
    """Return True if a module belongs to a package among ``COVERED``."""
    return name.partition(".")[0] in COVERED


def is_own(name: str) -> bool:
    """Return True if a module is the user's code, neither among ``COVERED`` nor installed.

    Such code may change at any time.
    """
    if is_covered(name):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not any(folder in file for folder in _INSTALLED)


def functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of a value: a function, a method, a property, or all of a class."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from functions_of(value.__func__)
    elif isinstance(value, (property, functools.cached_property)):
        for each in (getattr(value, name, None) for name in ("fget", "fset", "fdel", "func")):
            yield from functions_of(each)
    elif isinstance(value, type):
        for each in vars(value).values():
            if not isinstance(each, type):
                yield from functions_of(each)


def globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals with names in the code of a function, each with its name.

    If a global is a module of the user, the attributes with names in the code follow, such as
    ``helpers.scale``.
    """
    names = dict.fromkeys(
        name for code in _codes_within(function.__code__) for name in code.co_names
    )
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if not isinstance(value, ModuleType) or not is_own(value.__name__):
            continue
        held = vars(value)
        for other in names:
            if other in held:
                yield f"{name}.{other}", held[other]


@functools.lru_cache(maxsize=1024)
def code_digest(code: CodeType) -> str:
    """Digest the code of a function."""
    return hashlib.sha256("".join(_instructions(code)).encode()).hexdigest()


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_within(constant)


def _instructions(code: CodeType) -> Iterator[str]:
    for each in _codes_within(code):
        yield each.co_code.hex()
        yield repr(each.co_names)
        for constant in each.co_consts:
            if isinstance(constant, CodeType):
                continue
            # The order of a set differs from process to process.
            if isinstance(constant, frozenset):
                constant = sorted(constant, key=repr)
            yield repr(constant)
