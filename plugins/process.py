"""Changes that a plugin makes to the process, beyond what it registers, found by looking before and after its steps.

What would show in the results of others is set back at once. What a plugin adds for itself, such as a variable of the
environment that its library reads, stays as long as the plugin does.
"""

from __future__ import annotations

import builtins
import functools
import locale
import logging
import operator
import os
import reprlib
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any, Protocol

import torch
from opgraft.config import CURRENT_SCOPE, Scope
from opgraft.platform import Platform
from opgraft.state import host_state
from opgraft.text import described

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A change of the process: ``what`` in words, ``undo``, and whether it stays as long as the plugin does.

    ``patch``: it is one of torch, as which the plugin of a device may have to make it.
    """

    what: str
    undo: Callable[[], object]
    stays: bool = False
    patch: bool = False

    def set_back(self) -> str:
        """Undo it; returns what came of that, in words."""
        try:
            self.undo()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a system that does not let it, or of what a plugin has put there
            return f"it cannot be set back: {described(error)}"
        return "it was set back"


def _equal(one: Any, other: Any) -> bool:
    """Tell whether two are equal; of what a plugin has put there, which may raise when it is asked, they are not."""
    try:
        return one is other or bool(one == other)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False


class Aspect(Protocol):
    """A part of the process that can be looked at, and the changes that tell a former state of it from that of now."""

    def read(self) -> Any: ...

    def changes(self, before: Any) -> Iterator[Change]: ...


@dataclass(frozen=True)
class Value:
    """One value, which ``write`` sets, and which words may quote as ``shown`` has it."""

    name: str
    get: Callable[[], Any]
    write: Callable[[Any], object]
    shown: Callable[[Any], str] = str
    same: Callable[[Any, Any], bool] = _equal

    def read(self) -> Any:
        try:
            return self.get()
        except OSError:  # a working folder that is not there any more
            return _ABSENT

    def changes(self, before: Any) -> Iterator[Change]:
        after = self.read()
        if before is not after and not self.same(before, after):
            old, new = ("nothing" if value is _ABSENT else self.shown(value) for value in (before, after))
            yield Change(f"{self.name} from {old} to {new}", partial(self.write, before))


@dataclass(frozen=True)
class Entries:
    """The entries of a mapping. What others had put there is put back; what is new counts where ``additions`` do."""

    name: str
    mapping: MutableMapping[Any, Any]
    same: Callable[[Any, Any], bool] = operator.is_
    additions: bool = True

    def read(self) -> dict[Any, Any]:
        return dict(self.mapping)

    def changes(self, before: dict[Any, Any]) -> Iterator[Change]:
        after, same = self.read(), self.same
        # Most come behind those that were there, which are compared without a loop of Python's.
        begins = all(map(operator.eq, before, after)) and all(map(same, before.values(), after.values()))
        if len(after) < len(before) or not begins:
            for key in [key for key, value in before.items() if not same(after.get(key, _ABSENT), value)]:
                yield Change(f"{self.name} {key}", partial(operator.setitem, self.mapping, key, before[key]))
        for key in sorted(after.keys() - before.keys()) if self.additions else ():
            yield Change(f"{self.name} {key} (new)", partial(self.mapping.pop, key, None), stays=True)


@dataclass(frozen=True)
class Order:
    """A list that is searched from its beginning: what a plugin adds goes behind what others have, and with it."""

    name: str
    items: list[Any]
    shown: Callable[[Any], str] = str

    def read(self) -> list[Any]:
        return list(self.items)

    def changes(self, before: list[Any]) -> Iterator[Change]:
        after = self.read()
        added = [item for item in after if not any(_is(item, known) for known in before)]
        if len(after) < len(before) or not all(map(_is, before, after)):
            ordered = [*before, *added]
            yield Change(f"the order of {self.name}", partial(operator.setitem, self.items, slice(None), ordered))
        for item in added:
            yield Change(f"{self.name} {self.shown(item)} (new)", partial(self._remove, item), stays=True)

    def _remove(self, item: Any) -> None:
        self.items[:] = [each for each in self.items if each is not item]


def _is(one: Any, other: Any) -> bool:
    """Tell whether two are the same, without asking what a plugin may have put there."""
    return one is other or (type(one) is type(other) is str and one == other)


class Handlers:
    """The handlers of signals, which only the main thread can set."""

    def read(self) -> dict[signal.Signals, Any]:
        return {number: signal.getsignal(number) for number in signal.Signals}

    def changes(self, before: dict[signal.Signals, Any]) -> Iterator[Change]:
        after = self.read()
        for number, handler in before.items():
            if after[number] is not handler:
                yield Change(f"the handler of {number.name}", partial(signal.signal, number, handler))


class Filters:
    """The filters of warnings. Those that meet warnings of everybody are set back, those for certain ones stay."""

    def read(self) -> list[Any]:
        return list(warnings.filters)

    def changes(self, before: list[Any]) -> Iterator[Change]:
        after = self.read()
        added = [row for row in after if not any(_equal(row, known) for known in before)]
        certain = [row for row in added if not _meets_all(*row)]
        if len(certain) < len(added) or not all(any(_equal(row, known) for known in after) for row in before):
            yield Change("the filters of warnings", partial(self._set, [*certain, *before]))

    def _set(self, rows: list[Any]) -> None:
        warnings.filters[:] = rows  # type: ignore[index]  # a list, whatever its stub says
        with warnings.catch_warnings():  # which has Python look at the filters anew
            pass


def _meets_all(action: str, message: Any, category: type, module: Any, line: int) -> bool:
    return message is None and module is None and category.__module__ == "builtins"


class Switches:
    """The switches of loggers, which ``logging.config`` turns off for all that it is not told of."""

    def read(self) -> list[logging.Logger]:
        known = list(logging.root.manager.loggerDict.values())
        return [log for log in known if isinstance(log, logging.Logger) and not log.disabled]

    def changes(self, before: list[logging.Logger]) -> Iterator[Change]:
        off = [log for log in before if log.disabled and log.name != "opgraft"]
        if off:
            yield Change(f"loggers of others, {off[0].name} first, to be disabled", partial(self._enable, off))

    def _enable(self, loggers: list[logging.Logger]) -> None:
        for log in loggers:
            log.disabled = False


class Loggers:
    """The loggers that decide for everybody, the root and opgraft's own."""

    def read(self) -> list[Any]:
        own = [(log.level, log.disabled, log.propagate, list(log.handlers)) for log in self._both()]
        return [logging.root.manager.disable, *own]

    def changes(self, before: list[Any]) -> Iterator[Change]:
        if not _equal(before, self.read()):
            yield Change("the loggers of everybody", partial(self._set, *before))

    def _both(self) -> tuple[logging.Logger, logging.Logger]:
        return logging.getLogger(), logging.getLogger("opgraft")

    def _set(self, disabled_below: int, *states: tuple[int, bool, bool, list[logging.Handler]]) -> None:
        logging.disable(disabled_below)
        for log, (level, disabled, propagate, handlers) in zip(self._both(), states, strict=True):
            log.setLevel(level)
            log.disabled, log.propagate, log.handlers[:] = disabled, propagate, handlers


