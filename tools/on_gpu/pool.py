"""Many tasks on several processes: a task that crashes or hangs takes its process with it, and no other task."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

Call: TypeAlias = Callable[..., Any]

START_SECONDS = 90.0
"""Enough to import torch and to start CUDA."""

_context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork


@dataclass(frozen=True)
class Done:
    """The outcome of a task.

    Attributes:
        arguments: of the task.
        value: that the call returned; ``None`` if it failed.
        error: why it failed, or an empty text.
    """

    arguments: tuple[Any, ...]
    value: Any = None
    error: str = ""


class _Worker:
    """A process and the task that it has.

    Args:
        call: of the tasks.
    """

    def __init__(self, call: Call) -> None:
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(call, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that its end is seen here
        self.task: tuple[Any, ...] = ()
        self.deadline = 0.0
        self._first = True

    def begin(self, task: tuple[Any, ...], seconds: float, start_seconds: float) -> None:
        self.task = task
        self.deadline = time.monotonic() + seconds + start_seconds * self._first
        self._first = False
        self.connection.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


def run_all(
    call: Call,
    tasks: Sequence[tuple[Any, ...]],
    processes: int,
    seconds: float,
    start_seconds: float = START_SECONDS,
) -> Iterator[Done]:
    """Yield the outcomes of tasks as they come.

    A process goes on with the next task, unless its task has failed: after an error of CUDA every call fails there.

    Args:
        call: of a module, called with the arguments of each task.
        tasks: arguments.
        processes: at once.
        seconds: that a task may take.
        start_seconds: that the first task of a process may take on top.
    """
    left = list(tasks)
    workers = [_Worker(call) for _ in range(min(processes, len(left)))]
    for worker in workers:
        worker.begin(left.pop(0), seconds, start_seconds)
    while workers:
        ready = wait([worker.connection for worker in workers], timeout=0.2)
        for worker in list(workers):
            done = _outcome(worker, worker.connection in ready, seconds)
            if done is None:
                continue
            yield done
            workers.remove(worker)
            if done.error or not left:
                worker.end()
                worker = _Worker(call) if left else worker
            if left:
                worker.begin(left.pop(0), seconds, start_seconds)
                workers.append(worker)


def _outcome(worker: _Worker, is_ready: bool, seconds: float) -> Done | None:
    """Return how the task of a worker has ended, or ``None`` if it is still running."""
    if is_ready:
        try:
            value, error = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(10)
            return Done(worker.task, error=f"its process ended with {worker.process.exitcode}")
        return Done(worker.task, value, error)
    if time.monotonic() > worker.deadline:
        return Done(worker.task, error=f"took more than {seconds:.0f} seconds")
    return None


def _serve(call: Call, connection: Connection) -> None:
    """Run the tasks of a process, until nobody sends any more."""
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            answer = call(*task), ""
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        connection.send(answer)
