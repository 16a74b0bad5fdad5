"""Functions, methods and classes: a plugin replaces one for everybody by an assignment.

A plugin may be the first to import a module of opgraft, and patch the module at once. So a
definition is also read at the end of the import, before any code of the plugin can change the
definition.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from opgraft.compat import intervening
from opgraft.plugins.changes import Change
from opgraft.plugins.discovery import discover
from opgraft.plugins.function_code import Code, CodeReader, changes_of_code, code_of
from opgraft.registry.state import ACTIVATING

_OPGRAFT = "opgraft"
_TORCH = "torch"
_LAYERS = "torch.nn"
_OF_TORCH = (
    *(torch, torch.Tensor, torch.linalg, torch.fft, torch.special, torch.distributed),
    *intervening.modules_of_c(),
)

_TRACER = "torch.fx._symbolic_trace"
"""The module with the functions that torch puts in place of methods while a thread traces."""

_OF_METADATA = ("importlib.metadata", "importlib_metadata")
"""Modules that find plugins. Plugins and their libraries call them."""

_OF_PYTHON = (
    *("importlib", "importlib.util", "inspect", "os", "os.path", "pathlib", "shutil", "tempfile"),
    *("io", "json", "pickle", "copy", "re", "time", "math", "random", "hashlib", "platform"),
    *("subprocess", "ctypes", "types", "typing", "collections", "contextlib", "dataclasses"),
    *("functools", "itertools", "operator", "abc", "threading", "socket", "ssl", "signal"),
)
"""Further modules of Python that plugins and their libraries call."""

_MOST_NAMED = 3

_VALUES = operator.methodcaller("values")
_BASES = operator.attrgetter("__bases__")

_CODE = (
    FunctionType,
    BuiltinFunctionType,
    type,
    type(functools.cache(len)),
    partial,
    classmethod,
    staticmethod,
    property,
)
"""Types of functions, methods and classes. A proxy that imports a module lazily is none of them."""


@dataclass(frozen=True)
class _Owner:
    """A module, a class or an object, with the defining module, the names and the shape."""

    thing: Any
    home: str
    place: str
    names: Mapping[str, Any]
    shape: Mapping[str, Any]

    @property
    def is_of_torch(self) -> bool:
        return _is_below(self.home, _TORCH)

    @property
    def is_checked_in_full(self) -> bool:
        """True for torch and opgraft. Others count and remember in their modules."""
        return self.is_of_torch or _is_below(self.home, _OPGRAFT)


_Owners = dict[int, _Owner]
"""By the identity of the thing, as some cannot be hashed."""


@dataclass(frozen=True)
class _Things:
    """Modules, classes and objects, sorted for quick readings.

    Attributes:
        modules: the names of the imported modules when the things were found.
        all: the things, each once: first the spaces, then the objects.
        spaces: the modules and classes, which count with all their names.
        objects: the other things, which may count with some of their names.
        classes: the classes among the things.
    """

    modules: tuple[str, ...]
    all: tuple[Any, ...]
    spaces: tuple[Any, ...]
    objects: tuple[Any, ...]
    classes: tuple[type, ...]

    @classmethod
    def sorted(cls, modules: tuple[str, ...], things: Iterable[Any]) -> _Things:
        found = {id(thing): thing for thing in things}
        of_modules, classes, objects = list[Any](), list[Any](), list[Any]()
        for thing in found.values():
            kind = type(thing)
            if issubclass(kind, ModuleType):
                of_modules.append(thing)
            elif issubclass(kind, type):
                classes.append(thing)
            else:
                objects.append(thing)
        spaces = (*of_modules, *classes)
        return cls(modules, (*spaces, *objects), spaces, tuple(objects), tuple(classes))


class _Reading:
    """The values of all names, classes and bases of things, in order."""

    def __init__(self, things: _Things) -> None:
        self._things = things.all
        names = [*map(vars, things.spaces), *map(_names_of, things.objects)]
        # Without a loop of Python's, as there are 30,000 values and more. Tuples, as another thread
        # may add a name to a module meanwhile.
        values = [*map(tuple, map(_VALUES, names))]
        self._sizes = [*map(len, values)]
        self._values = [*chain.from_iterable(values)]
        self._types = [*map(type, things.all)]
        self._bases = [*map(_BASES, things.classes)]

    def is_same(self, other: _Reading) -> bool:
        """Return True if both have the very same objects."""
        return (
            self._sizes == other._sizes
            and _are_same(self._values, other._values)
            and _are_same(self._types, other._types)
            and _are_same(self._bases, other._bases)
        )

    def unchanged(self, before: _Reading) -> set[int]:
        """Return the ids of things with the same values in an earlier reading."""
        earlier = dict(before._values_of_each())
        same = set[int]()
        for thing, values in self._values_of_each():
            if thing in earlier and _are_same(values, earlier[thing]):
                same.add(thing)
        return same

    def _values_of_each(self) -> Iterator[tuple[int, list[Any]]]:
        end = 0
        for thing, size in zip(self._things, self._sizes, strict=True):
            start = end
            end += size
            yield id(thing), self._values[start:end]


def _are_same(here: Sequence[Any], there: Sequence[Any]) -> bool:
    """Return True if two sequences have the very same objects."""
    return len(here) == len(there) and all(map(operator.is_, here, there))


@dataclass(frozen=True)
class _Snapshot:
    """The definitions of one look.

    Attributes:
        now: the definitions.
        imported: the definitions at the end of each import since the look before.
        code: the code of the functions among ``now``.
        imported_code: the code of the functions among ``imported``.
    """

    now: _Owners
    imported: _Owners
    code: Code
    imported_code: Code


class Definitions:
    """The functions, classes and methods of some modules, an aspect of the process.

    A new name in a module changes nothing for others. Neither does a new name in a class of torch,
    unless it hides an inherited one. The class of a thing and the bases of a class count as
    definitions, too.

    Args:
        things: returns the modules with their classes and objects.
        names_looked_at: returns those names of modules that ``things`` looks at.
        is_owned: returns True for the name of a module whose functions count. The modules may hold
            functions of others.
    """

    def __init__(
        self,
        things: Callable[[], Iterable[Any]],
        names_looked_at: Callable[[Iterable[str]], tuple[str, ...]],
        is_owned: Callable[[str], bool] = bool,
    ) -> None:
        self._things_now = things
        self._names_looked_at = names_looked_at
        self._is_owned = is_owned
        # Threads of an engine may construct ops of a plugin at the same time.
        self._lock = threading.RLock()
        self._imports: tuple[str, ...] = ()
        self._found = _Things.sorted((), ())
        self._reading = _Reading(self._found)
        self._known: _Owners = {}
        self._imported: _Owners = {}
        self._code = CodeReader()
        self._names: tuple[Mapping[str, Any], ...] = ()
        self._imported_code: Code = {}

    def read(self, *, takes_imports: bool = True) -> _Snapshot:
        """Return the definitions of now.

        Args:
            takes_imports: False if no imports are read around the caller. Then those of a thread
                that loads plugins stay for that thread.
        """
        things = self._present_things()
        with self._lock:
            imported: _Owners = {}
            imported_code: Code = {}
            if takes_imports:
                imported, self._imported = self._imported, imported
                imported_code, self._imported_code = self._imported_code, imported_code
            reading = _Reading(things)
            # Unchanged names are not copied again.
            if not reading.is_same(self._reading):
                same = reading.unchanged(self._reading)
                self._known = {id(thing): self._owner(thing, same) for thing in things.all}
                self._names = tuple(owner.names for owner in self._known.values())
                self._reading = reading
            code = self._code.read(self._names)
            return _Snapshot(self._known, imported, code, imported_code)

    def _present_things(self) -> _Things:
        """Return the modules with their classes and objects, found anew after each import."""
        # Without the lock, as the search may call finders of plugins, and these may import.
        # A tuple, as another thread may import meanwhile.
        imported = tuple(sys.modules)
        if imported != self._imports:
            modules = self._names_looked_at(imported)
            if modules != self._found.modules:
                self._found = _Things.sorted(modules, self._things_now())
            # Last, as another thread may ask meanwhile.
            self._imports = imported
        return self._found

    def _owner(self, thing: Any, unchanged: Set[int] = frozenset()) -> _Owner:
        """Return the definitions of a thing: the known ones, if they are the very same.

        Args:
            thing: a module, a class or an object.
            unchanged: the identities of things whose names have the known values.
        """
        known = self._known.get(id(thing))
        shape = _shape_of(thing)
        if known is not None and _alike(known.shape, shape):
            has_same_names = id(thing) in unchanged or _alike(known.names, _names_of(thing))
            if has_same_names:
                return known
        return _Owner(thing, *_described(thing, known), dict(_names_of(thing)), shape)

    def changes(self, before: _Snapshot, after: _Snapshot) -> Iterator[Change]:
        for key, owner in {**after.imported, **before.now}.items():
            if after.now.get(key) is owner:
                continue
            if owner.is_checked_in_full or not is_of_running_plugin(owner.home):
                yield from _changes_of(owner)
        if after.code is before.code:
            return
        for module, change in changes_of_code({**after.imported_code, **before.code}):
            if self._is_owned(module) and not is_of_running_plugin(module):
                yield change

    @contextmanager
    def imports_read(self) -> Iterator[None]:
        """Read the definitions of these modules at the end of each import."""
        # In front of all finders, so that no other finder serves an import first.
        reader = _Reader(self._names_looked_at, self._note)
        finders = sys.meta_path  # a plugin may put another list in its place
        finders.insert(0, reader)
        try:
            yield
        finally:
            # Another list has the reader, too, if it was made of this one.
            for each in (finders, sys.meta_path):
                if isinstance(each, list):
                    each[:] = [finder for finder in each if finder is not reader]

    def _note(self, modules: Iterable[ModuleType]) -> None:
        with self._lock:
            found = {id(thing): self._owner(thing) for thing in _things_of(modules)}
            self._imported = {**found, **self._imported}
            code = code_of(owner.names for owner in found.values())
            self._imported_code = {**code, **self._imported_code}


class _Reader(MetaPathFinder):
    """Calls ``note`` at the end of an import, with all modules of the package in the import.

    Modules may change others of their package on the way.

    Args:
        names_noted: returns those names of modules that are noted.
        note: called with the modules.
    """

    def __init__(self, names_noted: Callable[[Iterable[str]], tuple[str, ...]], note: Any) -> None:
        self._names_noted = names_noted
        self._note = note
        self._local = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._names_noted((fullname,)):
            return None
        # One reader notes for all: two would ask each other without end.
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Reader)]
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
        # By thread, as two threads may import at the same time, and by package, as a module of one
        # plugin may import and patch another plugin.
        running = vars(self._local)
        package = _home_of(module).partition(".")[0]
        outermost = package not in running
        modules: list[ModuleType] = running.setdefault(package, [])
        try:
            execute(module)
            modules.append(module)
        finally:
            if outermost:
                del running[package]
                self._note(modules)


def _changes_of(owner: _Owner) -> Iterator[Change]:
    # First, as another class may hide the names of the thing.
    yield from _reshaped(owner)
    yield from _missing(owner)
    yield from _replaced(owner)
    if isinstance(owner.thing, type):
        yield from _hiding(owner)


def _reshaped(owner: _Owner) -> Iterator[Change]:
    """Yield another class of a module, a class or an object, and other bases of a class."""
    # Modules of plugins may have a class of their own, for names that they import lazily.
    if not owner.is_checked_in_full:
        return
    now = _shape_of(owner.thing)
    for name, value in owner.shape.items():
        if now.get(name) is not value:
            undo = partial(_set_shape, owner.thing, name, value)
            yield Change(f"{owner.place}.{name}", undo, patch=owner.is_of_torch)


def _set_shape(thing: Any, name: str, value: Any) -> None:
    # By Python's own way, as the other class may refuse the assignment.
    base = type if issubclass(type(thing), type) else object
    base.__setattr__(thing, name, value)


def _missing(owner: _Owner) -> Iterator[Change]:
    """Yield one change for all removed names."""
    now = _names_of(owner.thing)
    # One change for all: an emptied module would fill pages.
    missing = {}
    for name, value in owner.names.items():
        if name not in now:
            missing[name] = value
    if missing:
        what = f"{owner.place}, taking {_some(missing)} away"
        undo = partial(_put, owner.thing, missing)
        yield Change(what, undo, patch=owner.is_of_torch)


def _replaced(owner: _Owner) -> Iterator[Change]:
    """Yield the names with another value."""
    now = _names_of(owner.thing)
    for name, value in owner.names.items():
        new = now.get(name, value)
        if new is value:
            continue
        # By type, as a proxy gives the class of another object.
        is_code = issubclass(type(value), _CODE)
        # A module may keep a call for later, and forget the call when it is made.
        if issubclass(type(value), partial):
            is_code = issubclass(type(new), _CODE)
        if not is_code and not owner.is_checked_in_full:
            continue
        if not _is_own_doing(owner, value, new):
            undo = partial(setattr, owner.thing, name, value)
            yield Change(f"{owner.place}.{name}", undo, patch=owner.is_of_torch, new=new)


def _hiding(owner: _Owner) -> Iterator[Change]:
    """Yield the new names of a class with an effect on others."""
    now = _names_of(owner.thing)
    for name in sorted(now.keys() - owner.names.keys()):
        if not _counts(owner, name):
            continue
        undo = partial(delattr, owner.thing, name)
        what = f"{owner.place}.{name} (new)"
        yield Change(what, undo, patch=owner.is_of_torch, new=now[name])


def _some(names: Mapping[str, Any]) -> str:
    """Return the first names, and the number of the others."""
    first = ", ".join([*names][:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{first} and {more} more" if more > 0 else first


def _put(thing: Any, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        setattr(thing, name, value)


def is_of_running_plugin(module: str) -> bool:
    """Return True for a module of the running plugin. Its own modules are free to change."""
    running = ACTIVATING.get()
    return running is not None and discover().provider_of(module) == running.provider


def _is_own_doing(owner: _Owner, old: Any, new: Any) -> bool:
    """Return True if the owner itself replaces a function, or puts the former one back.

    Private modules of torch wrap public functions, some only while a thread traces a model. Other
    modules put a function of their package, or an imported module, in the place of a lazy one.
    """
    if owner.is_checked_in_full:
        if _defined_in(old) == _TRACER:
            return _defined_in(new) == owner.home
        return _defined_in(new).startswith("torch._") or _defined_in(new) == _TRACER
    discovery = discover()
    home = discovery.provider_of(owner.home)
    maker = discovery.provider_of(module_of(new))
    if isinstance(new, ModuleType) or maker == home:
        return True
    # A wrapper passes for a function of its module. The maker may be a library, such as a compiler.
    stated = discovery.provider_of(str(_attribute(new, "__module__", None) or ""))
    return stated == home and maker not in discovery.distributions


def _defined_in(function: Any) -> str:
    """Return the module of a function's code. Wrappers pass for a function of another module."""
    return str(_attribute(function, "__globals__", {}).get("__name__", ""))


