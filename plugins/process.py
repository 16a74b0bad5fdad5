"""Changes that a plugin makes to the process, beyond what it registers, found by looking before and after its steps.

What would show in the results of others is set back at once. What a plugin adds for itself, such as a variable of the
environment that its library reads, stays as long as the plugin does.
"""

from __future__ import annotations

import builtins
import locale
import multiprocessing
import operator
import os
import random
import reprlib
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.compat.content import content_of
from opgraft.config import CURRENT_SCOPE, Scope
from opgraft.plugins import intervening, loggers, neighbours
from opgraft.plugins.changes import (
    Aspect,
    Change,
    Entries,
    Order,
    Value,
    attribute,
    equal,
    very_same,
)
from opgraft.plugins.definitions import DEFINITIONS
from opgraft.registry.state import host_state


class Handlers:
    """The handlers of signals, which only the main thread can set."""

    def read(self) -> dict[signal.Signals, Any]:
        return {number: signal.getsignal(number) for number in signal.Signals}

    def changes(
        self, before: dict[signal.Signals, Any], after: dict[signal.Signals, Any]
    ) -> Iterator[Change]:
        for number, handler in before.items():
            if after[number] is not handler:
                yield Change(
                    f"the handler of {number.name}", partial(signal.signal, number, handler)
                )


class Threads:
    """The threads for whose end Python waits when a process ends."""

    def read(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if not thread.daemon]

    def changes(
        self, before: list[threading.Thread], after: list[threading.Thread]
    ) -> Iterator[Change]:
        for thread in after:
            if thread not in before and thread.is_alive():
                words = f"the threads of this process, which waits for {thread.name!r} to end"
                yield Change(words, _cannot_end, stays=True, thread=thread)


def _cannot_end() -> None:
    raise RuntimeError("nobody can end the thread of somebody else")


class Filters:
    """The filters of warnings. Those that meet warnings of everybody are set back, those for certain ones stay."""

    def read(self) -> list[Any]:
        return list(warnings.filters)

    def changes(self, before: list[Any], after: list[Any]) -> Iterator[Change]:
        if very_same(before, after):
            return
        added = [row for row in after if not any(equal(row, known) for known in before)]
        certain = [row for row in added if not _meets_all(*row)]
        if len(certain) < len(added) or not all(
            any(equal(row, known) for known in after) for row in before
        ):
            yield Change("the filters of warnings", partial(self._set, [*certain, *before]))

    def _set(self, rows: list[Any]) -> None:
        warnings.filters[:] = rows  # type: ignore[index]  # a list, whatever its stub says
        with warnings.catch_warnings():  # which has Python look at the filters anew
            pass


def _meets_all(action: str, message: Any, category: type, module: Any, line: int) -> bool:
    return message is None and module is None and category.__module__ == "builtins"


class Draws:
    """Python's random numbers. Those only drawn come anew without a word, as libraries draw some at import."""

    WORDS = 624
    """Of 32 bits, that its generator makes at once."""

    def read(self) -> tuple[Any, ...]:
        return random.getstate()

    def changes(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> Iterator[Change]:
        if before != after:
            old, new = (f"{hash(state) & 0xFFFFFFFF:08x}" for state in (before, after))
            words = f"Python's random numbers from {old} to {new}"
            yield Change(
                words, partial(random.setstate, before), harmless=self._follows(before, after)
            )

    def _follows(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
        """Tell whether drawing, of some thousand numbers at most, leads from one state to the other."""
        numbers = random.Random()  # noqa: S311 - nothing is kept secret
        numbers.setstate(before)
        begun = (after[1][-1] - before[1][-1]) % self.WORDS
        for count in (begun, *[self.WORDS] * 16):
            numbers.getrandbits(32 * count)
            if numbers.getstate()[1] == after[1]:
                return True
        return False


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(
        None if device == torch.device("cpu") else device
    )  # a mode, which costs each call


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


def _random_state() -> bytearray:
    return content_of(torch.get_rng_state())


def _set_random_state(state: bytearray) -> None:
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))


def _set_inference_mode(enabled: bool) -> None:
    """Enter the mode or its opposite inside of the one that a plugin has entered and not left."""
    recorded, mode = torch.is_grad_enabled(), torch.inference_mode(enabled)
    mode.__enter__()
    _ENTERED.append(mode)
    torch.set_grad_enabled(recorded)


_ENTERED: list[torch.inference_mode] = []
"""Modes that last as long as the process: each ends with its object."""


def _scope(scope: Scope | None) -> str:
    return f"{len(scope.layers)} scopes" if scope else "none"


def _stream(name: str) -> Value:
    return Value(f"sys.{name}", *attribute(sys, name), lambda s: type(s).__name__, operator.is_)


