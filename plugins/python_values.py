"""Shared values of Python: how each is read, set and shown."""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any

from opgraft.base.text import described
from opgraft.config import Scope
from opgraft.plugins.changes import (
    ABSENT,
    STAYS,
    Addition,
    Awaited,
    GuardedValue,
    Item,
    attribute,
    equal,
    value,
    very_same,
)
from opgraft.plugins.definitions import is_of_running_plugin, modules_of_plugins
from opgraft.plugins.discovery import discover

_NOBODYS = "opgraft_asks_for_no_module"
"""A module that no finder has."""

_STREAMS: Mapping[str, int] = {"stdin": 0, "stdout": 1, "stderr": 2}
"""The standard streams with their file descriptors."""


def only_drawn(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return True if drawing some thousand numbers leads from one state to the other.

    Libraries draw numbers when they are imported. Python's generator makes 624 words of 32 bits at
    once.
    """
    words = 624
    numbers = random.Random()  # noqa: S311 - nothing is kept secret
    numbers.setstate(before)
    begun = (after[1][-1] - before[1][-1]) % words
    for count in (begun, *[words] * 16):
        numbers.getrandbits(32 * count)
        if numbers.getstate()[1] == after[1]:
            return True
    return False


def signal_handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in signal.Signals}


def set_signal_handler(name: str, handler: Any) -> None:
    signal.signal(signal.Signals[name], handler)


def timers() -> dict[str, bool]:
    """Return, for each timer that interrupts this process, whether it runs."""
    names = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
    return {name: any(signal.getitimer(getattr(signal, name))) for name in names}


def stop_timer(name: str, ran: bool) -> None:
    """Stop a timer that a plugin has set.

    Raises:
        RuntimeError: the plugin has stopped a timer.
    """
    if ran:
        raise RuntimeError("nothing tells how long it would have run")
    signal.setitimer(getattr(signal, name), 0)


def mask_of_files() -> int:
    """Return the mask of new files.

    Raises:
        OSError: the system does not tell. To ask by ``os.umask`` would change the mask.
    """
    for line in (
        Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    ):
        name, _, text = line.partition(":")
        if name == "Umask":
            return int(text, 8)
    raise OSError("this system does not tell the mask of new files")


def limits() -> dict[str, tuple[int, int]]:
    """Return the limits of the system's resources for this process, lower and upper ones."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    # Some limits have two names.
    by_number = {getattr(resource, name): name for name in reversed(names)}
    return {name: resource.getrlimit(number) for number, name in by_number.items()}


def set_limit(name: str, limit: tuple[int, int]) -> None:
    resource.setrlimit(getattr(resource, name), limit)


def is_not_lowered(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Return True if no limit became lower. A plugin may need more files, or locked memory."""
    unlimited = resource.RLIM_INFINITY
    pairs = zip(before, after, strict=True)
    return all(now == unlimited or (was != unlimited and now >= was) for was, now in pairs)


def filters() -> list[Any]:
    return list(warnings.filters)


def only_certain(before: list[Any], after: list[Any]) -> bool:
    """Return True if the only change is new filters for certain warnings."""
    if very_same(before, after):
        return True
    added = _added(before, after)
    kept = all(any(equal(row, each) for each in after) for row in before)
    return kept and not any(map(_meets_all, added))


def set_filters(before: list[Any]) -> None:
    """Set filters of warnings, behind new filters for certain warnings."""
    # Filters for a plugin's own warnings harm nobody, and the plugin needs them.
    certain = [row for row in _added(before, warnings.filters) if not _meets_all(row)]
    warnings.filters[:] = [*certain, *before]  # type: ignore[index]  # the stub is wrong: a list
    with warnings.catch_warnings():  # Python looks at the filters anew
        pass


def _added(before: list[Any], after: Iterable[Any]) -> list[Any]:
    return [row for row in after if not any(equal(row, known) for known in before)]


def _meets_all(row: Any) -> bool:
    _, message, category, module, _ = row
    return message is None and module is None and category.__module__ == "builtins"


def awaited_threads() -> dict[Item, Awaited]:
    """Return the threads that must end before the process does."""
    return _by_name(threading.enumerate())


def awaited_children() -> dict[Item, Awaited]:
    """Return the child processes that must end before the process does."""
    return _by_name(multiprocessing.active_children())


def _by_name(started: Iterable[Awaited]) -> dict[Item, Awaited]:
    return {Item(f"{each.name!r} to end", id(each)): each for each in started if not each.daemon}


def awaited(key: Item, started: Awaited) -> Addition:
    return Addition("", stays=True)


def end_awaited(key: Item, former: object) -> None:
    raise RuntimeError("nobody can end what somebody else has started")


def stand_in(name: str, module: Any) -> Addition | None:
    """Judge a new module. ``None``, or an empty module of a plugin, keeps others from importing."""
    is_empty = module is None
    if not is_empty and name not in modules_of_plugins():
        return None
    if getattr(module, "__spec__", None) is not None or is_of_running_plugin(name):
        return None
    words = "nothing" if is_empty else f"a {type_of(module)} without a source"
    return Addition(f" to {words}", stays=False)


def finder(key: Item, found: Any) -> Addition | None:
    """Judge a new finder on ``sys.meta_path``: ask for a missing module.

    The finder of a bridge is no change by the plugin that needs the bridge.
    """
    if discover().is_bridge(type(found).__module__):
        return None
    try:
        spec = _spec_of_nobodys(found)
    except ImportError:  # the module is not there
        return STAYS
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's code
        words = f", which raises {described(error)} when it is asked for a module"
        return Addition(words, stays=False)
    if spec is None:
        return STAYS
    return Addition(f", which answers {type_of(spec)} for a module that is not there", stays=False)


def _spec_of_nobodys(found: Any) -> Any:
    """Ask a finder for a module that nobody has, as Python asks."""
    # Without this method a finder knows distributions only, or has the method of older Pythons.
    older = ("find_distributions", "find_module")
    if not hasattr(found, "find_spec") and any(hasattr(found, name) for name in older):
        return None
    return found.find_spec(_NOBODYS, None, None)


def path_hook(key: Item, hook: Any) -> Addition:
    """Judge a new function on ``sys.path_hooks``: ask for the finder of a folder."""
    try:
        made = hook(os.sep)
    except ImportError:  # the hook is for other entries of sys.path
        return STAYS
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's code
        words = f", which raises {described(error)} when it is asked for a folder"
        return Addition(words, stays=False)
    return STAYS if _is_finder(made) else Addition(f", which makes {type_of(made)}", stays=False)


def finder_of_folder(folder: Any, found: Any) -> Addition | None:
    """Judge the finder that Python keeps for a folder. Python keeps ``None`` for none."""
    if found is None or _is_finder(found):
        return None
    return Addition(f", {type_of(found)}", stays=False)


def is_as_good_a_finder(before: Any, after: Any) -> bool:
    """Return True if the finder of a folder was made anew, or if Python will make one.

    Python advises to empty its cache of finders after a new hook.
    """
    if after is ABSENT:
        return True
    return (before is None or type(after) is type(before)) and _is_finder(after)


def _is_finder(found: Any) -> bool:
    return callable(getattr(found, "find_spec", None)) or hasattr(found, "find_module")


class OpenFile:
    """The open file behind a descriptor, kept open by a copy of the descriptor."""

    def __init__(self, number: int) -> None:
        # Above the standard streams, since one of their numbers may be free.
        self.copy = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, len(_STREAMS))
        self.identity = _identity_of_file(self.copy)

    def is_kept(self) -> bool:
        """Return True unless somebody has closed the copy. Another file may have the number now."""
        with suppress(AttributeError, OSError):
            return _identity_of_file(self.copy) == self.identity
        return False

    def __del__(self) -> None:
        if self.is_kept():
            os.close(self.copy)


def _identity_of_file(number: int) -> tuple[int, int]:
    state = os.fstat(number)
    return state.st_dev, state.st_ino


def _open_file(number: int) -> OpenFile | None:
    """Return the open file behind a descriptor, ``None`` if the descriptor is closed.

    Raises:
        OSError: too many files are open.
    """
    try:
        return OpenFile(number)
    except OSError as error:
        if error.errno == errno.EBADF:
            return None
        raise


def _is_same_file(before: Any, after: Any) -> bool:
    if not isinstance(before, OpenFile) or after is ABSENT:
        return True
    return after is not None and before.identity == after.identity


def _put_file_back(number: int, former: OpenFile) -> None:
    """Put a file behind a descriptor again.

    Raises:
        RuntimeError: the copy was closed, too.
    """
    if not former.is_kept():
        raise RuntimeError("all copies of the descriptor were closed")
    os.dup2(former.copy, number, inheritable=True)


def streams() -> Iterator[GuardedValue]:
    """Yield rows of the standard streams: the file, the object, and whether it was closed."""
    for name, number in _STREAMS.items():
        # Behind a closed descriptor, the next file to be opened would take the output.
        yield value(
            f"the file behind sys.{name}",
            partial(_open_file, number),
            partial(_put_file_back, number),
            None,
            _is_same_file,
        )
        yield attribute(sys, name, type_of, is_)
        # A stream may be closed in place, which leaves the object as it was.
        closed = f"whether sys.{name} is closed"
        yield value(closed, partial(_is_closed, name), partial(_reopen, name), same=_is_not_closed)


def _is_not_closed(before: bool, after: bool) -> bool:
    return before or not after


def _is_closed(name: str) -> bool:
    stream = getattr(sys, name)
    try:
        return stream is not None and bool(stream.closed)
    except ValueError:  # the buffer was taken away
        return True


def _reopen(name: str, former: bool) -> None:
    """Open the file of a standard stream again, and hand the new stream to handlers of logs.

    Raises:
        OSError: the file itself was closed.
    """
    number, closed = _STREAMS[name], getattr(sys, name)
    mode = "w" if number else "r"
    # Another library may write to the file descriptor, so the end of the stream leaves it open.
    stream = open(  # noqa: SIM115  # it stays
        number, mode, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    if isinstance(stream, io.TextIOWrapper) and number:
        stream.reconfigure(line_buffering=number == 2 or stream.isatty())
    setattr(sys, name, stream)
    if getattr(sys, f"__{name}__") is closed:
        setattr(sys, f"__{name}__", stream)
    # Handlers hold the stream that they were made with.
    for handler in (*logging.getLogger().handlers, *logging.getLogger("opgraft").handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is closed:
            handler.setStream(stream)


def logger_row(name: str, log: logging.Logger) -> GuardedValue:
    """Return the row of a logger: its level, switches, filters and handlers."""

    def values() -> dict[str, Any]:
        # With their levels, as a plugin may silence a handler in place.
        handlers = [(each, getattr(each, "level", None)) for each in log.handlers]
        switches = {"level": log.level, "disabled": log.disabled, "propagate": log.propagate}
        return {**switches, "filters": [*log.filters], "handlers": handlers}

    def write(key: str, former: Any) -> None:
        if key == "level":
            log.setLevel(former)  # which empties caches too
        elif key == "filters":
            log.filters[:] = former
        elif key == "handlers":
            _set_handlers(log, former)
        else:
            setattr(log, key, former)

    return GuardedValue(name, values, write, _of_logger, equal)


def _set_handlers(log: logging.Logger, former: list[tuple[Any, int | None]]) -> None:
    log.handlers[:] = [handler for handler, _ in former]
    for handler, level in former:
        if level is not None:
            handler.setLevel(level)


def _of_logger(setting: Any) -> str:
    """Return words for a switch, a level, or a list of filters or handlers."""
    if isinstance(setting, bool):
        return str(setting)
    if isinstance(setting, int):
        return str(logging.getLevelName(setting))
    return ", ".join(map(_in_logger, setting)) or "none"


def _in_logger(item: Any) -> str:
    if not isinstance(item, tuple):
        return type_of(item)
    handler, level = item
    return f"{type_of(handler)} at {logging.getLevelName(level or 0)}"


def level_of_all() -> int:
    return logging.root.manager.disable


def enabled_loggers() -> list[logging.Logger]:
    """Return the loggers that are switched on, without opgraft's."""
    # A copy, as other threads may make loggers meanwhile.
    known = list(logging.root.manager.loggerDict.values())
    loggers = [log for log in known if isinstance(log, logging.Logger)]
    return [log for log in loggers if not log.disabled and log.name != "opgraft"]


def none_is_disabled(before: list[logging.Logger], after: object) -> bool:
    return not any(log.disabled for log in before)


def enable(loggers: list[logging.Logger]) -> None:
    for log in loggers:
        log.disabled = False


def type_of(thing: Any) -> str:
    return type(thing).__name__


def name_of(kind: Any) -> str:
    return str(getattr(kind, "__name__", type_of(kind)))


def types_of(items: list[Any]) -> str:
    return ", ".join(map(type_of, items)) or "none"


def scope_in_words(scope: Scope | None) -> str:
    return f"{len(scope.layers)} scopes" if scope else "none"


def collect_garbage(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


def set_thresholds(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)


def start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def set_start_method(method: str | None) -> None:
    multiprocessing.set_start_method(method, force=True)