class Definitions:
    """The functions and methods of torch and opgraft, which a plugin replaces for others by assigning to their names.

    What is new in a module counts for nobody, nor what is new in a class of torch, unless it hides what that inherits.
    """

    def read(self) -> dict[Any, dict[str, Any]]:
        return {owner: vars(owner).copy() for owner in (*_OF_TORCH, *_of_opgraft())}

    def changes(self, before: dict[Any, dict[str, Any]]) -> Iterator[Change]:
        if _alike(before.values(), [*map(vars, before)]):
            return
        for owner, was in before.items():
            now = vars(owner)
            for name in [name for name, value in was.items() if now.get(name, _ABSENT) is not value]:
                if not _is_of_torch_itself(now.get(name)):
                    undo = partial(setattr, owner, name, was[name])
                    yield Change(f"{_place_of(owner)}.{name}", undo, patch=owner in _OF_TORCH)
            for name in sorted(now.keys() - was.keys()) if isinstance(owner, type) else ():
                if _counts(owner, name):
                    undo = partial(delattr, owner, name)
                    yield Change(f"{_place_of(owner)}.{name} (new)", undo, patch=owner in _OF_TORCH)


_OF_TORCH = (torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module)


def _of_opgraft() -> tuple[type, ...]:
    """Return the classes of opgraft by which platforms and ops work, whoever derives from them."""
    state = host_state()
    ops = (record.cls for records in (state.registry.ops, state.registry.classes) for record in records.values())
    return _families((type(state.selection.platform) if state.selection else Platform, *ops))


