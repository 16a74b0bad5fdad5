"""``WorkerLink``: how an executor reaches a worker in another process, whoever has started that."""

from __future__ import annotations

import json
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, TypeAlias

import torch
from opgraft.base.text import printable
from opgraft.config import OpgraftConfig
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.workers.worker_progress import Progress, waits_for_others
from opgraft.errors import EngineError
from opgraft.logger import logger
from opgraft.machine.channel import Channel
from opgraft.version import __version__

PROTOCOL = 2
"""Number of what an engine and its workers say to each other: jobs, calls, replies."""

EXECUTE_PARTS = "execute_parts"
"""The call of ``execute`` with the parts of a step, which are plain, in place of the step."""

END_SECONDS = 2.0
"""Seconds that processes have to end once nobody asks them any more, and again once they are killed."""

_MOST_SHOWN = 200
"""Bytes of a greeting that a message has."""

STAGES_OF_START = MappingProxyType(
    {
        "init_device": "preparing the device",
        "load_model": "loading the model",
        "cache_bytes": "measuring memory",
        "allocate_cache": "making the cache",
    }
)
"""Method of a worker that has the time limit of the start → the stage that it is at."""


Meeting: TypeAlias = "tuple[str, int] | str"
"""Host and port of the store by which ranks find each other, or the path of its file where they are of one host."""


@dataclass(frozen=True)
class WorkerJob:
    """Everything that the process of a worker is told at its start.

    Attributes:
        opgraft_config: resolved.
        layout: of the ranks that are one job.
        rank: of the worker.
        local_rank: its place among the workers of its host, which chooses the device.
        local_size: the number of workers of its host.
        meeting: where ranks find each other; ``None`` for one that is alone.
        writes_json: whether its log is JSON.
        digest: of what decides in the engine's process how ops are computed, see ``engine_digest``.
    """

    opgraft_config: OpgraftConfig
    layout: ParallelLayout
    rank: int
    local_rank: int
    local_size: int
    meeting: Meeting | None
    writes_json: bool
    digest: Mapping[str, str]


class WorkerLink(ABC):
    """The channels to the process of one worker, and the means to watch it.

    Args:
        rank: of the worker.
        calls: takes calls of its methods, one after the other.
        beside: takes grammars, at any time.
    """

    telling_seconds: ClassVar[float] = END_SECONDS
    """Seconds until it is known how a process has ended whose channels have come to their end."""

    def __init__(self, rank: int, calls: Channel, beside: Channel) -> None:
        self.rank = rank
        self.calls = calls
        self.beside = beside

    def post(self, data: memoryview) -> None:
        """Send a call that ``encoded`` returned.

        Raises:
            TimeoutError: the process does not take calls any more.
            OSError: the process has ended.
        """
        self.calls.send_encoded(data)

    def limit(self, seconds: float) -> None:
        """Have whatever is sent and received fail with ``TimeoutError`` after so many seconds."""
        self.calls.limit(seconds)
        self.beside.limit(seconds)

    @abstractmethod
    def ended(self, patience: float = 0.0) -> str | None:
        """Return how the process has ended, in words; ``None`` while it runs.

        Args:
            patience: seconds to wait for its end.
        """

    def note_silence(self) -> None:  # noqa: B027  # optional
        """Note that the host of the process is silent, so that nobody waits for an exit status."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, whatever it does."""

    def progress(self) -> Progress:
        """Return what the worker does, as far as that is known here."""
        return Progress(0, "unknown")

    def told(self) -> str:
        """Return the rank, and what it does or did last, in words."""
        return f"rank {self.rank} ({printable(self.progress().stage)})"

    def stack(self) -> str:
        """Return the stack of the worker as it is now, as far as that can be asked for."""
        return ""

    def hang_up(self) -> None:
        """End the channels: the process ends on that, and no thread waits at a channel any more."""
        self.calls.hang_up()
        self.beside.hang_up()

    def close(self) -> None:
        """Give back what this process has of the worker. Further calls do nothing."""
        self.calls.close()
        self.beside.close()


def greeting() -> bytes:
    """Return what a worker says first, in plain text: objects that come later are read by the same versions only."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {
        "protocol": PROTOCOL,
        "opgraft": __version__,
        "python": python,
        "torch": torch.__version__,
    }
    return json.dumps(versions).encode()


def expect_greeting(found: bytes, rank: int) -> None:
    """Refuse a worker that could not read what the engine says.

    Args:
        found: what it has said first.
        rank: of the worker.

    Raises:
        EngineError: its versions are others.
    """
    if found != greeting():
        raise EngineError(
            f"rank {rank} has {printable(found[:_MOST_SHOWN].decode(errors='replace'))}, and the process of the engine "
            f"{greeting().decode()}: they would not understand each other. Install the same versions on all hosts"
        )


def output_rank(layout: ParallelLayout) -> int:
    """Return the rank that steps have their results from: the first of the last stage."""
    return (layout.pipeline - 1) * layout.tensor


def hanging(workers: Sequence[WorkerLink], number: int, seconds: float) -> str:
    """Say which ranks hang in a call, and where, and which only wait for them.

    Args:
        workers: of all ranks.
        number: of the call.
        seconds: for which it has been waited.
    """
    # Before the signal for the stack, which may wake it.
    progress = {worker: worker.progress() for worker in workers}
    behind = [worker for worker in workers if progress[worker].finished <= number]
    waiting = [worker for worker in behind if waits_for_others(worker.stack())]
    stuck = [worker for worker in behind if worker not in waiting] or behind or workers
    names = ", ".join(
        f"rank {worker.rank} ({printable(progress[worker].stage)})" for worker in stuck
    )
    others = ", ".join(f"rank {worker.rank}" for worker in waiting if worker not in stuck)
    return (
        f"{names} did not come to the end of a call within {seconds:g} seconds{f', and {others} wait' * bool(others)}: "
        "all were ended. Raise parallel.step_seconds, or parallel.start_seconds, where this was no hang"
    )


def end_workers(workers: Sequence[WorkerLink], patience: float = END_SECONDS) -> None:
    """End the processes of workers, kill those that do not end on that, and give back what this process has of them.

    Args:
        workers: which nobody uses any more.
        patience: seconds that they have before they are killed.
    """
    with ExitStack() as undo:
        for worker in workers:
            undo.callback(worker.close)
            worker.hang_up()
        try:
            left = _running(workers, patience)
        except BaseException:  # who interrupts this once more does not wait
            left = list(workers)
            raise
        finally:
            for worker in left:
                worker.kill()
        for worker in _running(left, END_SECONDS):
            logger.warning("%s was killed, and its process has not ended yet", worker.told())


def _running(workers: Sequence[WorkerLink], seconds: float) -> list[WorkerLink]:
    """Wait so many seconds for the ends of all workers, and return the workers that still run."""
    deadline = time.monotonic() + seconds
    return [
        worker for worker in workers if worker.ended(max(0.0, deadline - time.monotonic())) is None
    ]
