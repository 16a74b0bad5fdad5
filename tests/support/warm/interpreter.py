"""A Python that has torch imported when it starts: a process of its own as ever, without the second that this takes.

A server imports what most processes of these tests import first. The interpreter that it serves is a small program,
which hands over its arguments, environment, folder and open files. The server forks a process that goes on with them,
and the program ends as that process ends.

All processes of a test run share one server. It ends when none of them holds its pipe open any more.

A signal to the program is one to the process. ``process_of`` tells which that is.

What an interpreter or torch decides at its start is decided once, in the server. An interpreter that is given other
variables for that, or another opgraft, is therefore a real one. A test of how something starts, or of what it imports,
takes ``sys.executable``.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import marshal
import os
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

AT_START = ("LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_")
"""How the names of variables begin that are read before the first line of a program runs."""

LATER = ("PYTHONPATH", "PYTHONIOENCODING", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""Those of such names that the server minds in each process, or that are for GPUs only."""

FOR_CHILDREN = "python-for-children"
"""The name of an interpreter that serves isolated code with few variables, as opgraft starts it for probes."""

OF_PROGRAM = "-IS"
"""Options of the small program."""

PATIENCE = 60.0
"""Seconds within which the server reads its pipe."""

_TEMPORARY = tempfile.gettempdir()
"""As it is before a test sets another one."""


def process_of(pid: int) -> int:
    """Return the process that runs what an interpreter was started for, which of an ordinary one is itself.

    A program tells the number shortly after the process has begun, so this waits for the number.
    """
    end = time.monotonic() + PATIENCE
    while _hands_over(pid) and time.monotonic() < end:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.isdigit():
            return int(name)
        time.sleep(0.005)
    return pid


def _hands_over(pid: int) -> bool:
    """Return True if a process is the small program that hands over to the server."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[1:2] == [OF_PROGRAM.encode()]


@functools.cache
def warm_interpreter() -> str:
    """Return the path of an interpreter that the server of this test run serves, and start the server if need be."""
    if sys.platform != "linux":  # elsewhere no process can be waited for as the server waits
        return sys.executable
    folder = Path(_TEMPORARY, f"opgraft-warm-{os.environ.get('PYTEST_XDIST_TESTRUNUID', uuid4())}")
    folder.mkdir(mode=0o700, exist_ok=True)
    held = folder / "held"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not held.exists():
            os.mkfifo(held)
            _start_server(folder)
    _hold(held)
    return str(folder / "python")


def _hold(pipe: Path) -> None:
    """Open the pipe that the server reads, which stays open as long as this process lives."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            return
        # The server does not read the pipe yet, or no longer.
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > end:
                raise RuntimeError("the server of warm interpreters has ended") from error
        time.sleep(0.05)


def warm_interpreter_for_children() -> str:
    """Return the path of an interpreter for children of opgraft that need not know whether torch is imported."""
    warm = Path(warm_interpreter())
    beside = warm.with_name(FOR_CHILDREN)
    return str(beside if beside.exists() else warm)


def _start_server(folder: Path) -> None:
    here, address, interpreter = Path(__file__).parent, folder / "socket", folder / "python"
    environ = {name: value for name, value in os.environ.items() if name not in LATER}
    settings = {
        "for_children": FOR_CHILDREN,
        "address": str(address),
        "python": sys.executable,
        "at_start": AT_START,
        "later": LATER,
        "environ": {name: value for name, value in environ.items() if name.startswith(AT_START)},
    }
    (folder / "settings").write_bytes(marshal.dumps(settings))
    interpreter.write_text(f"#!{sys.executable} {OF_PROGRAM}\n{(here / 'client.py').read_text()}")
    interpreter.chmod(0o755)
    (folder / FOR_CHILDREN).symlink_to(interpreter.name)
    # Without a writer, the pipe cannot be opened for reading otherwise.
    held = os.open(folder / "held", os.O_RDONLY | os.O_NONBLOCK)
    ours, theirs = os.pipe()
    command = [sys.executable, str(here / "server.py"), str(address)]
    streams = [(os.POSIX_SPAWN_DUP2, held, 0), (os.POSIX_SPAWN_DUP2, theirs, 1)]
    # It may outlive this process, which waits for its first word only.
    os.posix_spawn(sys.executable, command, environ, file_actions=streams)
    os.close(held)
    os.close(theirs)
    with open(ours, "rb") as said:
        assert said.readline() == b"ready\n"
