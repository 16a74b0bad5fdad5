"""Changes that a plugin makes to the process, beyond what it registers, found by looking before and after its steps.

What would show in the results of others is set back at once. What a plugin adds for itself, such as a variable of the
environment that its library reads, stays as long as the plugin does.
"""

from __future__ import annotations

import builtins
import locale
import logging
import operator
import os
import reprlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from opgraft.config import CURRENT_SCOPE, Scope
from opgraft.text import described

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A change of the process: ``what`` in words, ``undo``, and whether it stays as long as the plugin does."""

    what: str
    undo: Callable[[], object]
    stays: bool = False

    def set_back(self) -> str:
        """Undo it; returns what came of that, in words."""
        try:
            self.undo()
        except Exception as error:  # of a system that does not let it
            return f"it cannot be set back: {described(error)}"
        return "it was set back"


class Aspect(Protocol):
    """A part of the process that can be looked at, and the changes that tell one state of it from a later one."""

    def read(self) -> Any: ...

    def changes(self, before: Any, after: Any) -> Iterator[Change]: ...


@dataclass(frozen=True)
class Value:
    """One value, which ``write`` sets, and which words may quote as ``shown`` has it."""

    name: str
    get: Callable[[], Any]
    write: Callable[[Any], object]
    shown: Callable[[Any], str] = str

    def read(self) -> Any:
        try:
            return self.get()
        except OSError:  # a working folder that is not there any more
            return _ABSENT

    def changes(self, before: Any, after: Any) -> Iterator[Change]:
        if before is not after and before != after:
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

    def changes(self, before: dict[Any, Any], after: dict[Any, Any]) -> Iterator[Change]:
        same = self.same
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

    def changes(self, before: list[Any], after: list[Any]) -> Iterator[Change]:
        added = [item for item in after if item not in before]
        if after[: len(before)] != before:
            ordered = [*before, *added]
            yield Change(f"the order of {self.name}", partial(operator.setitem, self.items, slice(None), ordered))
        for item in added:
            yield Change(f"{self.name} {self.shown(item)} (new)", partial(self._remove, item), stays=True)

    def _remove(self, item: Any) -> None:
        self.items[:] = [each for each in self.items if each is not item]


class Handlers:
    """The handlers of signals, which only the main thread can set."""

    def read(self) -> dict[signal.Signals, Any]:
        return {number: signal.getsignal(number) for number in signal.Signals}

    def changes(self, before: dict[signal.Signals, Any], after: dict[signal.Signals, Any]) -> Iterator[Change]:
        for number, handler in before.items():
            if after[number] is not handler and after[number] != handler:
                yield Change(f"the handler of {number.name}", partial(signal.signal, number, handler))


class Filters:
    """The filters of warnings. Those that meet warnings of everybody are set back, those for certain ones stay."""

    def read(self) -> list[Any]:
        return list(warnings.filters)

    def changes(self, before: list[Any], after: list[Any]) -> Iterator[Change]:
        added = [row for row in after if row not in before]
        certain = [row for row in added if not _meets_all(*row)]
        if len(certain) < len(added) or any(row not in after for row in before):
            yield Change("the filters of warnings", partial(self._set, [*certain, *before]))

    def _set(self, rows: list[Any]) -> None:
        warnings.filters[:] = rows  # type: ignore[index]  # a list, whatever its stub says
        with warnings.catch_warnings():  # which has Python look at the filters anew
            pass


def _meets_all(action: str, message: Any, category: type, module: Any, line: int) -> bool:
    return message is None and module is None and category.__module__ == "builtins"


class Loggers:
    """The loggers that decide for everybody, the root and opgraft's own."""

    def read(self) -> list[Any]:
        own = [(log.level, log.disabled, log.propagate, list(log.handlers)) for log in self._both()]
        return [logging.root.manager.disable, *own]

    def changes(self, before: list[Any], after: list[Any]) -> Iterator[Change]:
        if before != after:
            yield Change("the loggers of everybody", partial(self._set, *before))

    def _both(self) -> tuple[logging.Logger, logging.Logger]:
        return logging.getLogger(), logging.getLogger("opgraft")

    def _set(self, disabled_below: int, *states: tuple[int, bool, bool, list[logging.Handler]]) -> None:
        logging.disable(disabled_below)
        for log, (level, disabled, propagate, handlers) in zip(self._both(), states, strict=True):
            log.setLevel(level)
            log.disabled, log.propagate, log.handlers[:] = disabled, propagate, handlers


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device == torch.device("cpu") else device)  # a mode, which costs each call


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _leave_inference_mode(enabled: bool) -> None:
    raise RuntimeError("it ends where it began")


def _scope(scope: Scope | None) -> str:
    return f"{len(scope.layers)} scopes" if scope else "none"


def _stream(name: str) -> Value:
    return Value(f"sys.{name}", partial(getattr, sys, name), partial(setattr, sys, name), lambda s: type(s).__name__)


ASPECTS: tuple[Aspect, ...] = (
    Value("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Value("the default device", torch.get_default_device, _set_default_device),
    Value("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Value("the number of threads between operators", torch.get_num_interop_threads, torch.set_num_interop_threads),
    Value("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    Value("the inference mode", torch.is_inference_mode_enabled, _leave_inference_mode),
    Value("whether algorithms are deterministic", _deterministic, _set_deterministic),
    Value("the precision of products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Value("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Value("the working folder", os.getcwd, os.chdir),
    Value("the locale", partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    Value("the settings in force", CURRENT_SCOPE.get, CURRENT_SCOPE.set, _scope),
    *map(_stream, ("stdin", "stdout", "stderr")),
    Entries("the environment variable", os.environ, operator.eq),
    Entries("builtins", vars(builtins)),
    Entries("the module", sys.modules, additions=False),
    Order("sys.path", sys.path),
    Order("sys.meta_path", sys.meta_path, reprlib.repr),
    Handlers(),
    Filters(),
    Loggers(),
)
"""All that is looked at."""


def look() -> list[Any]:
    """Return the process as it is now, for ``changes_since``."""
    return [aspect.read() for aspect in ASPECTS]


def changes_since(before: list[Any]) -> Iterator[Change]:
    """Yield what tells the process of now from one that was looked at."""
    for aspect, state in zip(ASPECTS, before, strict=True):
        yield from aspect.changes(state, aspect.read())
