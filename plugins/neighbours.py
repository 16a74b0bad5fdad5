"""Looking at what plugins share: each other's modules, Python's own modules, and the streams."""

from __future__ import annotations

import functools
import io
import logging
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

from opgraft.base.text import described
from opgraft.plugins.changes import ABSENT, Change
from opgraft.plugins.discovery import discover
from opgraft.registry.state import ACTIVATING

_SHARED = (
    *("importlib", "importlib.metadata", "importlib.util", "importlib_metadata", "inspect"),
    *("os", "os.path", "pathlib", "shutil", "tempfile", "io", "json", "pickle", "copy", "re"),
    *("time", "math", "random", "hashlib", "platform", "subprocess", "ctypes", "types", "typing"),
    *("collections", "contextlib", "dataclasses", "functools", "itertools", "operator", "abc"),
)
"""Modules of Python, and the one by which plugins are found, that plugins and their libraries call."""

_WITH_METHODS = ("importlib.metadata", "importlib_metadata", "pathlib")
"""The modules of ``_SHARED`` with classes to look at."""

_MOST_NAMED = 3

_CODE = (
    FunctionType,
    BuiltinFunctionType,
    type,
    type(functools.cache(len)),
    classmethod,
    staticmethod,
    property,
)
"""Kinds of functions, methods and classes. What imports a module lazily is none of them."""


@dataclass(frozen=True)
class _Space:
    """The names of a module or a class at a time, and the module that it is of."""

    owner: Any
    module: str
    names: dict[str, Any]


class Namespaces:
    """The functions and classes in modules of Python and of plugins, and the methods of their classes.

    A name that is new counts for nobody. Neither does a value that is no function, as modules count and remember.
    """

    def read(self) -> dict[str, _Space]:
        spaces = {}
        for label, owner, module in _owners():
            names = dict(vars(owner))
            spaces[label] = _Space(owner, module, names)
        return spaces

    def changes(self, before: dict[str, _Space], after: dict[str, _Space]) -> Iterator[Change]:
        for label, space in before.items():
            now = vars(space.owner)
            if _same(space.names, now):
                continue
            if not _is_own(space.module):
                yield from _changes_of(label, space, now)


def _owners() -> Iterator[tuple[str, Any, str]]:
    """Yield modules and classes, each with a name for messages and the name of its module."""
    for name in _SHARED:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            yield name, module, name
            yield from _classes(name, module) if name in _WITH_METHODS else ()
    for name in _of_plugins():
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            yield name, module, name
            yield from _classes(name, module)


def _classes(name: str, module: ModuleType) -> Iterator[tuple[str, Any, str]]:
    """Yield the classes that the module of that name defines."""
    for value in list(vars(module).values()):
        if not isinstance(value, type):
            continue
        if value.__module__ == name:
            label = f"{name}.{value.__qualname__}"
            yield label, value, name


def _of_plugins() -> dict[str, None]:
    """Return the names of the modules that plugins and platforms offer, and of their packages."""
    names: dict[str, None] = {}
    for offer in discover().offers:
        if offer.built_in:
            continue
        # Of "acme.kernels.plugin", the packages "acme" and "acme.kernels" too.
        name = offer.module
        while name:
            names[name] = None
            name = name.rpartition(".")[0]
    return names


def _is_own(module: str) -> bool:
    """Return True for a module of the distribution whose plugin runs, which may do with it as it likes."""
    running = ACTIVATING.get()
    if running is None:
        return False
    return discover().provider_of(module) == running.provider


