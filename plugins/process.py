"""The table of values to compare around each step of a plugin, and to set back.

A change with an effect on others is set back at once. An addition, such as a
variable of the environment that a library reads, stays as long as the plugin does.
"""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import os
import random
import reprlib
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from opgraft.base.text import described
from opgraft.compat import intervening
from opgraft.config import CURRENT_SCOPE
from opgraft.plugins import python_values as python
from opgraft.plugins import torch_values as of_torch
from opgraft.plugins.changes import (
    STAYS,
    Addition,
    Aspect,
    Change,
    GuardedValue,
    attribute,
    entries,
    equal,
    is_thorough,
    rebinding,
    search_order,
    value,
    very_same,
)
from opgraft.plugins.definitions import DEFINITIONS, OF_OTHERS, OF_PLUGINS
from opgraft.registry.state import host_state


def _digest(state: bytearray | tuple[Any, ...]) -> str:
    # The states are long: a message quotes a digest.
    content = state if isinstance(state, bytearray) else repr(state).encode()
    return f"{zlib.crc32(content):08x}"


def _hook(owner: Any, name: str) -> GuardedValue:
    """Return the row of a function for Python to call."""
    return attribute(owner, name, reprlib.repr, is_)


def _watcher(verb: str, module: Any, threads: str) -> GuardedValue:
    """Return the row of a function to call at each call."""
    get, write = getattr(module, f"get{verb}"), getattr(module, f"set{verb}")
    return value(f"what {verb}s the functions of {threads}", get, write, reprlib.repr, is_)


def _stays(key: Any, added: Any) -> Addition:
    return STAYS


def _is_undone(key: Any, added: Any) -> Addition:
    return Addition("", stays=False)


def _registered(name: str, table: Callable[[], dict[str, Any]]) -> GuardedValue:
    """Return the row of a table that plugins add to: another object under a name is a change."""

    def write(key: str, former: Any) -> None:
        table()[key] = former

    return GuardedValue(name, lambda: dict(table()), write)


_locale = partial(locale.setlocale, locale.LC_ALL)

LISTS: tuple[Aspect, ...] = (
    rebinding(sys, "path"),
    rebinding(sys, "meta_path"),
    rebinding(sys, "path_hooks"),
)
"""The lists that imports search. Each load of plugins compares them before their items."""

OF_IMPORTS: tuple[Aspect, ...] = (
    entries("builtins", vars(builtins), _stays),
    *search_order(sys, "path", str, _stays),
    *search_order(sys, "meta_path", reprlib.repr, python.finder),
    *search_order(sys, "path_hooks", reprlib.repr, python.path_hook),
    entries(
        "the finder for",
        sys.path_importer_cache,
        python.finder_of_folder,
        python.is_as_good_a_finder,
    ),
)
"""The other rows that imports depend on. Each load of plugins compares them next."""

