"""Find effects of a forward besides the result. An op would not have these effects."""

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
_DICTIONARY_METHODS = frozenset(("clear", "pop", "popitem", "setdefault", "update"))
_CONTAINER_METHODS = (
    _DICTIONARY_METHODS | {"append", "appendleft", "extend", "extendleft", "insert"}
) - {*dir(Tensor)}
_IN_PLACE = frozenset(
    name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")
)
_SPECIAL = frozenset(f"__{what}{of}__" for what in ("set", "del") for of in ("attr", "item"))
_CHANGING = _CONTAINER_METHODS | _IN_PLACE | _SPECIAL
"""Names of methods that change an object."""

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
"""Modules with imports that have no effect. Names from other modules cannot be looked up here."""

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
"""Types of objects that never change, or that this module looks into."""

_EMPTY = CellType()


class _Reference(NamedTuple):
    """An object outside of the arguments of a function.

    Attributes:
        name: of the object.
        found: the object.
        scope: the class for names in the code of the object, if the object is a method.
    """

    name: str
    found: Any
    scope: type | None


def side_effect_of(module: nn.Module) -> str:
    """Return an effect of a forward besides the result, or "" if none can be seen."""
    cls = type(module)
    forward = _Reference("forward", inspect.getattr_static(cls, "forward"), cls)
    return _first("its forward", _effects(forward, vars(module), set()))


def side_effect_of_function(function: FunctionType) -> str:
    """Return an effect of a function besides the result, or "" if none can be seen."""
    name = function.__name__
    return _first(name, _effects(_Reference(name, function, None), {}, set()))


def _first(subject: str, effects: Iterator[str]) -> str:
    return next((f"{subject} {effect}" for effect in effects), "")


def _effects(reference: _Reference, attributes: Mapping[str, Any], seen: set[Any]) -> Iterator[str]:
    """Walk over a function and the functions in the names of the code.

    torch's own functions have documented effects only.
    """
    function = _plain(reference.found)
    if not isinstance(function, FunctionType) or function in seen:
        return

    seen.add(function)
    if _is_torchs(function):
        further = list(_enclosed(function))
    else:
        further = list(_references(function, reference.scope, attributes))
        for name, found, _ in further:
            if any(found is each for each in _ACTING) or _keeps(found, function):
                yield f"uses {name}, and whoever reads that would miss its calls"
        yield from _writes(function)

    for each in further:
        yield from _effects(each, attributes, seen)


def _writes(function: FunctionType) -> Iterator[str]:
    # Variables of functions around outlive the call.
    enclosed = {*function.__code__.co_freevars}
    last = "an element"

    for instruction in _instructions(function.__code__):
        name, opname = instruction.argval, instruction.opname
        if opname in _WRITES or (opname == "STORE_DEREF" and name in enclosed):
            yield f"writes to {name if isinstance(name, str) else 'an element'}"
        if opname in _ATTRIBUTE and name in _CHANGING:
            yield f"changes {last}"
        if opname == "IMPORT_NAME" and name.partition(".")[0] not in _IMPORTABLE:
            yield f"imports {name} when it runs, and may do anything with it"
        if opname.startswith("LOAD_") and opname != "LOAD_CONST":
            last = str(name)


def _keeps(found: Any, function: FunctionType) -> bool:
    """Return True if an object may remember a use by a function."""
    if isinstance(found, MethodType | BuiltinFunctionType):
        return _keeps(found.__self__, function)
    # Reading a plain dictionary changes nothing, reading a defaultdict may.
    if isinstance(found, dict) and not isinstance(found, defaultdict):
        return not _DICTIONARY_METHODS.isdisjoint(_names(function))
    # An operation in place has no instruction of its own.
    if isinstance(found, Tensor):
        return True
    return not isinstance(found, _HARMLESS) and not _is_torchs(type(found))


