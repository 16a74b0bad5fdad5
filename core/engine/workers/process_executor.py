"""``ProcessExecutor``: a process on this host for each rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from opgraft.base.log import logger
from opgraft.engine.workers.remote_executor import RemoteExecutor
from opgraft.engine.workers.remote_workers import StartedWorkers
from opgraft.engine.workers.started_process import EARLY, StartedProcess
from opgraft.engine.workers.worker_link import WorkerLink, end_workers
from opgraft.engine.workers.worker_progress import Progress, thread_name
from opgraft.plugins.selection import current_platform

_STACK_SECONDS = 0.2
"""Seconds for a process to write its stack."""

_SIGNALLED = {
    -signal.SIGKILL: " (SIGKILL, which the system sends where memory is out)",
    -signal.SIGSEGV: " (SIGSEGV)",
    -signal.SIGABRT: " (SIGABRT)",
}


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
        self._started = EARLY.take(environ) or StartedProcess(environ)
        super().__init__(rank, self._started.calls, self._started.beside)
        self.process = self._started.process

    def ended(self, patience: float = 0.0) -> str | None:
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        return f"with the status {status}{_SIGNALLED.get(status, '')}"

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self._started.close()

    def progress(self) -> Progress:
        try:
            return self._started.record.read()
        # Another thread has closed the record.
        except ValueError:
            return super().progress()

    def stack(self) -> str:
        # A process that does not handle the signal yet would end.
        if self.progress() == Progress(0, "starting"):
            return ""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return f"{thread_name(self.process.pid)}\n{self._started.record.stack()}"


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
