"""Functions and methods of torch and opgraft that a plugin replaces for others, by assigning to their names.

A plugin may be the first to import a module of opgraft, and patch it at once. So a definition is also read at the end
of the import that brings it, before any code of the plugin can change it.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from opgraft.plugins.changes import ABSENT, Change

_OPGRAFT = "opgraft"
_LAYERS = "torch.nn"
_OF_TORCH = (torch, torch.Tensor, torch.linalg, torch.fft, torch.special)


@dataclass(frozen=True)
class _Owner:
    """A module, a class or an object, and what it defines by name."""

    thing: Any
    names: Mapping[str, Any]


_Owners = dict[int, _Owner]
"""By the identity of the thing, as some cannot be hashed."""


@dataclass(frozen=True)
class _Seen:
    """The definitions of one look.

    Attributes:
        now: what is defined.
        imported: of the modules that were imported since the look before, what their import defined.
    """

    now: _Owners
    imported: _Owners


class Definitions:
    """The functions, classes and methods of torch and opgraft, an aspect of the process.

    A new name in a module changes nothing for others. Neither does a new name in a class of torch, unless it hides an
    inherited one.
    """

    def __init__(self) -> None:
        self._modules: tuple[str, ...] = ()
        self._things: tuple[Any, ...] = ()
        self._known: _Owners = {}
        self._imported: _Owners = {}

    def read(self) -> _Seen:
        imported, self._imported = self._imported, {}
        modules = tuple(sys.modules)
        if modules != self._modules:
            self._modules = modules
            found = (*_things_of_torch(), *_things_of(_modules_below(_OPGRAFT)))
            self._things = tuple({id(thing): thing for thing in found}.values())
        # What has not changed since the last look is not copied again: there are 16,000 names and more.
        now = [_names_of(thing) for thing in self._things]
        known = [owner.names for owner in self._known.values()]
        if not _alike(known, now):
            self._known = {id(thing): self._owner(thing) for thing in self._things}
        return _Seen(self._known, imported)

    def _owner(self, thing: Any) -> _Owner:
        known, names = self._known.get(id(thing)), _names_of(thing)
        if known is not None and _alike([known.names], [names]):
            return known
        return _Owner(thing, dict(names))

    def changes(self, before: _Seen, after: _Seen) -> Iterator[Change]:
        for key, owner in {**after.imported, **before.now}.items():
            if after.now.get(key) is not owner:
                yield from _changes_of(owner)

    @contextmanager
    def imports_read(self) -> Iterator[None]:
        """Read what modules of opgraft and layers of torch define at the end of their import."""
        reader = _Reader(self._note)
        sys.meta_path.insert(0, reader)
        try:
            yield
        finally:
            with suppress(ValueError):  # a plugin may have removed it
                sys.meta_path.remove(reader)

    def _note(self, modules: Iterable[ModuleType]) -> None:
        found = {id(thing): self._owner(thing) for thing in _things_of(modules)}
        self._imported = {**found, **self._imported}


class _Reader(MetaPathFinder):
    """Calls ``note`` at the end of an import, with all modules that were imported for it.

    What is imported on the way may still change modules that came before. Nobody else's code runs meanwhile.
    """

    def __init__(self, note: Any) -> None:
        self._note = note
        self._local = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith((f"{_OPGRAFT}.", f"{_LAYERS}.")):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        # Python passes over finders without this method too.
        methods = (getattr(finder, "find_spec", None) for finder in others)
        found = (find(fullname, path, target) for find in methods if find is not None)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._observe(spec.loader)
        return spec

    def _observe(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Only for this import: a module keeps its loader, which others may ask for its source.
            with suppress(AttributeError):
                del loader.exec_module
            self._execute(execute, module)

        with suppress(AttributeError):  # of a loader without attributes
            loader.exec_module = exec_module

    def _execute(self, execute: Any, module: ModuleType) -> None:
        outermost = not hasattr(self._local, "modules")
        if outermost:
            self._local.modules = []
        try:
            execute(module)
            self._local.modules.append(module)
        finally:
            if outermost:
                modules = self._local.modules
                del self._local.modules
                self._note(modules)


def _changes_of(owner: _Owner) -> Iterator[Change]:
    thing, was, now = owner.thing, owner.names, _names_of(owner.thing)
    place, patch = _place_of(thing), _home_of(thing).startswith("torch")
    for name, value in was.items():
        new = now.get(name, ABSENT)
        if new is not value and not _is_of_torch_itself(new):
            yield Change(f"{place}.{name}", partial(setattr, thing, name, value), patch=patch)
    if isinstance(thing, type):
        for name in sorted(now.keys() - was.keys()):
            if _counts(thing, name):
                undo = partial(delattr, thing, name)
                yield Change(f"{place}.{name} (new)", undo, patch=patch)


def _names_of(thing: Any) -> Mapping[str, Any]:
    """Return what a thing defines now, by name."""
    names = vars(thing)
    fixed = getattr(type(thing), "DEFINED_BY", None)
    return names if fixed is None else {name: names[name] for name in fixed if name in names}


def _modules_below(package: str) -> list[ModuleType]:
    """Return a package and its modules, as far as they are imported."""
    below = f"{package}."
    found = [(name, module) for name, module in list(sys.modules.items()) if module is not None]
    return [module for name, module in found if name == package or name.startswith(below)]


def _things_of_torch() -> Iterator[Any]:
    """Yield the modules and classes by which everybody computes with torch."""
    yield from _OF_TORCH
    yield from _modules_below(_LAYERS)
    yield from _layers()


@functools.cache
def _layers() -> tuple[type, ...]:
    found = dict.fromkeys(value for value in vars(torch.nn).values() if isinstance(value, type))
    return tuple(each for each in found if issubclass(each, torch.nn.Module))


def _things_of(modules: Iterable[ModuleType]) -> Iterator[Any]:
    """Yield modules with their classes and with objects that stand for functions."""
    for module in modules:
        yield module
        if _home_of(module).startswith(f"{_OPGRAFT}."):
            yield from _inside(module)


def _inside(module: ModuleType) -> tuple[Any, ...]:
    """Return the classes and objects that a module defines."""
    found = [value for value in vars(module).values() if _is_defined_in(module, value)]
    ops = [vars(value).get("op_class") for value in found if hasattr(type(value), "DEFINED_BY")]
    return (*found, *filter(None, ops))


def _is_defined_in(module: ModuleType, value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__ == module.__name__ and not vars(value).get("__specialisation__")
    return isinstance(value, SimpleNamespace) or hasattr(type(value), "DEFINED_BY")


def _alike(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if namespaces hold the very same objects in the same order, as most do."""
    if [*map(len, was)] != [*map(len, now)]:
        return False
    then, here = (chain.from_iterable(each.values() for each in spaces) for spaces in (was, now))
    return all(map(operator.is_, then, here))


def _is_of_torch_itself(value: Any) -> bool:
    """Return True if a private module of torch defines a function that wraps public ones at its first use."""
    return str(getattr(value, "__globals__", {}).get("__name__", "")).startswith("torch._")


def _counts(owner: type, name: str) -> bool:
    """Tell whether a new name of a class changes what it does."""
    if any(name in vars(base) for base in owner.__mro__[1:]):
        return True
    return _home_of(owner).startswith(_OPGRAFT) and not name.startswith("__")


def _home_of(thing: Any) -> str:
    """Return the module that defines a thing."""
    if isinstance(thing, ModuleType):
        return thing.__name__
    return str(thing.__module__ if isinstance(thing, type) else type(thing).__module__)


def _place_of(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return thing.__name__
    package = _home_of(thing).partition(".")[0]
    if isinstance(thing, type):
        return f"{package}'s {thing.__qualname__}"
    return f"{_OPGRAFT}'s {getattr(thing, '__qualname__', 'native definitions')}"


DEFINITIONS = Definitions()
"""The aspect of this process. It also hears of imports, so that there is one."""