def _same(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Compare in order and by identity, as values of plugins may raise when they are compared."""
    if len(was) != len(now):
        return False
    both = was.values(), now.values()
    return all(map(operator.is_, *both))


def _changes_of(label: str, space: _Space, now: Mapping[str, Any]) -> Iterator[Change]:
    missing = {name: value for name, value in space.names.items() if name not in now}
    if missing:
        some = ", ".join([*missing][:_MOST_NAMED])
        more = len(missing) - _MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        yield Change(f"{label}, taking {some}{rest} away", partial(_put, space.owner, missing))
    for name, value in space.names.items():
        new = now.get(name, value)
        # By its type, as an object that stands for another one gives the class of that.
        if new is value or not issubclass(type(value), _CODE):
            continue
        if not _by_itself(space.module, new):
            undo = partial(_put, space.owner, {name: value})
            yield Change(f"{label}.{name}", undo)


def _by_itself(module: str, value: Any) -> bool:
    """Return True for what a module puts in a place of its own when it is first used.

    That is a function of the same package, or a module in the place of what imports that module.
    """
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return isinstance(value, ModuleType) or package == module.partition(".")[0]


def _put(owner: Any, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        setattr(owner, name, value)


class StandIns:
    """Entries of ``sys.modules`` that keep others from importing a module: ``None``, and modules without a source."""

    def read(self) -> dict[str, Any]:
        modules = cast("dict[str, Any]", dict(sys.modules))
        found: dict[str, Any] = {}
        for name, module in modules.items():
            if module is None:
                found[name] = None
        for name in _of_plugins():
            module = modules.get(name, ABSENT)
            if _is_stand_in(module):
                found[name] = module
        return found

    def changes(self, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
        for name, module in after.items():
            # What stood in the place of another module is set back by then.
            if name in before or sys.modules.get(name, ABSENT) is not module:
                continue
            # A module that was emptied is whole again by then.
            if not _is_stand_in(module) or _is_own(name):
                continue
            what = "nothing"
            if module is not None:
                what = f"a {type(module).__name__} without a source"
            undo = partial(sys.modules.pop, name, None)
            yield Change(f"the module {name} to {what}", undo)


def _is_stand_in(module: Any) -> bool:
    if module is ABSENT:
        return False
    return getattr(module, "__spec__", None) is None


_NOBODYS = "opgraft_asks_for_no_module"


def fault_of_finder(finder: Any) -> str | None:
    """Ask a finder on ``sys.meta_path`` for a module that is not there; returns how it fails, if it does."""
    find = getattr(finder, "find_spec", None)  # a finder of distributions alone has none
    try:
        if find is not None:
            find(_NOBODYS, None, None)
    except ImportError:  # the module is not there
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's code
        return f"raises {described(error)} when it is asked for a module"
    return None


class Streams:
    """The standard streams, which are useless to everybody once one of them is closed."""

    _NUMBERS: Mapping[str, int] = {"stdin": 0, "stdout": 1, "stderr": 2}

    def read(self) -> dict[str, Any]:
        streams = {}
        for name in self._NUMBERS:
            stream = getattr(sys, name)
            if _is_open(stream):
                streams[name] = stream
        return streams

    def changes(self, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
        for name, stream in before.items():
            if not _is_open(stream):
                # Whoever holds a closed stream, such as a handler of a log, gets the new one.
                undo = partial(_reopen, name, self._NUMBERS[name], stream)
                yield Change(f"sys.{name} to a closed stream", undo)


def _is_open(stream: Any) -> bool:
    """Return True for a stream that can be used; one whose buffer was taken away raises when it is asked."""
    try:
        return stream is not None and not stream.closed
    except ValueError:
        return False


def _reopen(name: str, number: int, closed: Any) -> None:
    """Open the file of a standard stream again, and hand it to handlers of logs that wrote to the closed stream.

    Raises:
        OSError: the file itself was closed.
    """
    mode = "r" if number == 0 else "w"
    stream = open(  # noqa: SIM115  # it stays
        number, mode, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    if isinstance(stream, io.TextIOWrapper) and number:
        stream.reconfigure(line_buffering=number == 2 or stream.isatty())
    for place in (name, f"__{name}__"):
        if getattr(sys, place) is closed or place == name:
            setattr(sys, place, stream)
    for handler in (*logging.getLogger().handlers, *logging.getLogger("opgraft").handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is closed:
            handler.setStream(stream)
