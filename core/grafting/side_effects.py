"""Finds what a forward does besides returning a result, which an op in its place would not do."""

from __future__ import annotations

import builtins
import copy
import dis
import inspect
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_WRITES = frozenset(
    (
        "STORE_ATTR",
        "DELETE_ATTR",
        "STORE_SUBSCR",
        "DELETE_SUBSCR",
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
        "PRINT_EXPR",
    )
)
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_CONTAINERS = (list, dict, set, deque)
_OF_DICTIONARIES = frozenset(("clear", "pop", "popitem", "setdefault", "update"))
_OF_CONTAINERS = (_OF_DICTIONARIES | {"append", "appendleft", "extend", "extendleft", "insert"}) - {
    *dir(Tensor)
}
_IN_PLACE = frozenset(
    name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")
)
_SPECIAL = frozenset(f"__{what}{of}__" for what in ("set", "del") for of in ("attr", "item"))
_ACTING = (
    print,
    setattr,
    delattr,
    exec,
    eval,
    compile,
    open,
    input,
    globals,
    breakpoint,
    __import__,
)
"""Builtins that act, or run code that cannot be read here."""

_IMPORTABLE = frozenset(("torch", "math", "typing"))
"""Modules whose import in a function tells nothing. What others give it cannot be looked up in its file."""

_HARMLESS = (
    *(type(None), int, float, complex, str, bytes, tuple, frozenset, range, Enum, MappingProxyType),
    *(
        type,
        ModuleType,
        FunctionType,
        MethodType,
        BuiltinFunctionType,
        property,
        staticmethod,
        classmethod,
        partial,
    ),
)
"""Types of what does not change, or is looked into."""

_EMPTY = CellType()


class _Reference(NamedTuple):
    """One object that a function finds outside of its arguments, and the class in whose methods names are looked up."""

    name: str
    found: Any
    scope: type | None


def side_effect_of(module: nn.Module) -> str:
    """Say what the code of a forward does besides returning a result, "" if nothing can be seen."""
    forward = inspect.getattr_static(type(module), "forward")
    return _first(
        "its forward", _effects(_Reference("forward", forward, type(module)), vars(module), set())
    )


def side_effect_of_function(function: FunctionType) -> str:
    """Say what a function does besides returning a result, "" if nothing can be seen."""
    name = function.__name__
    return _first(name, _effects(_Reference(name, function, None), {}, set()))


def _first(subject: str, effects: Iterator[str]) -> str:
    return next((f"{subject} {effect}" for effect in effects), "")


def _effects(reference: _Reference, attributes: Mapping[str, Any], seen: set[Any]) -> Iterator[str]:
    """Walk over a function, and those that it names; torch's own are taken for what their documentation says."""
    function = _plain(reference.found)
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    of_torch = _is_torchs(function)
    further = (
        [*_enclosed(function)]
        if of_torch
        else [*_references(function, reference.scope, attributes)]
    )
    if not of_torch:
        for name, found, _ in further:
            if any(found is each for each in _ACTING) or _keeps(found, function):
                yield f"uses {name}, and whoever reads that would miss its calls"
        yield from _writes(function)
    for each in further:
        yield from _effects(each, attributes, seen)


def _writes(function: FunctionType) -> Iterator[str]:
    enclosed = {*function.__code__.co_freevars}
    last = "an element"
    for instruction in _instructions(function.__code__):
        name, opname = instruction.argval, instruction.opname
        if opname in _WRITES or (opname == "STORE_DEREF" and name in enclosed):
            yield f"writes to {name if isinstance(name, str) else 'an element'}"
        if opname in _ATTRIBUTE and (
            name in _OF_CONTAINERS or name in _IN_PLACE or name in _SPECIAL
        ):
            yield f"changes {last}"
        if opname == "IMPORT_NAME" and name.partition(".")[0] not in _IMPORTABLE:
            yield f"imports {name} when it runs, and may do anything with it"
        if opname.startswith("LOAD_") and opname != "LOAD_CONST":
            last = str(name)


def _keeps(found: Any, function: FunctionType) -> bool:
    """Tell whether an object may remember that a function has used it."""
    if isinstance(found, (MethodType, BuiltinFunctionType)):
        return _keeps(found.__self__, function)
    if isinstance(found, dict) and not isinstance(found, defaultdict):
        return not _OF_DICTIONARIES.isdisjoint(_names(function))
    return isinstance(found, Tensor) or not (
        isinstance(found, _HARMLESS) or _is_torchs(type(found))
    )


def _references(
    function: FunctionType, scope: type | None, attributes: Mapping[str, Any]
) -> Iterator[_Reference]:
    """Find what a function refers to: in its file, around it, in its defaults, its class and its instance."""
    yield from _globals(function)
    yield from _enclosed(function)
    names = inspect.signature(function, follow_wrapped=False).parameters.values()
    yield from (_Reference(p.name, p.default, None) for p in names if p.default is not p.empty)
    for name in _names(function):
        if (
            name in attributes
        ):  # what an instance has besides functions is compared, before and after
            yield from (
                [_Reference(name, attributes[name], None)] if _plain(attributes[name]) else []
            )
        elif scope is not None:
            own = [base for base in scope.__mro__ if name in vars(base) and not _is_torchs(base)]
            own = own if "super" in _names(function) else own[:1]
            yield from (_Reference(name, vars(base)[name], scope) for base in own)


def _globals(function: FunctionType) -> Iterator[_Reference]:
    """Find what a function refers to in its file, through the modules and classes that it names there."""
    found, scope = None, None
    for instruction in _instructions(function.__code__):
        name, opname = instruction.argval, instruction.opname
        if opname in _GLOBAL:
            found, scope = function.__globals__.get(name, _builtin(name)), None
        elif (
            opname in _ATTRIBUTE and isinstance(found, (ModuleType, type)) and not _is_torchs(found)
        ):
            found, scope = (
                inspect.getattr_static(found, name, None),
                found if isinstance(found, type) else None,
            )
        else:
            found = None
            continue
        yield _Reference(name, found, scope)


def _builtin(name: str) -> Any:
    found = getattr(builtins, name, None)
    return found if isinstance(found, BuiltinFunctionType) else None


def _plain(value: Any) -> Any:
    """Give the function behind what wraps one, ``None`` if there is none."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, partial):
        return _plain(value.func)
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return _plain(value.__func__)
    return value if isinstance(value, FunctionType) else None


def _is_torchs(value: Any) -> bool:
    file = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(file).partition(".")[0] == torch.__name__


def _names(function: FunctionType) -> Iterator[str]:
    for code in _codes(function.__code__):
        yield from code.co_names


def written_global(function: FunctionType) -> str:
    """Name what a function writes to in the namespace of its file, "" if there is nothing."""
    written = (
        i.argval
        for i in _instructions(function.__code__)
        if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    )
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
    return next(
        (n for n in names if not _same(vars(module).get(n, _copied), vars(since).get(n, _copied))),
        "",
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    for part in _codes(code):
        yield from dis.get_instructions(part)


def _enclosed(function: FunctionType) -> Iterator[_Reference]:
    """Find what a function has of the functions around it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != _EMPTY:
            yield _Reference(name, cell.cell_contents, None)


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
        held = {
            name: copy.copy(part)
            for name, part in vars(value).items()
            if isinstance(part, _CONTAINERS)
        }
        twin.__dict__.update(held)
    return twin


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with attributes that is neither a tensor nor a module."""
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(
        value, (nn.Module, Tensor)
    )


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