def _attribute(value: object, name: str, otherwise: Any) -> Any:
    """Return an attribute, or ``otherwise``. Objects of plugins may raise anything there."""
    try:
        return getattr(value, name, otherwise)
    except Exception:
        return otherwise


def module_of(value: object) -> str:
    """Return the module of the code of a function, a class or an object; empty if none tells."""
    while isinstance(value, partial):
        value = value.func
    return _defined_in(value) or str(_attribute(value, "__module__", None) or "")


def _counts(owner: _Owner, name: str) -> bool:
    """Return True if a new name of a class changes calls by others."""
    if not owner.is_checked_in_full:
        # Modules of Python and of plugins gain names as they run.
        return False
    if any(name in vars(base) for base in owner.thing.__mro__[1:]):
        return True
    return not owner.is_of_torch and not name.startswith("__")


def _names_of(thing: Any) -> Mapping[str, Any]:
    """Return the definitions of a thing by name."""
    names = vars(thing)
    fixed = getattr(type(thing), "DEFINED_BY", None)
    return names if fixed is None else {name: names[name] for name in fixed if name in names}


def _shape_of(thing: Any) -> Mapping[str, Any]:
    """Return the class of a thing, and the bases if the thing is a class itself.

    An assignment to one of these replaces methods, and no name of the thing shows the assignment.
    """
    kind = type(thing)
    if issubclass(kind, type):
        return {"__class__": kind, "__bases__": thing.__bases__}
    return {"__class__": kind}


