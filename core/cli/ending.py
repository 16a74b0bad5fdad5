"""The end of the command line. Nothing that a plugin has started can hold up the end."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType

import click
from opgraft.base.text import printable
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.plugins.changes import Awaited
from opgraft.plugins.discovery import discover
from opgraft.plugins.remarks import STARTED
from opgraft.registry.decision import Provider
from opgraft.registry.watching import leave_watchdog

PATIENCE = 5.0
"""Seconds that threads have to end by themselves after the answer."""

_LONGEST = 30.0
"""Seconds for code that runs at exit and shows no plugin, such as a destructor."""

_OF_NOBODY = (
    f"code that runs at exit has not returned {_LONGEST:g} s after the answer, so this command "
    "ends without it: 'opgraft plugins doctor' names its plugin."
)


def end_in_time(code: int) -> None:
    """End the process with this exit code if plugins keep it from ending for ``PATIENCE`` seconds.

    A line on stderr names each thread or process with its plugin. Call it when the answer was
    given.
    """
    leave_watchdog()
    # At the very end no thread of Python runs any more. A destructor is shown with its line.
    atexit.register(faulthandler.dump_traceback_later, _LONGEST + PATIENCE, exit=True)
    # A daemon, as Python waits for all other threads.
    thread = threading.Thread(target=_end, args=(code,), name="opgraft-ending", daemon=True)
    # Some processes may start no thread.
    with contextlib.suppress(RuntimeError):
        thread.start()


def _end(code: int) -> None:
    time.sleep(PATIENCE)
    lines = [*_lines_of_awaited(), *_line_of_exit()]
    if lines:
        _end_with(lines, code)
    time.sleep(_LONGEST - PATIENCE)
    # Threads of other packages may take their time.
    if not awaited():
        _end_with([_OF_NOBODY], code)


def _end_with(lines: Sequence[str], code: int) -> None:
    for line in lines:
        # Nobody may read stderr any more.
        with contextlib.suppress(OSError, ValueError):
            click.echo(printable(line), err=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for child in multiprocessing.active_children():
        # A copy of this process may hold the pipe open that the answer was written to.
        if child in STARTED.get():
            child.kill()
    # sys.exit would end this thread alone.
    os._exit(code)


def awaited() -> list[Awaited]:
    """Return the threads and child processes that Python waits for at the end of the process."""
    main = threading.main_thread()
    started: list[Awaited] = [*threading.enumerate(), *multiprocessing.active_children()]
    return [each for each in started if not each.daemon and each is not main]


def _lines_of_awaited() -> Iterator[str]:
    """Yield a line for each thread and each child process of a plugin.

    Those of other packages may take their time.
    """
    for each in awaited():
        frame = sys._current_frames().get(each.ident or 0)
        provider = STARTED.get().get(each) or _provider_of(frame)
        if provider is None:
            continue
        kind = "process" if isinstance(each, BaseProcess) else "thread"
        yield (
            f"the {kind} {each.name!r} of {provider} has not ended {PATIENCE:g} s after the "
            f"answer, so this command ends without it: make it a daemon. {_advice(provider)}"
        )


def _line_of_exit() -> list[str]:
    """Return a line about a plugin's function that runs at exit and does not return."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    provider = _provider_of(frame)
    if provider is None:
        return []
    return [
        f"a function of {provider} that runs at exit has not returned {PATIENCE:g} s after "
        f"the answer, so this command ends without it. {_advice(provider)}"
    ]


def _provider_of(frame: FrameType | None) -> Provider | None:
    """Return the distribution of the innermost code of a plugin on a stack."""
    plugins = {offer.module.partition(".")[0] for offer in discover().offers if not offer.built_in}
    for each, _ in traceback.walk_stack(frame) if frame else ():
        module = str(each.f_globals.get("__name__"))
        if module.partition(".")[0] in plugins:
            return discover().provider_of(module)
    return None


def _advice(provider: Provider) -> str:
    return f"{PLUGINS_DISABLE}={provider.name} goes without it."
