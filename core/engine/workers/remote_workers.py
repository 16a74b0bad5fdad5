"""``RemoteWorkers``: the workers of one start, until they end, with the reason of their end."""

from __future__ import annotations

import errno
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from opgraft.base.text import printable
from opgraft.engine.workers.grammar_sharing import GrammarSharing
from opgraft.engine.workers.started_process import END_SECONDS
from opgraft.engine.workers.worker_link import (
    Meeting,
    WorkerLink,
    end_workers,
    hanging,
)
from opgraft.errors import EngineError

_LOOK_SECONDS = 1.0
"""Seconds between two looks at processes that do not reply."""

SHUT_DOWN = "the engine was shut down, or not started, and has no worker"

_INTERRUPTED = (
    "an interrupt came while the process of the worker was asked, which was ended: half a message "
    "may be on its way"
)


def _nothing() -> None:
    """Do nothing."""


class StartedWorkers(NamedTuple):
    """The started processes of workers.

    No attribute may hold the executor, or the executor would never be dropped.

    Attributes:
        links: the links to the workers, in the order of ranks.
        local_ranks: for each rank, the local rank and the number of workers on its host.
        meeting: the store through which ranks find each other; ``None`` for a single rank.
        release: releases shared resources after the end of all workers.
        hosts: the address of each rank's host; empty if all are on this host.
        devices: the device of each rank on its host; empty as in ``RankPlaces``.
    """

    links: Sequence[WorkerLink] = ()
    local_ranks: Sequence[tuple[int, int]] = ()
    meeting: Meeting | None = None
    release: Callable[[], None] = _nothing
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


_NONE = StartedWorkers()


