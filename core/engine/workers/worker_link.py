"""``WorkerLink``: the connection of an executor to a worker in another process."""

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
from opgraft.base.log import logger
from opgraft.base.text import printable
from opgraft.base.version import __version__
from opgraft.config import OpgraftConfig
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.workers.rank_places import RankPlaces
from opgraft.engine.workers.started_process import END_SECONDS
from opgraft.engine.workers.worker_progress import Progress, waits_for_others
from opgraft.errors import EngineError
from opgraft.machine.channel import Channel

PROTOCOL = 3
"""The number of the protocol between engine and workers: jobs, calls, replies."""

EXECUTE_PARTS = "execute_parts"
"""The call of ``execute`` with the plain parts of a step instead of the step."""

_MOST_SHOWN = 200
"""Bytes of a greeting in a message."""

STAGES_OF_START = MappingProxyType(
    {
        "init_device": "preparing the device",
        "load_model": "loading the model",
        "cache_bytes": "measuring memory",
        "allocate_cache": "making the cache",
        "open_store": "reading the checkpoint, for the names of stored blocks",
        "add_lora": "reading an adapter",
    }
)
"""Method of a worker with the time limit of the start → the stage during the call."""


Meeting: TypeAlias = "tuple[str, int] | str"
"""The store through which ranks find each other: host and port, or a file for ranks of one host."""


@dataclass(frozen=True)
class WorkerJob:
    """The engine's first message to the process of a worker.

    Attributes:
        opgraft_config: resolved.
        layout: the layout of the ranks of the job.
        rank: the rank of the worker.
        local_rank: the number of the worker on its host, which chooses the device.
        local_size: the number of workers on the host.
        meeting: the store through which ranks find each other; ``None`` for a single rank.
        writes_json: the log is JSON.
        digest: ``engine_digest`` of the engine's process.
        places: the hosts and devices of all ranks of the job.
    """

    opgraft_config: OpgraftConfig
    layout: ParallelLayout
    rank: int
    local_rank: int
    local_size: int
    meeting: Meeting | None
    writes_json: bool
    digest: Mapping[str, str]
    places: RankPlaces


class WorkerLink(ABC):
    """The channels to the process of one worker, and the means to watch it.

    Args:
        rank: the rank of the worker.
        calls: the channel for calls of methods, one after the other.
        beside: the channel for grammars, at any time.
    """

    telling_seconds: ClassVar[float] = END_SECONDS
    """Seconds between the end of the channels and a known exit status of the process."""

    def __init__(self, rank: int, calls: Channel, beside: Channel) -> None:
        self.rank = rank
        self.calls = calls
        self.beside = beside

    def post(self, data: memoryview) -> None:
        """Send a call, from ``encoded``.

        Raises:
            TimeoutError: the process takes no more calls.
            OSError: the process has ended.
        """
        self.calls.send_encoded(data)

    def limit(self, seconds: float) -> None:
        """Set the limit after which sending and receiving raise ``TimeoutError``."""
        self.calls.limit(seconds)
        self.beside.limit(seconds)

    @abstractmethod
    def ended(self, patience: float = 0.0) -> str | None:
        """Describe the end of the process; ``None`` while the process runs.

        Args:
            patience: seconds to wait for the end.
        """

    def note_silence(self) -> None:  # noqa: B027  # optional
        """Note that the host of the process is silent, so that nobody waits for an exit status."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once."""

    def progress(self) -> Progress:
        """Return the known stage of the worker."""
        return Progress(0, "unknown")

    def told(self) -> str:
        """Return a text with the rank and the stage of the worker."""
        return f"rank {self.rank} ({printable(self.progress().stage)})"

    def stack(self) -> str:
        """Return the present stack of the worker; empty if the worker cannot be asked."""
        return ""

    def hang_up(self) -> None:
        """End the channels. Then the process ends, and no thread waits at a channel."""
        self.calls.hang_up()
        self.beside.hang_up()

    def close(self) -> None:
        """Release the resources of this process for the worker. Further calls do nothing."""
        self.calls.close()
        self.beside.close()


def greeting() -> bytes:
    """Return the first message of a worker, with its versions.

    The greeting is plain text, as objects in later messages can be read by the same versions only.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {
        "protocol": PROTOCOL,
        "opgraft": __version__,
        "python": python,
        "torch": torch.__version__,
    }
    return json.dumps(versions).encode()


def expect_greeting(found: bytes, rank: int) -> None:
    """Refuse a worker with other versions, which could not read the engine's messages.

    Args:
        found: the first message of the worker.
        rank: the rank of the worker.

    Raises:
        EngineError: the versions differ.
    """
    if found != greeting():
        versions = printable(found[:_MOST_SHOWN].decode(errors="replace"))
        raise EngineError(
            f"rank {rank} has {versions}, and the process of the engine {greeting().decode()}: "
            "they would not understand each other. Install the same versions on all hosts"
        )


def output_rank(layout: ParallelLayout) -> int:
    """Return the rank with the results of steps: the first rank of the last stage."""
    return (layout.pipeline - 1) * layout.tensor


def hanging(workers: Sequence[WorkerLink], number: int, seconds: float) -> str:
    """Return a sentence about a hang: the hanging ranks with their stages, and the waiting ranks.

    Args:
        workers: the workers of all ranks.
        number: the number of the call.
        seconds: the time limit of the call.
    """
    # Asked before the stack, as the signal for the stack may wake a worker.
    progress = {worker: worker.progress() for worker in workers}
    behind = [worker for worker in workers if progress[worker].finished <= number]
    waiting = [worker for worker in behind if waits_for_others(worker.stack())]
    stuck = [worker for worker in behind if worker not in waiting] or behind or workers
    names = ", ".join(
        f"rank {worker.rank} ({printable(progress[worker].stage)})" for worker in stuck
    )
    others = ", ".join(f"rank {worker.rank}" for worker in waiting if worker not in stuck)
    also = f", and {others} wait" if others else ""
    return (
        f"{names} did not come to the end of a call within {seconds:g} seconds{also}: all were "
        "ended. Raise parallel.step_seconds, or parallel.start_seconds, where this was no hang"
    )


def end_workers(workers: Sequence[WorkerLink], patience: float = END_SECONDS) -> None:
    """End the processes of workers, and release the resources of this process for them.

    Args:
        workers: the workers. Nobody may use them any more.
        patience: seconds before a process is killed.
    """
    with ExitStack() as undo:
        for worker in workers:
            undo.callback(worker.close)
            worker.hang_up()
        try:
            left = _running(workers, patience)
        # A second interrupt means that the user will not wait.
        except BaseException:
            left = list(workers)
            raise
        finally:
            for worker in left:
                worker.kill()
        for worker in _running(left, END_SECONDS):
            logger.warning("%s was killed, and its process has not ended yet", worker.told())


def _running(workers: Sequence[WorkerLink], seconds: float) -> list[WorkerLink]:
    """Wait for the ends of all workers, and return the workers that still run after the time."""
    deadline = time.monotonic() + seconds
    running = []
    for worker in workers:
        left = max(0.0, deadline - time.monotonic())
        if worker.ended(left) is None:
            running.append(worker)
    return running
