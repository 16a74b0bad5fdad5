"""Code of Python: whose it is, a digest of it, and what it reads besides its arguments."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

COVERED = {"opgraft", "torch", *sys.stdlib_module_names} - {"__main__"}
"""Packages of which the versions or all sources are in the key of the cache."""

_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_covered(name: str) -> bool:
    """Tell whether a module is of a package among ``COVERED``."""
    return name.partition(".")[0] in COVERED


def is_own(name: str) -> bool:
    """Tell whether a module is the user's, neither among ``COVERED`` nor installed, so that it may change any time."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not is_covered(name) and not any(folder in file for folder in _INSTALLED)


def functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that a value is: itself, what a method or a property wraps, and those of a class."""
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
    """Yield what the code of a function may read from its module, and from modules of the user that are named there."""
    names = dict.fromkeys(
        name for code in _codes_within(function.__code__) for name in code.co_names
    )
    for name in names:
        if name in function.__globals__:
            value = function.__globals__[name]
            yield name, value
            if isinstance(value, ModuleType) and is_own(value.__name__):
                yield from (
                    (f"{name}.{other}", vars(value)[other])
                    for other in names
                    if other in vars(value)
                )


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
            # Sets have an order of their own in each process.
            if not isinstance(constant, CodeType):
                yield repr(
                    sorted(constant, key=repr) if isinstance(constant, frozenset) else constant
                )