def _is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _modules_below(package: str) -> list[ModuleType]:
    """Return a package and its modules, if imported."""
    beginning = f"{package}."
    # A tuple, as another thread may import meanwhile.
    imported = tuple(sys.modules.items())
    found = [module for name, module in imported if name == package or name.startswith(beginning)]
    return [module for module in found if module is not None]


def _things_of_everybody() -> Iterator[Any]:
    """Yield the modules and classes for computing and for finding plugins."""
    yield from _OF_TORCH
    yield from _modules_below(_LAYERS)
    yield from _layers()
    yield from _things_of(_modules_below(_OPGRAFT))
    yield from _things_of(_imported(_OF_METADATA))


_BEGINNINGS = (f"{_OPGRAFT}.", f"{_LAYERS}.", *_OF_METADATA)


def _of_everybody(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(_BEGINNINGS))


def _things_of_plugins() -> Iterator[Any]:
    """Yield the modules of plugins, with their classes."""
    # A tuple, as another thread may import meanwhile.
    yield from _things_of(_imported(_of_plugins(tuple(sys.modules))))


def _of_plugins(names: Iterable[str]) -> tuple[str, ...]:
    packages = discover().packages
    return tuple(name for name in names if name.partition(".")[0] in packages)


def _is_of_plugins(module: str) -> bool:
    return bool(_of_plugins((module,)))