def _automatic_dtypes() -> dict[str, bool]:
    selection = host_state().selection
    devices = dict.fromkeys(("cpu", selection.platform.device_type if selection else "cpu"))
    return {each: torch.is_autocast_enabled(each) for each in devices if _has_autocast(each)}


def _has_autocast(device: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device)
    except RuntimeError:  # torch does not know the type, which the doctor tells
        return False


def _set_automatic_dtypes(enabled: Mapping[str, bool]) -> None:
    for device, on in enabled.items():
        torch.set_autocast_enabled(device, on)


def _devices(enabled: Mapping[str, bool]) -> str:
    return ", ".join(device for device, on in enabled.items() if on) or "no device"


def _start_method() -> tuple[Callable[[], Any], Callable[[Any], object]]:
    set_it = partial(multiprocessing.set_start_method, force=True)
    return partial(multiprocessing.get_start_method, allow_none=True), set_it


def _flags_of_backends() -> Iterator[Value]:
    """Yield the flags by which torch's libraries choose how they compute."""
    for backend in (
        value for value in vars(torch.backends).values() if isinstance(value, ModuleType)
    ):
        for name in ("enabled", "benchmark", "deterministic"):
            if isinstance(getattr(backend, name, None), bool):
                yield Value(f"{backend.__name__}.{name}", *attribute(backend, name))


ASPECTS: tuple[Aspect, ...] = (
    Value("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Value("the default device", torch.get_default_device, _set_default_device),
    Value("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Value(
        "the number of threads between operators",
        torch.get_num_interop_threads,
        torch.set_num_interop_threads,
    ),
    Value("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    Value("the inference mode", torch.is_inference_mode_enabled, _set_inference_mode),
    Value("automatic dtypes", _automatic_dtypes, _set_automatic_dtypes, _devices),
    Value(
        "the detection of anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    ),
    Value("whether algorithms are deterministic", _deterministic, _set_deterministic),
    Value(
        "the precision of products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    *_flags_of_backends(),
    Value(
        "torch's random numbers",
        _random_state,
        _set_random_state,
        lambda state: f"{zlib.crc32(state):08x}",
    ),
    Draws(),
    Value("the start method of processes", *_start_method()),
    Value("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Value("the working folder", os.getcwd, os.chdir),
    Value(
        "the locale",
        partial(locale.setlocale, locale.LC_ALL),
        partial(locale.setlocale, locale.LC_ALL),
    ),
    Value("the settings in force", CURRENT_SCOPE.get, CURRENT_SCOPE.set, _scope),
    *map(_stream, ("stdin", "stdout", "stderr")),
    neighbours.Streams(),
    Entries("the environment variable", os.environ, operator.eq),
    Entries("builtins", vars(builtins)),
    Entries("the module", sys.modules, additions=False),
    neighbours.Namespaces(),
    neighbours.StandIns(),
    Order("sys.path", sys.path),
    Order("sys.meta_path", sys.meta_path, reprlib.repr, neighbours.fault_of_finder),
    Order("sys.path_hooks", sys.path_hooks, reprlib.repr),
    DEFINITIONS,
    intervening.Kernels(),
    *intervening.values(),
    Handlers(),
    Threads(),
    Filters(),
    Value("warnings.showwarning", *attribute(warnings, "showwarning"), reprlib.repr, operator.is_),
    *loggers.values(),
    loggers.Switches(),
)
"""All that is looked at."""


def look() -> list[Any]:
    """Return the process as it is now, for ``changes_between``."""
    return [_look_at(aspect) for aspect in ASPECTS]


def _look_at(aspect: Aspect) -> Any:
    try:
        return aspect.read()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of what a plugin has put there
        return _Unreadable(described(error))


@dataclass(frozen=True)
class _Unreadable:
    """Stands for a state that cannot be looked at."""

    why: str


def changes_between(before: list[Any], after: list[Any]) -> Iterator[Change]:
    """Yield what tells one look at the process from another, the latter of which is of now."""
    for aspect, then, now in zip(ASPECTS, before, after, strict=True):
        try:
            found = [] if isinstance(then, _Unreadable) else [*_changes(aspect, then, now)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # likewise
            found = [_unknown(aspect, described(error))]
        yield from found


def _changes(aspect: Aspect, then: Any, now: Any) -> Iterable[Change]:
    return (
        [_unknown(aspect, now.why)] if isinstance(now, _Unreadable) else aspect.changes(then, now)
    )


def _unknown(aspect: Aspect, why: str) -> Change:
    name = getattr(aspect, "name", type(aspect).__name__.lower())
    return Change(f"{name} to what cannot be looked at ({why})", _give_up)


def _give_up() -> None:
    raise RuntimeError("nothing tells what it was")