def _references(
    function: FunctionType, scope: type | None, attributes: Mapping[str, Any]
) -> Iterator[_Reference]:
    """Yield the objects in the names of a function.

    A name may belong to the file, to a function around, to a default, to the class, or to the
    instance.
    """
    yield from _globals(function)
    yield from _enclosed(function)

    for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
        if parameter.default is not parameter.empty:
            yield _Reference(parameter.name, parameter.default, None)

    names = list(_names(function))

    for name in names:
        if name in attributes:
            # Other attributes of an instance are compared, before and after.
            if _plain(attributes[name]):
                yield _Reference(name, attributes[name], None)
        elif scope is not None:
            own = [base for base in scope.__mro__ if name in vars(base) and not _is_torchs(base)]
            # The bases behind the first one are reached by ``super`` only.
            for base in own if "super" in names else own[:1]:
                yield _Reference(name, vars(base)[name], scope)


def _globals(function: FunctionType) -> Iterator[_Reference]:
    """Yield the objects of the file, and the attributes of modules and classes of the file."""
    found: Any = None
    for instruction in _instructions(function.__code__):
        name, opname = instruction.argval, instruction.opname
        if opname in _GLOBAL:
            found = function.__globals__.get(name, _builtin(name))
            yield _Reference(name, found, None)
        elif opname in _ATTRIBUTE and _is_looked_into(found):
            scope = found if isinstance(found, type) else None
            found = inspect.getattr_static(found, name, None)
            yield _Reference(name, found, scope)
        else:
            found = None


def _is_looked_into(found: Any) -> bool:
    return isinstance(found, ModuleType | type) and not _is_torchs(found)


def _builtin(name: str) -> Any:
    found = getattr(builtins, name, None)
    return found if isinstance(found, BuiltinFunctionType) else None


def _plain(value: Any) -> Any:
    """Return the function inside a wrapper, or ``None``."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, partial):
        return _plain(value.func)
    if isinstance(value, staticmethod | classmethod | MethodType):
        return _plain(value.__func__)
    return value if isinstance(value, FunctionType) else None


def _is_torchs(value: Any) -> bool:
    file = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(file).partition(".")[0] == torch.__name__


def _names(function: FunctionType) -> Iterator[str]:
    for code in _codes(function.__code__):
        yield from code.co_names


def written_global(function: FunctionType) -> str:
    """Return the name of a global that a function writes to, or ""."""
    for instruction in _instructions(function.__code__):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return str(instruction.argval)
    return ""


def detached(module: nn.Module) -> nn.Module:
    """Copy a module with its containers, so that a call of the copy leaves the module unchanged."""
    twin = copy.copy(module)
    twin.__dict__.update({name: _copied(value) for name, value in vars(twin).items()})
    return twin


def changed_attribute(module: nn.Module, since: nn.Module) -> str:
    """Return the name of an attribute that differs from the copy ``since``, or ""."""
    # `_copied` stands for a missing attribute, as no module holds `_copied`.
    for name in sorted(vars(module).keys() | vars(since).keys()):
        if not _same(vars(module).get(name, _copied), vars(since).get(name, _copied)):
            return name
    return ""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    for part in _codes(code):
        yield from dis.get_instructions(part)


def _enclosed(function: FunctionType) -> Iterator[_Reference]:
    """Yield the objects from functions around a function."""
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
    """Copy an object and its containers, and nothing deeper: an object may lead back to itself."""
    try:
        twin = copy.copy(value)
    except Exception:  # a lock, for example, cannot be copied
        return value

    if twin is value:
        return twin

    for name, part in vars(value).items():
        if isinstance(part, _CONTAINERS):
            twin.__dict__[name] = copy.copy(part)

    return twin


def _is_object(value: Any) -> bool:
    """Return True for an object with attributes, except tensors and modules."""
    if isinstance(value, nn.Module | Tensor):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


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

    return len(value) == len(other) and all(map(_same, value, other))
