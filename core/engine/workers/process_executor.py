"""``ProcessExecutor``: workers in processes of their own on this host, one for each rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from opgraft.engine.workers.remote_executor import RemoteExecutor
from opgraft.engine.workers.remote_workers import Started
from opgraft.engine.workers.worker_link import END_SECONDS, WorkerLink, end_workers
from opgraft.engine.workers.worker_progress import (
    RECORD_BYTES,
    Progress,
    ProgressRecord,
    anonymous_file,
    thread_name,
)
from opgraft.logger import logger
from opgraft.machine.channel import Channel, PipeSender
from opgraft.machine.child import child_command

_STACK_SECONDS = 0.2
"""Seconds in which a process writes its stack."""

_SIGNALLED = {
    -signal.SIGKILL: " (SIGKILL, which the system sends where memory is out)",
    -signal.SIGSEGV: " (SIGSEGV)",
    -signal.SIGABRT: " (SIGABRT)",
}

_MAIN = """
from opgraft.engine.workers.worker_process import main
main(*map(int, sys.argv[2:]))
"""


class ProcessExecutor(RemoteExecutor):
    """Workers in processes of their own, which have the settings of this one and the same plugins.

    They are started at once. It refuses to start where they compute ops otherwise than this process
    would, as where a script has registered replacements.

    Args:
        opgraft_config: resolved.
    """

    def _start_workers(self) -> Started:
        local = self._local_ranks()
        environ = {**os.environ, **_variables(local[0][1])}
        links: list[WorkerLink] = []
        with ExitStack() as release, ExitStack() as undo:
            undo.callback(end_workers, links, 0.0)
            for rank in range(len(local)):
                links.append(LocalProcess(rank, environ))
            meeting = self._meeting(release)
            undo.pop_all()
            return Started(links, local, meeting, release.pop_all().close)

    def _meeting(self, release: ExitStack) -> str | None:
        """Return the file by which the ranks meet; that of all replicas is of these.

        It stays while they run: backends such as NCCL connect the ranks of a group at its first
        collective.
        """
        given = self.opgraft_config.parallel.meeting if self.in_rounds else None
        if given is not None or self.layout.world == 1:
            return given
        return release.enter_context(meeting_file())

    def _local_ranks(self) -> list[tuple[int, int]]:
        size, parallel = self.layout.world, self.opgraft_config.parallel
        first, replicas = (
            (0, 1) if parallel.data_rank is None else (parallel.data_rank * size, parallel.data)
        )
        return [(first + rank, replicas * size) for rank in range(size)]


class LocalProcess(WorkerLink):
    """The process of a worker on this host. The process ends with this one.

    Args:
        rank: of the worker.
        environ: variables of the process.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        with ExitStack() as there, ExitStack() as undo:
            # Objects close themselves if an interrupt comes before the next line.
            calls, calls_there = socket.socketpair()
            beside, beside_there = socket.socketpair()
            pipe_there, pipe = multiprocessing.Pipe(duplex=False)
            given = (calls_there, beside_there, pipe_there)
            for each in given:
                there.callback(each.close)
            undo.callback(pipe.close)
            super().__init__(rank, PipeSender(calls, pipe.fileno()), Channel(beside))
            undo.callback(self.calls.close)
            undo.callback(self.beside.close)
            record = anonymous_file(RECORD_BYTES)
            there.callback(os.close, record)
            self._record = ProgressRecord(record)
            undo.callback(self._record.close)
            self.process = _start((*(each.fileno() for each in given), record), environ)
            undo.callback(_end, self.process)
            self._give_back = weakref.finalize(self, undo.pop_all().close)

    def ended(self, patience: float = 0.0) -> str | None:
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        return f"with the status {status}{_SIGNALLED.get(status, '')}"

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self._give_back()

    def progress(self) -> Progress:
        try:
            return self._record.read()
        except ValueError:  # it was closed meanwhile
            return super().progress()

    def stack(self) -> str:
        # It may not know the signal yet, and would end.
        if self.progress() == Progress(0, "starting"):
            return ""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return f"{thread_name(self.process.pid)}\n{self._record.stack()}"


def _start(files: tuple[int, ...], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a worker that has some of our descriptors."""
    # In a session of its own: an interrupt from the terminal is for the process that asks.
    return subprocess.Popen(  # noqa: S603 - our own interpreter
        child_command(_MAIN, *map(str, files)),
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=2,
        env=environ,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process at once, and have the system forget it."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def _variables(size: int) -> dict[str, str]:
    """Return the variables by which ranks of one host share it, as far as nobody has set them."""
    if size == 1:
        return {}
    share = max(1, torch.get_num_threads() // size)
    wanted = {"OMP_NUM_THREADS": str(share)}
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = (
            "lo"  # where others would be asked for the address of this host's name
        )
    threads = os.environ.get(
        "OMP_NUM_THREADS", f"{share}, as {size} ranks share {torch.get_num_threads()}"
    )
    logger.info("%d ranks on this host start; threads of each: %s", size, threads)
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def meeting_file() -> Iterator[str]:
    """Yield the path of a file by which ranks of this host meet, in a folder of this user alone."""
    with tempfile.TemporaryDirectory(prefix="opgraft-") as folder:
        yield str(Path(folder) / "ranks")