class RemoteWorkers:
    """The workers of one start.

    A restart makes another object, so that a thread with this object reaches no new worker. One
    thread makes calls. Any thread may look, send grammars, kill and end.

    Args:
        started: the processes.
        seconds: the time limit of a message, and of the compilation of a grammar.
        restarts_left: the number of restarts that are still allowed.

    Attributes:
        links: the links to the workers, in the order of ranks.
        reason: the first reason for the end of the workers; empty while they run.
        calls: the number of calls so far, and the number of the next call.
        grammars: the grammars that the workers have compiled.
    """

    def __init__(
        self, started: StartedWorkers = _NONE, seconds: float = 0.0, restarts_left: int = 0
    ) -> None:
        self.links = tuple(started.links)
        self._started = started
        self.reason = ""
        self.calls = 0
        self.restarts_left = restarts_left
        self.grammars = GrammarSharing()
        self._seconds = seconds
        self._noting = threading.Lock()
        # Channels are closed under this lock, so that no call uses the file of another object.
        self._calling = threading.RLock()
        self._is_over = False
        self._poll = select.poll()
        for link in self.links:
            link.limit(seconds)
            self._poll.register(link.calls.fileno(), select.POLLIN)
        self._by_file = {link.calls.fileno(): link for link in self.links}
        self._disown: Callable[[], object] = _nothing

    def end_with(self, owner: object) -> None:
        """End the workers when the owner is dropped, or the interpreter ends."""
        self._disown = weakref.finalize(owner, self.end).detach

    def look(self) -> str:
        """Look for a process that has ended. Any thread may call this.

        Returns:
            The reason why the workers are lost; empty while they run.
        """
        if not self.reason:
            for link in self.links:
                if link.ended():
                    self._note_end(link)
                    break
        return self.reason

    @property
    def loss(self) -> str:
        """The reason why the workers are lost; empty before, and after a shutdown."""
        reason = self.look()
        return "" if reason == SHUT_DOWN else reason

    @property
    def can_restart(self) -> bool:
        """True if the workers are lost and new workers may start."""
        return self.restarts_left > 0 and self.loss != ""

    def error(self) -> EngineError:
        """Make an error with the reason for the end of the workers."""
        advice = "start the engine or server anew"
        if self.can_restart:
            advice = "workers start again with the next request"
        return EngineError(f"{self.reason}; {advice}")

    def note(self, reason: str) -> None:
        """Note the reason for the end of the workers. Only the first reason counts."""
        with self._noting:
            self.reason = self.reason or reason

    def _note_end(self, link: WorkerLink) -> None:
        """Note that the process of a worker has ended.

        Args:
            link: the worker with closed channels. If another process has ended, that process was
                probably the first.
        """
        dead = next((each for each in self.links if each.ended()), link)
        how = dead.ended(dead.telling_seconds) or "as far as its channels tell"
        name = f"rank {dead.rank}" if len(self.links) > 1 else "the worker"
        stage = printable(dead.progress().stage)
        self.note(
            f"the process of {name} has ended, {how}; last stage: {stage}. What it wrote to stderr "
            "may say why"
        )

    def post(self, data: memoryview) -> None:
        """Send a call, from ``encoded``, to all workers.

        Raises:
            EngineError: the workers are lost, or a worker takes no calls.
        """
        with self._calling:
            self._expect_going()
            # Workers count calls, too, and an interrupted call may have reached some workers only.
            with self._message():
                for link in self.links:
                    self._send(link, self.calls, data)
                self.calls += 1

    @contextmanager
    def _message(self) -> Iterator[None]:
        """Return a scope for a message to or from a worker.

        An interrupt in the scope ends the processes, because half a message may be on its way.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.end(_INTERRUPTED)
            raise

    def begin(self, rank: int, job: memoryview) -> None:
        """Send the job of a rank.

        Raises:
            EngineError: the workers are lost.
        """
        with self._calling:
            self._expect_going()
            self._send(self.links[rank], 0, job)

    def _send(self, link: WorkerLink, number: int, data: memoryview) -> None:
        try:
            link.post(data)
        except TimeoutError:
            raise self.ended(hanging(self.links, number - 1, self._seconds), at_once=True) from None
        except OSError as error:
            raise self._ended_by(link, error) from error

    def reply(self, seconds: float, take: Callable[[WorkerLink], object]) -> bool:
        """Wait for a reply, and take the reply in. The result is False if none comes in time.

        Args:
            seconds: the time to wait.
            take: takes the reply from the link of a worker.

        Raises:
            EngineError: the workers are lost.
        """
        with self._calling:
            self._expect_going()
            link = self._replying(seconds)
            if link is None:
                return False
            try:
                with self._message():
                    take(link)
                return True
            except TimeoutError:
                reason = (
                    f"{link.told()} did not come to the end of its reply within "
                    f"{self._seconds:g} seconds: all were ended"
                )
                raise self.ended(reason, at_once=True) from None
            except (EOFError, OSError) as error:
                raise self._ended_by(link, error) from error

    def _replying(self, seconds: float) -> WorkerLink | None:
        for link in self.links:
            if link.calls.holds_message:
                return link
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            found = self._poll.poll(min(left, _LOOK_SECONDS) * 1000)
            if found:
                return self._by_file[found[0][0]]
            # The sockets of a process that has ended are open if a child has them.
            if self.look():
                raise self._lost()
            if left <= _LOOK_SECONDS:
                return None

    def _expect_going(self) -> None:
        if self.reason:
            raise self.ended(self.reason)

    def _ended_by(self, link: WorkerLink, error: Exception) -> EngineError:
        self._note_failure(link, error)
        return self._lost()

    def _note_failure(self, link: WorkerLink, error: Exception) -> None:
        """Note that a channel of a worker was closed, or that the host of the worker is silent."""
        if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
            link.note_silence()
        if not self.reason:
            self._note_end(link)

    def _lost(self) -> EngineError:
        """End the other workers: gently for a shutdown, else at once, because requests wait."""
        return self.ended(self.reason, at_once=self.reason != SHUT_DOWN)

    def ask_beside(self, data: memoryview) -> None:
        """Send a message through the second channel of each worker. Raise the error of a worker.

        Any thread may call this. An interrupt of the main thread ends the processes, as part of a
        message may have been sent.

        Raises:
            EngineError: the workers are lost, or one does not answer.
        """
        with self._message():
            for link in self.links:
                self._beside(link, partial(link.beside.send_encoded, data))
            answers = [self._beside(link, link.beside.receive) for link in self.links]
        for _, done, answer in answers:
            if not done:
                raise answer

    def _beside(self, link: WorkerLink, function: Callable[[], Any]) -> Any:
        if self.reason:
            raise self.error()
        try:
            return function()
        except TimeoutError:
            self.note(
                f"{link.told()} did not compile a grammar within {self._seconds:g} seconds: all "
                "were ended. Raise parallel.step_seconds where this was no hang"
            )
        except (EOFError, OSError) as error:
            self._note_failure(link, error)
        # The thread that makes calls notices the end, and releases the workers.
        self.kill()
        raise self.error()

    def kill(self) -> None:
        """End the processes at once. Any thread may call this."""
        for link in self.links:
            link.kill()

    def ended(self, reason: str, *, at_once: bool = False) -> EngineError:
        """End the workers, and return an error with the reason."""
        self.end(reason, patience=0.0 if at_once else END_SECONDS)
        return self.error()

    def end(self, reason: str = SHUT_DOWN, patience: float = END_SECONDS) -> None:
        """End the processes, once. Any thread may call this. A waiting thread raises the reason.

        Args:
            reason: the reason, unless there was one before.
            patience: seconds for the processes to end by themselves.
        """
        self.note(reason)
        for link in self.links:
            link.hang_up()
        with self._calling, ExitStack() as undo:
            if not self._is_over:
                self._is_over = True
                self._disown()
                undo.callback(self._started.release)
                end_workers(self.links, patience)
