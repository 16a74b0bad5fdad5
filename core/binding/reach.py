"""The children of a layer that the code of a replacement can call, as far as the code names them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from opgraft.registry.op_classes import definer, kernel_methods, own_classes
from torch import nn

_BY_COMPUTED_NAMES = frozenset(
    {
        "_modules",
        "attrgetter",
        "children",
        "get_submodule",
        "getattr",
        "methodcaller",
        "modules",
        "named_children",
        "named_modules",
    }
)
"""Code that uses one of these may call any child."""


class AnyChild(Exception):  # noqa: N818  # a verdict, not an error
    """The code may call any child."""


def idle_children(layer: Any) -> frozenset[str]:
    """Return the names of the children that no call of ``layer`` runs here and now, if no gradient is required.

    ``layer.idle()`` is true of the code that the same class brings. If a plugin replaces the layer and brings no
    ``idle``, the names in the code of the replacement count: a child that the code does not name is idle.
    """
    target = layer.binding.replacement.target
    told: frozenset[str] = layer.idle()
    if layer.op_class is target:
        return told
    if definer(layer.op_class, "idle", above=target) is not None:
        return told
    names = names_reached(layer)
    if names is None:
        return told
    unnamed = frozenset(layer._modules) - names
    if _runs_forward_of(target, layer):
        return unnamed | told
    return unnamed


def reaches(layer: Any, attribute: str) -> bool:
    """Return False if a plugin replaces ``layer`` and the code of the replacement does not use ``attribute``."""
    if layer.op_class is layer.binding.replacement.target:
        return True
    names = names_reached(layer)
    return names is None or attribute in names


def names_reached(layer: Any) -> frozenset[str] | None:
    """Return the names in all code that the kernel of ``layer`` can call; ``None`` if that may be any name."""
    try:
        names = _names_in(_code_of(layer))
        return names | frozenset(_held(layer, names))
    except AnyChild:
        return None


def _held(layer: nn.Module, names: frozenset[str]) -> Iterator[str]:
    """Yield the children in lists, tuples and mappings that the code uses."""
    for name in names & vars(layer).keys():
        value = vars(layer)[name]
        # A function that is kept on the instance may have the layer, and call any child.
        if isinstance(value, (FunctionType, functools.partial)):
            raise AnyChild
        if isinstance(value, Mapping):
            value = list(value.values())
        if not isinstance(value, (list, tuple)):
            continue
        for child, module in layer._modules.items():
            if any(module is each for each in value):
                yield child


def _runs_forward_of(target: type, layer: Any) -> bool:
    """Return True if the kernel of ``layer`` is the ``forward`` of the replaced class, or can call it."""
    owner = definer(target, "forward")
    return owner is not None and vars(owner)["forward"] in _code_of(layer)


def _code_of(layer: Any) -> tuple[FunctionType, ...]:
    kernel = layer.binding.kernel.winner
    return _functions(layer.op_class, kernel.owner, kernel.method)


def _names_in(functions: Iterable[FunctionType]) -> frozenset[str]:
    names: set[str] = set()
    for function in functions:
        names |= _names(function.__code__)
    if names & _BY_COMPUTED_NAMES:
        raise AnyChild
    return frozenset(names)


@functools.lru_cache(maxsize=256)
def _functions(cls: type, owner: type, method: str) -> tuple[FunctionType, ...]:
    """Collect the kernel and the functions that it can call: methods, and functions of the plugin."""
    found = _plain_functions(vars(owner)[method])
    for function in found:  # the list grows meanwhile
        names = _names(function.__code__)
        for further in (*_methods(cls, names), *_beside(function, names, cls)):
            if further not in found:
                found.append(further)
    return tuple(found)


def _methods(cls: type, names: frozenset[str]) -> Iterator[FunctionType]:
    """Yield the methods of ``cls`` with these names; with ``super`` among the names, those of bases too."""
    kernels = frozenset(kernel_methods())
    wanted = set(names)
    # The base of all ops calls the next kernel of the chain in place of the one that is named.
    if ("super" in names and names & kernels) or names & (kernels - {"forward"}):
        wanted |= kernels
    for name in wanted:
        definitions = [vars(base)[name] for base in own_classes(cls) if name in vars(base)]
        if "super" not in names and name not in kernels:
            definitions = definitions[:1]
        for definition in definitions:
            yield from _plain_functions(definition)


def _beside(function: FunctionType, names: frozenset[str], cls: type) -> Iterator[FunctionType]:
    """Yield the functions of the plugin of ``cls`` that a function names or has in its closure."""
    spaces = [function.__globals__]
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            spaces.append(vars(value))
    things = [space[name] for space in spaces for name in names if name in space]
    things += [cell.cell_contents for cell in function.__closure__ or ()]
    for thing in things:
        # Functions of opgraft and torch are not given the layer, save by its own code.
        if isinstance(thing, FunctionType) and _package(thing) == _package(cls):
            yield thing


def _package(thing: type | FunctionType) -> str:
    return (thing.__module__ or "").partition(".")[0]


def _plain_functions(definition: Any) -> list[FunctionType]:
    """Return the functions of an attribute of a class: the decorated one, and the one below its decorators."""
    bare = definition
    if isinstance(definition, property):
        bare = definition.fget
    if isinstance(definition, (staticmethod, classmethod)):
        bare = definition.__func__
    if not callable(bare):
        return []
    functions = [bare]
    below = inspect.unwrap(bare)
    if below is not bare:
        functions.append(below)
    if not all(isinstance(each, FunctionType) for each in functions):
        raise AnyChild
    return functions


def _names(code: CodeType) -> frozenset[str]:
    """Return the names of attributes and globals in a function and in the functions inside."""
    names = set(code.co_names)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            names |= _names(part)
    return frozenset(names)
