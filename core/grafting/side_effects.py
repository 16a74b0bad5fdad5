"""Finds what a forward does besides returning a result, which an op in its place would not do."""

from __future__ import annotations

import copy
import dis
import inspect
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_WRITES = frozenset(
    ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL", "DELETE_GLOBAL", "PRINT_EXPR")
)
_GROWING = (list, set, deque)
_CONTAINERS = (list, dict, set, deque)


def side_effect_of(module: nn.Module) -> str:
    """Say what the code of a forward does besides returning a result, "" if nothing can be seen."""
    for function in _functions(type(module), inspect.unwrap(inspect.getattr_static(type(module), "forward")), set()):
        for instruction in _instructions(function.__code__):
            name = instruction.argval
            if instruction.opname in _WRITES:
                return f"its forward writes to {name}" if isinstance(name, str) else "its forward writes to an element"
            if instruction.opname == "LOAD_GLOBAL" and (name == "print" or _grows(function.__globals__.get(name))):
                return f"its forward uses {name}, and whoever reads that would miss its calls"
    return ""


def detached(module: nn.Module) -> nn.Module:
    """Copy a module with the containers that it holds, so that running the copy leaves the module as it is."""
    twin = copy.copy(module)
    twin.__dict__.update({name: _copied(value) for name, value in vars(twin).items()})
    return twin


def changed_attribute(module: nn.Module, since: nn.Module) -> str:
    """Name an attribute of ``module`` that differs from that of the copy ``since``, "" if there is none."""
    names = sorted(vars(module).keys() | vars(since).keys())
    # `_copied` stands for a missing attribute, as no module holds it.
    return next((n for n in names if not _same(vars(module).get(n, _copied), vars(since).get(n, _copied))), "")


def _functions(cls: type, function: Any, seen: set[Any]) -> Iterator[FunctionType]:
    """Walk over a function, and those of its class and of its file that it names."""
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    yield function
    for name in [name for code in _codes(function.__code__) for name in code.co_names]:
        found = inspect.getattr_static(cls, name, None) if name not in vars(nn.Module) else None
        found = found if found is not None else function.__globals__.get(name)
        if getattr(found, "__module__", None) == function.__module__:
            plain: Any = getattr(found, "__func__", found)
            yield from _functions(cls, inspect.unwrap(plain), seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    for part in _codes(code):
        yield from dis.get_instructions(part)


def _grows(value: Any) -> bool:
    return isinstance(value, _GROWING)


def _copied(value: Any) -> Any:
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _same(value: Any, other: Any) -> bool:
    if type(value) is not type(other) or not isinstance(value, _CONTAINERS):
        return value is other
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    if isinstance(value, set):
        return bool(value == other)
    return len(value) == len(other) and all(_same(a, b) for a, b in zip(value, other, strict=True))
