"""Finds what a forward does besides returning a result, which an op in its place would not do."""

from __future__ import annotations

import copy
import dis
import inspect
from collections import deque
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

_WRITES = frozenset(
    ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL", "DELETE_GLOBAL", "PRINT_EXPR")
)
_GROWING = (list, set, deque)
_CONTAINERS = (list, dict, set, deque)
_EMPTY = CellType()


def side_effect_of(module: nn.Module) -> str:
    """Say what the code of a forward does besides returning a result, "" if nothing can be seen."""
    for function in _functions(type(module), inspect.unwrap(inspect.getattr_static(type(module), "forward")), set()):
        enclosed = _enclosed(function)
        for instruction in _instructions(function.__code__):
            name, opname = instruction.argval, instruction.opname
            if opname in _WRITES or (opname == "STORE_DEREF" and name in enclosed):
                return f"its forward writes to {name}" if isinstance(name, str) else "its forward writes to an element"
            found = function.__globals__.get(name) if opname == "LOAD_GLOBAL" else enclosed.get(name)
            if isinstance(found, _GROWING) or (opname == "LOAD_GLOBAL" and name == "print"):
                return f"its forward uses {name}, and whoever reads that would miss its calls"
    return ""


def written_global(function: FunctionType) -> str:
    """Name what a function writes to in the namespace of its file, "" if there is nothing."""
    written = (i.argval for i in _instructions(function.__code__) if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"))
    return next(written, "")


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


def _enclosed(function: FunctionType) -> dict[str, Any]:
    """Give what a function has of the functions around it, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}


def _copied(value: Any) -> Any:
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, _CONTAINERS):
        return copy.copy(value)
    return _copied_object(value) if _is_object(value) else value


def _copied_object(value: Any) -> Any:
    """Copy an object and the containers that it holds, no deeper, as it may lead back to itself."""
    try:
        twin = copy.copy(value)
    except Exception:  # a lock, perhaps, which nobody can copy
        return value
    if twin is not value:
        held = {name: copy.copy(part) for name, part in vars(value).items() if isinstance(part, _CONTAINERS)}
        twin.__dict__.update(held)
    return twin


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with attributes that is neither a tensor nor a module."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (nn.Module, Tensor))


def _same(value: Any, other: Any) -> bool:
    if value is other or type(value) is not type(other):
        return value is other
    if _is_object(value) and not isinstance(value, _CONTAINERS):
        return _same(vars(value), vars(other))
    if not isinstance(value, _CONTAINERS):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    if isinstance(value, set):
        return bool(value == other)
    return len(value) == len(other) and all(_same(a, b) for a, b in zip(value, other, strict=True))