@functools.lru_cache(maxsize=1)  # of the same ops before and after a plugin
def _families(classes: tuple[type, ...]) -> tuple[type, ...]:
    """Return these classes, those above and those below them, as far as they are opgraft's."""
    found: dict[type, None] = dict.fromkeys(base for cls in classes for base in cls.__mro__)
    left: list[type] = list(classes)
    while left:
        below: list[type] = left.pop().__subclasses__()
        below = [cls for cls in below if cls not in found]
        found.update(dict.fromkeys(below))
        left += below
    return tuple(cls for cls in found if _is_ours(cls) and not vars(cls).get("__specialisation__"))


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("opgraft.")


def _alike(before: Collection[Mapping[str, Any]], after: Collection[Mapping[str, Any]]) -> bool:
    """Tell whether namespaces hold the very same in the same order, as most do; three thousand names are compared."""
    then, now = (chain.from_iterable(each.values() for each in spaces) for spaces in (before, after))
    return [*map(len, before)] == [*map(len, after)] and all(map(operator.is_, then, now))


def _is_of_torch_itself(value: Any) -> bool:
    """Tell whether a private module of torch defines a function, which wraps public ones when it is first used."""
    return str(getattr(value, "__globals__", {}).get("__name__", "")).startswith("torch._")


def _counts(owner: type, name: str) -> bool:
    """Tell whether a new name of a class changes what it does."""
    inherited = any(name in vars(base) for base in owner.__mro__[1:])
    return inherited or (_is_ours(owner) and not name.startswith("__"))


def _place_of(owner: Any) -> str:
    return f"{owner.__module__.partition('.')[0]}'s {owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device == torch.device("cpu") else device)  # a mode, which costs each call


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _random_state() -> bytes:
    return bytes(torch.get_rng_state().numpy())


def _set_random_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _leave_inference_mode(enabled: bool) -> None:
    raise RuntimeError("it ends where it began")


def _scope(scope: Scope | None) -> str:
    return f"{len(scope.layers)} scopes" if scope else "none"


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _stream(name: str) -> Value:
    return Value(f"sys.{name}", *_attribute(sys, name), lambda s: type(s).__name__, operator.is_)


def _flags_of_backends() -> Iterator[Value]:
    """Yield the flags by which torch's libraries choose how they compute."""
    for backend in (value for value in vars(torch.backends).values() if isinstance(value, ModuleType)):
        for name in ("enabled", "benchmark", "deterministic"):
            if isinstance(getattr(backend, name, None), bool):
                yield Value(f"{backend.__name__}.{name}", *_attribute(backend, name))


ASPECTS: tuple[Aspect, ...] = (
    Value("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Value("the default device", torch.get_default_device, _set_default_device),
    Value("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Value("the number of threads between operators", torch.get_num_interop_threads, torch.set_num_interop_threads),
    Value("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    Value("the inference mode", torch.is_inference_mode_enabled, _leave_inference_mode),
    Value("whether algorithms are deterministic", _deterministic, _set_deterministic),
    Value("the precision of products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *_flags_of_backends(),
    Value("torch's random numbers", _random_state, _set_random_state, lambda state: f"{zlib.crc32(state):08x}"),
    Value("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Value("the working folder", os.getcwd, os.chdir),
    Value("the locale", partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    Value("the settings in force", CURRENT_SCOPE.get, CURRENT_SCOPE.set, _scope),
    *map(_stream, ("stdin", "stdout", "stderr")),
    Value("sys.excepthook", *_attribute(sys, "excepthook"), reprlib.repr, operator.is_),
    Value("threading.excepthook", *_attribute(threading, "excepthook"), reprlib.repr, operator.is_),
    Entries("the environment variable", os.environ, operator.eq),
    Entries("builtins", vars(builtins)),
    Entries("the module", sys.modules, additions=False),
    Order("sys.path", sys.path),
    Order("sys.meta_path", sys.meta_path, reprlib.repr),
    Order("sys.path_hooks", sys.path_hooks, reprlib.repr),
    Definitions(),
    Handlers(),
    Filters(),
    Loggers(),
    Switches(),
)
"""All that is looked at."""


def look() -> list[Any]:
    """Return the process as it is now, for ``changes_since``."""
    return [aspect.read() for aspect in ASPECTS]


def changes_since(before: list[Any]) -> Iterator[Change]:
    """Yield what tells the process of now from one that was looked at."""
    for aspect, state in zip(ASPECTS, before, strict=True):
        try:
            found = [*aspect.changes(state)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of what a plugin has put there
            name = getattr(aspect, "name", type(aspect).__name__.lower())
            found = [Change(f"{name} to what cannot be looked at ({described(error)})", _give_up)]
        yield from found


def _give_up() -> None:
    raise RuntimeError("nothing tells what it was")
