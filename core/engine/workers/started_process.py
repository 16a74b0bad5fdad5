"""``StartedProcess``: the process of a worker on this host, with our ends of the connections.

``opgraft serve`` starts one before it imports torch, so that both processes import at once.
"""

# Imports no torch.

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from opgraft.engine.workers.worker_progress import RECORD_BYTES, ProgressRecord, anonymous_file
from opgraft.machine.channel import Channel, PipeSender
from opgraft.machine.child import child_command

END_SECONDS = 2.0
"""Seconds for processes to end after the last call, and again after a kill."""

_MAIN = """
from opgraft.engine.workers.worker_process import main
main(*map(int, sys.argv[2:]))
"""


class StartedProcess:
    """A process that imports what a worker needs, and waits for a job.

    The process ends with this process, or when this object is closed or gone.

    Args:
        environ: environment variables of the process.

    Attributes:
        process: the process.
        calls: the channel for calls.
        beside: the channel for grammars.
        record: the stage of the worker.
        close: gives back the connections, and kills the process.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        with ExitStack() as there, ExitStack() as undo:
            # Objects close themselves if an interrupt comes before the next line.
            calls, calls_there = socket.socketpair()
            beside, beside_there = socket.socketpair()
            pipe_there, pipe = multiprocessing.Pipe(duplex=False)
            for end in (calls_there, beside_there, pipe_there):
                there.callback(end.close)
            undo.callback(pipe.close)
            self.calls = PipeSender(calls, pipe.fileno())
            self.beside = Channel(beside)
            undo.callback(self.calls.close)
            undo.callback(self.beside.close)
            # A number does not close itself, so no line may end before it is noted.
            there.callback(os.close, record := anonymous_file(RECORD_BYTES))
            self.record = ProgressRecord(record)
            undo.callback(self.record.close)
            files = (calls_there.fileno(), beside_there.fileno(), pipe_there.fileno(), record)
            # Nor may one end between the start of the process and the note of it.
            started: list[subprocess.Popen[bytes]] = []
            undo.callback(_end_started, started)
            started.append(_start(files, environ))
            self.process = started[0]
            self.close = weakref.finalize(self, undo.pop_all().close)


class EarlyProcess:
    """A process that was started before an executor needs one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: StartedProcess | None = None
        self._conditions: tuple[Mapping[str, str], list[str]] = ({}, [])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start a process, and end it after the block if nobody has taken it."""
        self._conditions = (dict(os.environ), list(sys.path))
        self._started = StartedProcess(os.environ)
        try:
            yield
        finally:
            self.discard()

    def take(self, environ: Mapping[str, str]) -> StartedProcess | None:
        """Return the process, if it has these environment variables and this ``sys.path``."""
        started = self._taken()
        if started is None or self._conditions == (dict(environ), sys.path):
            return started
        # A plugin has changed them, and a process that is started now sees the change.
        started.close()
        return None

    def discard(self) -> None:
        """End the process if nobody has taken it."""
        started = self._taken()
        if started is not None:
            started.close()

    def _taken(self) -> StartedProcess | None:
        # Several executors may start at the same time.
        with self._lock:
            started = self._started
            self._started = None
            return started


EARLY = EarlyProcess()
"""The process that the command of a server has started."""


def _start(files: tuple[int, ...], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a worker with some of our descriptors."""
    # With a session of its own, the process gets no interrupt from the terminal.
    return subprocess.Popen(  # noqa: S603 - our own interpreter
        child_command(_MAIN, *map(str, files)),
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=environ,
        start_new_session=True,
    )


def _end_started(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End a process, if one has started, and take the exit status, so that no zombie is left."""
    for process in started:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