def _things_of_others() -> Iterator[Any]:
    """Yield further modules of Python, and those of other hosts' plugins with their classes."""
    yield from _imported(_OF_PYTHON)
    yield from _things_of(_imported(_of_others(modules_of_plugins())))


def _of_others(names: Iterable[str]) -> tuple[str, ...]:
    packages = discover().packages
    return tuple(name for name in names if name.partition(".")[0] not in packages)


def _imported(names: Iterable[str]) -> Iterator[ModuleType]:
    for name in names:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            yield module


def modules_of_plugins() -> dict[str, None]:
    """Return the modules in entry points of plugins and platforms, and the packages above."""
    names: dict[str, None] = {}
    for offer in discover().offers:
        name = "" if offer.built_in else offer.module
        while name:
            names[name] = None
            name = name.rpartition(".")[0]
    return names


@functools.cache
def _layers() -> tuple[type, ...]:
    values = tuple(vars(torch.nn).values())
    found = dict.fromkeys(value for value in values if isinstance(value, type))
    return tuple(each for each in found if issubclass(each, torch.nn.Module))


def _things_of(modules: Iterable[ModuleType]) -> Iterator[Any]:
    """Yield modules with classes, and with objects in place of functions."""
    for module in modules:
        yield module
        # Classes of torch are a list of their own.
        if not _is_below(_home_of(module), _TORCH):
            yield from _inside(module)


