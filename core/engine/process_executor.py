"""``ProcessExecutor``: workers in processes of their own on this host, one for each rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from opgraft.engine.remote_executor import RemoteExecutor
from opgraft.engine.worker_link import WorkerLink
from opgraft.engine.worker_progress import Progress, ProgressRecord
from opgraft.logger import logger
from opgraft.machine.broadcast import BY_CHANNEL, SharedSlots, anonymous_file
from opgraft.machine.channel import Channel
from torch import distributed as dist

_HERE = "127.0.0.1"

_STACK_SECONDS = 0.2
"""Seconds in which a process writes its stack."""

_SIGNALLED = {
    -signal.SIGKILL: " (SIGKILL, which the system sends where memory is out)",
    -signal.SIGSEGV: " (SIGSEGV)",
    -signal.SIGABRT: " (SIGABRT)",
}

_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from opgraft.engine.worker_process import main
main(*map(int, sys.argv[2:]))
"""


class ProcessExecutor(RemoteExecutor):
    """Workers in processes of their own, which have the settings of this one and the same plugins.

    They are started at once. It refuses to start where they compute ops otherwise than this process would, as where a
    script has registered replacements.

    Args:
        opgraft_config: resolved.
    """

    _store: Any = None
    """By which ranks meet, as long as they live."""

    _slots: SharedSlots | None = None

    def _start_workers(self) -> list[WorkerLink]:
        size = self.layout.world
        environ = {**os.environ, **_variables(self._local_ranks()[0][1])}
        with ExitStack() as undo:
            workers: list[WorkerLink] = []
            self._slots = SharedSlots(lambda: min(worker.progress().finished for worker in workers))
            undo.callback(self._slots.close)
            for rank in range(size):
                workers.append(LocalProcess(rank, environ, self._slots.file))
                undo.callback(workers[-1].kill)
                undo.callback(workers[-1].close)
            meeting = self.opgraft_config.parallel.meeting if self.in_rounds else None
            if size > 1 and meeting is None:
                self._store, port = listening_store(_HERE)
                self._meeting = _HERE, port
            if meeting is not None:
                host, _, at = meeting.rpartition(":")
                self._meeting = host, int(at)
            undo.pop_all()
        return workers

    def _finish(self, reason: str, *, at_once: bool = False) -> None:
        super()._finish(reason, at_once=at_once)
        self._store = None  # whose port is closed then
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _shared_by_all(self, number: int, data: memoryview) -> bytes:
        return BY_CHANNEL if self._slots is None else self._slots.write(number, data)

    def _local_ranks(self) -> list[tuple[int, int]]:
        size, parallel = self.layout.world, self.opgraft_config.parallel
        first, replicas = (0, 1) if parallel.data_rank is None else (parallel.data_rank * size, parallel.data)
        return [(first + rank, replicas * size) for rank in range(size)]


class LocalProcess(WorkerLink):
    """The process of a worker on this host, which ends with this one.

    Args:
        rank: of the worker.
        environ: its variables.
        slots: descriptor of the memory that it shares with the other workers.
    """

    def __init__(self, rank: int, environ: Mapping[str, str], slots: int) -> None:
        calls, calls_there = socket.socketpair()
        beside, beside_there = socket.socketpair()
        self._record = anonymous_file(0)
        tokens_there, self._tokens = os.pipe()
        self._close_files = weakref.finalize(self, _close, self._record, self._tokens)
        files = calls_there.fileno(), beside_there.fileno(), self._record, slots, tokens_there
        path = json.dumps([str(entry) for entry in sys.path])
        # Isolated: neither variables nor the working folder decide what is imported before the path is set.
        command = [sys.executable, "-I", "-c", _MAIN, path, *map(str, files)]
        with calls_there, beside_there:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter
                command, pass_fds=files, stdin=subprocess.DEVNULL, stdout=2, env=environ
            )
        os.close(tokens_there)
        super().__init__(rank, Channel(calls), Channel(beside))

    def post(self, data: memoryview, token: bytes = BY_CHANNEL) -> None:
        os.write(self._tokens, token)
        if token == BY_CHANNEL:
            self.calls.send_encoded(data)

    def ended(self, patience: float = 0.0) -> str | None:
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        return f"with the status {status}{_SIGNALLED.get(status, '')}"

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        super().close()
        self._close_files()

    def progress(self) -> Progress:
        return ProgressRecord(self._record).read()

    def stack(self) -> str:
        if self.progress() == Progress(0, "starting"):  # it may not know the signal yet, and would end
            return ""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return ProgressRecord(self._record).stack()


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def _variables(size: int) -> dict[str, str]:
    """Return the variables by which ranks of one host share it, as far as nobody has set them."""
    if size == 1:
        return {}
    share = max(1, torch.get_num_threads() // size)
    wanted = {"OMP_NUM_THREADS": str(share)}
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # where others would be asked for the address of this host's name
    threads = os.environ.get("OMP_NUM_THREADS", f"{share}, as {size} ranks share {torch.get_num_threads()}")
    logger.info("%d ranks on this host start; threads of each: %s", size, threads)
    return {name: value for name, value in wanted.items() if name not in os.environ}


def listening_store(address: str) -> tuple[Any, int]:
    """Return a store by which ranks meet, and its port at an address of this host, at which alone it is reached."""
    listening = socket.create_server((address, 0), backlog=128)
    port: int = listening.getsockname()[1]
    store = partial(dist.TCPStore, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store(address, port, master_listen_fd=listening.detach()), port
