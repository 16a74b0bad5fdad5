"""``ProcessExecutor``: a process on this host for each rank."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from opgraft.base.log import logger
from opgraft.engine.workers.remote_executor import RemoteExecutor
from opgraft.engine.workers.remote_workers import StartedWorkers
from opgraft.engine.workers.worker_link import END_SECONDS, WorkerLink, end_workers
from opgraft.engine.workers.worker_progress import (
    RECORD_BYTES,
    Progress,
    ProgressRecord,
    anonymous_file,
    thread_name,
)
from opgraft.machine.channel import Channel, PipeSender
from opgraft.machine.child import child_command
from opgraft.plugins.selection import current_platform

_STACK_SECONDS = 0.2
"""Seconds for a process to write its stack."""

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
    """Workers in processes of their own, with the settings and plugins of this process.

    All processes start at once. The executor refuses to start if a worker would compute ops in
    another way than this process, for example if a script has registered replacements.

    Args:
        opgraft_config: resolved.
    """

    def _start_workers(self) -> StartedWorkers:
        local = self._local_ranks()
        environ = {**os.environ, **_variables(local[0][1])}
        links: list[WorkerLink] = []
        with ExitStack() as release, ExitStack() as undo:
            undo.callback(end_workers, links, 0.0)
            for rank in range(len(local)):
                links.append(LocalProcess(rank, environ))
            meeting = self._meeting(release)
            undo.pop_all()
            return StartedWorkers(links, local, meeting, release.pop_all().close)

    def _meeting(self, release: ExitStack) -> str | None:
        """Return the file through which the ranks meet; ``None`` for a single rank.

        If replicas compute in rounds, the settings have a file for all replicas. The file must
        exist while the ranks run: backends such as NCCL connect the ranks of a group at the first
        collective.
        """
        given = self.opgraft_config.parallel.meeting if self.in_rounds else None
        if given is not None or self.layout.world == 1:
            return given
        return release.enter_context(meeting_file())

    def _local_ranks(self) -> list[tuple[int, int]]:
        """Return the local rank of each worker, and the number of workers on this host."""
        size = self.layout.world
        parallel = self.opgraft_config.parallel
        first = 0
        replicas = 1
        # All replicas of a front end are on this host.
        if parallel.data_rank is not None:
            first = parallel.data_rank * size
            replicas = parallel.data
        # The second process of an engine takes the next devices, if there are as many.
        own = replicas * size
        if self.opgraft_config.handover.part == "computes":
            first += own if current_platform().device_count() >= 2 * own else 0
        return [(first + rank, replicas * size) for rank in range(size)]


class LocalProcess(WorkerLink):
    """The process of a worker on this host. The process ends with this process.

    Args:
        rank: the rank of the worker.
        environ: environment variables of the process.
    """

    def __init__(self, rank: int, environ: Mapping[str, str]) -> None:
        with ExitStack() as there, ExitStack() as undo:
            # Objects close themselves if an interrupt comes before the next line.
            calls, calls_there = socket.socketpair()
            beside, beside_there = socket.socketpair()
            pipe_there, pipe = multiprocessing.Pipe(duplex=False)
            for end in (calls_there, beside_there, pipe_there):
                there.callback(end.close)
            undo.callback(pipe.close)
            super().__init__(rank, PipeSender(calls, pipe.fileno()), Channel(beside))
            undo.callback(self.calls.close)
            undo.callback(self.beside.close)
            # A number does not close itself, so no line may end before it is noted.
            there.callback(os.close, record := anonymous_file(RECORD_BYTES))
            self._record = ProgressRecord(record)
            undo.callback(self._record.close)
            files = (calls_there.fileno(), beside_there.fileno(), pipe_there.fileno(), record)
            # Nor may one end between the start of the process and the note of it.
            started: list[subprocess.Popen[bytes]] = []
            undo.callback(_end_started, started)
            started.append(_start(files, environ))
            self.process = started[0]
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
        # Another thread has closed the record.
        except ValueError:
            return super().progress()

    def stack(self) -> str:
        # A process that does not handle the signal yet would end.
        if self.progress() == Progress(0, "starting"):
            return ""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return f"{thread_name(self.process.pid)}\n{self._record.stack()}"


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


def _variables(size: int) -> dict[str, str]:
    """Return environment variables for ranks that share this host, without those that are set."""
    if size == 1:
        return {}
    threads = torch.get_num_threads()
    share = max(1, threads // size)
    wanted = {"OMP_NUM_THREADS": str(share)}
    if sys.platform == "linux":
        # gloo would look up the address of this host's name, which need not be known.
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    told = os.environ.get("OMP_NUM_THREADS", f"{share}, as {size} ranks share {threads}")
    logger.info("%d ranks on this host start; threads of each: %s", size, told)
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def meeting_file() -> Iterator[str]:
    """Yield the path of a file for ranks of this host to meet, in a folder of this user alone."""
    with tempfile.TemporaryDirectory(prefix="opgraft-") as folder:
        yield str(Path(folder) / "ranks")
