"""A Python that has torch imported when it starts: a process of its own as ever, without the second that this takes.

A server imports what most processes of these tests import first. The interpreter that it serves is a small program,
which hands over its arguments, environment, folder and open files. The server forks a process that goes on with them,
and the program ends as that process ends.

A signal to the program is one to the process. ``process_of`` tells which that is.

What an interpreter or torch decides at its start is decided once, in the server. An interpreter that is given other
variables for that, or another opgraft, is therefore a real one. A test of how something starts, or of what it imports,
takes ``sys.executable``.
"""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AT_START = ("LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_")
"""How the names of variables begin that are read before the first line of a program runs."""

LATER = ("PYTHONPATH", "PYTHONIOENCODING", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""Those of such names that the server minds in each process, or that are for GPUs only."""


def process_of(pid: int) -> int:
    """Return the process that runs what an interpreter was started for, which of an ordinary one is itself."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name) if name.isdigit() else pid


@contextmanager
def warm_interpreter(folder: Path) -> Iterator[Path]:
    """Start a server; yields the path of the interpreter that it serves, which lies in ``folder``."""
    if sys.platform != "linux":  # elsewhere no process can be waited for as the server waits
        yield Path(sys.executable)
        return
    here, address, interpreter = Path(__file__).parent, folder / "socket", folder / "python"
    environ = {name: value for name, value in os.environ.items() if name not in LATER}
    settings = {
        "address": str(address),
        "python": sys.executable,
        "at_start": AT_START,
        "later": LATER,
        "environ": {name: value for name, value in environ.items() if name.startswith(AT_START)},
    }
    (folder / "settings").write_bytes(marshal.dumps(settings))
    interpreter.write_text(f"#!{sys.executable} -IS\n{(here / 'client.py').read_text()}")
    interpreter.chmod(0o755)
    command = [sys.executable, str(here / "server.py"), str(address)]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield interpreter  # the server ends when its stdin is closed