OF_PROCESS: tuple[Aspect, ...] = (
    value("the settings in force", CURRENT_SCOPE.get, CURRENT_SCOPE.set, python.scope_in_words),
    # Results of all models depend on these.
    value("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    value("the default device", torch.get_default_device, of_torch.set_default_device),
    value(
        "the modes of torch",
        intervening.entered_modes,
        intervening.leave_other_modes,
        python.types_of,
        very_same,
    ),
    value(
        "the hooks that torch calls for every module",
        intervening.hooks_of_every_module,
        intervening.set_hooks_of_every_module,
        of_torch.number_of_hooks,
    ),
    value("the number of threads", torch.get_num_threads, torch.set_num_threads),
    value("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    value("the inference mode", torch.is_inference_mode_enabled, of_torch.set_inference_mode),
    value(
        "automatic dtypes",
        of_torch.automatic_dtypes,
        of_torch.set_automatic_dtypes,
        of_torch.enabled_devices,
    ),
    value(
        "whether algorithms are deterministic", of_torch.deterministic, of_torch.set_deterministic
    ),
    value(
        "the precision of float32",
        of_torch.precisions,
        of_torch.set_precisions,
        of_torch.changed_precisions,
        of_torch.same_precisions,
    ),
    *of_torch.flags(),
    value(
        "whether tiny numbers become zero", of_torch.flushes_tiny_numbers, torch.set_flush_denormal
    ),
    GuardedValue(
        "the kernel of torch's operator",
        of_torch.kernels,
        of_torch.remove_kernel,
        added=_is_undone,
        patch=True,
    ),
    value("torch's random numbers", of_torch.random_state, of_torch.set_random_state, _digest),
    value(
        "Python's random numbers",
        random.getstate,
        random.setstate,
        _digest,
        harmless=python.only_drawn,
    ),
    # All libraries of a process share one of each.
    value(
        "the recursion limit",
        of_torch.recursion_limit,
        of_torch.set_recursion_limit,
        of_torch.limit_in_words,
        of_torch.same_recursion_limits,
    ),
    value("the working folder", os.getcwd, os.chdir),
    value("the mask of new files", python.mask_of_files, os.umask, oct),
    GuardedValue("the limit", python.limits, python.set_limit, str, python.is_not_lowered),
    GuardedValue("the timer", python.timers, python.stop_timer, str, equal),
    entries("the environment variable", os.environ, _stays, equal),
    GuardedValue("the handler of", python.signal_handlers, python.set_signal_handler),
    GuardedValue(
        "the threads of this process, which waits for",
        python.awaited_threads,
        python.end_awaited,
        same=lambda before, after: True,
        added=python.awaited,
    ),
    GuardedValue(
        "the children of this process, which waits for",
        python.awaited_children,
        python.end_awaited,
        same=lambda before, after: True,
        added=python.awaited,
    ),
    *python.streams(),
    value("the filters of warnings", python.filters, python.set_filters, None, python.only_certain),
    python.logger_row("the root logger:", logging.getLogger()),
    python.logger_row("the logger opgraft:", logging.getLogger("opgraft")),
    value(
        "the switches of other loggers",
        python.enabled_loggers,
        python.enable,
        None,
        python.none_is_disabled,
    ),
    value(
        "the level of logging.disable",
        python.level_of_all,
        logging.disable,
        logging.getLevelName,
    ),
    value(
        "the class of loggers", logging.getLoggerClass, logging.setLoggerClass, python.name_of, is_
    ),
    value(
        "the factory of log records",
        logging.getLogRecordFactory,
        logging.setLogRecordFactory,
        python.name_of,
        is_,
    ),
    entries("the module", sys.modules, python.stand_in),
    _registered("the op registered as", lambda: host_state().registry.ops),
    _registered("the class registered as", lambda: host_state().registry.classes),
    _registered("the functional form", lambda: host_state().registry.forms),
    DEFINITIONS,
    OF_PLUGINS,
)
"""The other rows that each load of plugins compares."""

RARELY_CHANGED: tuple[Aspect, ...] = (
    value("the locale", _locale, _locale),
    value("the start method of processes", python.start_method, python.set_start_method),
    OF_OTHERS,
    value(
        "the detection of anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    ),
    value(
        "the number of threads between operators",
        torch.get_num_interop_threads,
        torch.set_num_interop_threads,
    ),
    *of_torch.ways_of_attention(),
    *(_watcher(verb, sys, "this thread") for verb in ("trace", "profile")),
    *(_watcher(verb, threading, "new threads") for verb in ("trace", "profile")),
    _hook(sys, "excepthook"),
    _hook(sys, "unraisablehook"),
    _hook(warnings, "showwarning"),
    value("whether garbage is collected", gc.isenabled, python.collect_garbage),
    value("the thresholds of the garbage collector", gc.get_threshold, python.set_thresholds),
    value("the time after which threads take turns", sys.getswitchinterval, sys.setswitchinterval),
)
"""Further rows, which only the doctor and the conformance kit compare."""

Look = tuple[tuple[Aspect, Any], ...]
"""Aspects, each as it was at one time."""


@dataclass(frozen=True)
class _Unreadable:
    """Stands for an unreadable aspect."""

    why: str


def look() -> Look:
    """Return the present process, for ``changes_between``."""
    return (*look_at_lists(), *look_at_imports(), *look_at_others())


def look_at_lists() -> Look:
    """Return the part of ``look`` that ``look_at_imports`` takes the items of."""
    return _look_at(LISTS)


def look_at_imports() -> Look:
    """Return the part of ``look`` that imports depend on."""
    return _look_at(OF_IMPORTS)


def look_at_others() -> Look:
    """Return the other part of ``look``, which takes imports to read."""
    # Each start of a process waits for the look: the rest is left to the doctor.
    return _look_at((*OF_PROCESS, *RARELY_CHANGED) if is_thorough() else OF_PROCESS)


def _look_at(aspects: Iterable[Aspect]) -> Look:
    return tuple((aspect, _read(aspect)) for aspect in aspects)


def _read(aspect: Aspect) -> Any:
    try:
        return aspect.read()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of an object that a plugin has put there
        return _Unreadable(described(error))


def changes_between(before: Look, after: Look) -> Iterator[Change]:
    """Yield the changes from a former look at the process to the one of now."""
    former = dict(before)
    for aspect, now in after:
        # The former look may have had fewer rows.
        if aspect not in former:
            continue
        then = former[aspect]
        try:
            found = list(_changes(aspect, then, now))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # to compare such an object may run its code
            found = [_unknown(aspect, described(error))]
        yield from found


def _changes(aspect: Aspect, then: Any, now: Any) -> Iterable[Change]:
    if isinstance(then, _Unreadable):
        return ()
    if isinstance(now, _Unreadable):
        return (_unknown(aspect, now.why),)
    return aspect.changes(then, now)


def _unknown(aspect: Aspect, why: str) -> Change:
    name = getattr(aspect, "name", "the definitions")
    return Change(f"{name} to what cannot be looked at ({why})", _give_up)


def _give_up() -> None:
    raise RuntimeError("nothing tells what it was")