def _inside(module: ModuleType) -> tuple[Any, ...]:
    """Return the classes and objects that a module defines."""
    home = _home_of(module)
    # A module of a plugin may hold an object of opgraft, which counts where opgraft defines it.
    has_objects = _is_below(home, _OPGRAFT)
    found, ops = list[Any](), list[Any]()
    for value in tuple(vars(module).values()):
        kind = type(value)
        if issubclass(kind, type):
            if value.__module__ == home and not vars(value).get("__specialisation__"):
                found.append(value)
        elif has_objects and kind is SimpleNamespace:
            found.append(value)
        elif has_objects and hasattr(kind, "DEFINED_BY"):
            found.append(value)
            ops.append(vars(value).get("op_class"))
    return (*found, *filter(None, ops))


def _alike(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if two namespaces hold the very same objects in the same order, as most do."""
    # Tuples, as another thread may add a name to a module meanwhile.
    then, here = tuple(was.values()), tuple(now.values())
    return [*map(id, then)] == [*map(id, here)]


def _described(thing: Any, known: _Owner | None) -> tuple[str, str]:
    """Return the module of a thing, and words. An emptied module has no name."""
    return (known.home, known.place) if known else (_home_of(thing), _place_of_definition(thing))


def _home_of(thing: Any) -> str:
    """Return the module of a thing."""
    if isinstance(thing, ModuleType):
        return str(getattr(thing, "__name__", ""))
    return str(thing.__module__ if isinstance(thing, type) else type(thing).__module__)


def _place_of_definition(thing: Any) -> str:
    home = _home_of(thing)
    if isinstance(thing, ModuleType):
        return home
    if isinstance(thing, type):
        return f"{home.partition('.')[0]}'s {thing.__qualname__}"
    return f"{_OPGRAFT}'s {getattr(thing, '__qualname__', 'native definitions')}"


DEFINITIONS = Definitions(_things_of_everybody, _of_everybody)
"""The aspect that every load compares. There is one, as it also hears of imports."""

OF_PLUGINS = Definitions(_things_of_plugins, _of_plugins, _is_of_plugins)
"""The aspect of the modules of plugins, which every load compares. It hears of imports, too."""

OF_OTHERS = Definitions(_things_of_others, _of_others)
"""The aspect of Python's modules and of plugins of other hosts, for the doctor."""
