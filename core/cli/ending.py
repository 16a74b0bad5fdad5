"""The end of the command line. No thread of a plugin can hold up the end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType

import click
from opgraft.base.text import printable
from opgraft.config.environment import PLUGINS_DISABLE
from opgraft.plugins.discovery import discover
from opgraft.plugins.remarks import STARTED_THREADS
from opgraft.registry.decision import Provider

PATIENCE = 5.0
"""Seconds that threads have to end by themselves after the answer."""


def end_in_time(code: int) -> None:
    """End the process with this exit code if threads keep it from ending for ``PATIENCE`` seconds.

    A line on stderr names each thread with its plugin. Call it when the answer was given.
    """
    thread = threading.Thread(target=_end, args=(code,), name="opgraft-ending", daemon=True)
    # Some processes may start no thread.
    with contextlib.suppress(RuntimeError):
        thread.start()


def _end(code: int) -> None:
    time.sleep(PATIENCE)
    lines = [*_lines_of_threads(), *_line_of_exit()]
    if not lines:
        return
    for line in lines:
        # Nobody may read stderr any more.
        with contextlib.suppress(OSError, ValueError):
            click.echo(printable(line), err=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def awaited_threads() -> list[threading.Thread]:
    """Return the threads that Python waits for at the end of the process."""
    main = threading.main_thread()
    threads = threading.enumerate()
    return [thread for thread in threads if not thread.daemon and thread is not main]


def _lines_of_threads() -> Iterator[str]:
    """Yield a line for each thread of a plugin. Threads of other packages may take their time."""
    for thread in awaited_threads():
        frame = sys._current_frames().get(thread.ident or 0)
        provider = STARTED_THREADS.get().get(thread) or _provider_of(frame)
        if provider is not None:
            yield (
                f"the thread {thread.name!r} of {provider} has not ended {PATIENCE:g} s after the "
                f"answer, so this command ends without it: make it a daemon thread. "
                f"{_advice(provider)}"
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
