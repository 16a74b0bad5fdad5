"""``RemoteWorkers``: the workers of one start, from then until they are ended, and why they are."""

from __future__ import annotations

import errno
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from opgraft.base.text import printable
from opgraft.engine.workers.grammar_sharing import GrammarSharing
from opgraft.engine.workers.worker_link import (
    END_SECONDS,
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


class Started(NamedTuple):
    """Processes that were started for workers.

    Nothing in it may hold the executor: the executor would never be dropped.

    Attributes:
        links: to the workers, in the order of ranks.
        local_ranks: the local rank of each, and the number of workers of its host.
        meeting: where they find each other, as long as they run; ``None`` for one that is alone.
        release: gives back the shared resources, once all have ended.
    """

    links: Sequence[WorkerLink] = ()
    local_ranks: Sequence[tuple[int, int]] = ()
    meeting: Meeting | None = None
    release: Callable[[], None] = _nothing


_NONE = Started()


class RemoteWorkers:
    """The workers of one start, who run until there is a reason why they do not.

    Others that start in their place are another object: a thread that still has this one reaches
    none of them. One thread calls; any may look, ask beside, kill and end.

    Args:
        started: their processes.
        seconds: that a message, and the compilation of a grammar, may take.
        restarts_left: how often others may start in their place.

    Attributes:
        links: to the workers, in the order of ranks.
        reason: why they are there no more, the first that there was; empty while they are.
        grammars: those that they know.
    """

    def __init__(
        self, started: Started = _NONE, seconds: float = 0.0, restarts_left: int = 0
    ) -> None:
        self.links, self._started = tuple(started.links), started
        self.reason = ""
        self.restarts_left = restarts_left
        self.grammars = GrammarSharing()
        self._seconds = seconds
        self._noting = threading.Lock()
        self._calling = threading.RLock()  # while it is held, the files of the channels are theirs
        self._is_over = False
        self._poll = select.poll()
        for link in self.links:
            link.limit(seconds)
            self._poll.register(link.calls.fileno(), select.POLLIN)
        self._by_file = {link.calls.fileno(): link for link in self.links}
        self._disown: Callable[[], object] = _nothing

    def end_with(self, owner: object) -> None:
        """Have them end when nobody has their owner any more, or the interpreter ends."""
        self._disown = weakref.finalize(owner, self.end).detach

    def look(self) -> str:
        """Return the reason why the workers are lost, from any thread. Note a process that has ended."""
        if not self.reason:
            dead = next((link for link in self.links if link.ended()), None)
            if dead is not None:
                self._note_end(dead)
        return self.reason

    @property
    def loss(self) -> str:
        """The reason why the workers are lost; empty before, and after a shutdown."""
        reason = self.look()
        return "" if reason == SHUT_DOWN else reason

    @property
    def can_restart(self) -> bool:
        """Tell whether they are lost, and others may start in their place."""
        return self.restarts_left > 0 and self.loss != ""

    def error(self) -> EngineError:
        """Return the error that says why they are there no more."""
        advice = (
            "workers start again with the next request"
            if self.can_restart
            else "start the engine or server anew"
        )
        return EngineError(f"{self.reason}; {advice}")

    def note(self, reason: str) -> None:
        """Note why they are there no more, unless there is a reason already."""
        with self._noting:
            self.reason = self.reason or reason

    def _note_end(self, link: WorkerLink) -> None:
        """Note that the process of a worker has ended, or of another worker that ended before."""
        dead = next((each for each in self.links if each.ended()), link)
        how = dead.ended(dead.telling_seconds) or "as far as its channels tell"
        whose = f"rank {dead.rank}" if len(self.links) > 1 else "the worker"
        stage = printable(dead.progress().stage)
        self.note(
            f"the process of {whose} has ended, {how}; last stage: {stage}. What it wrote to stderr may say why"
        )

    def post(self, number: int, data: memoryview) -> None:
        """Send all workers a call that ``encoded`` returned.

        Raises:
            EngineError: the workers are lost, or one does not take calls.
        """
        with self._calling:
            self._expect_going()
            for link in self.links:
                self._send(link, number, data)

    def interrupted(self) -> None:
        """End the processes after an interrupt in the middle of a message to or from a worker."""
        self.end(_INTERRUPTED)

    def begin(self, rank: int, job: memoryview) -> None:
        """Send a rank its job.

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
        """Wait for a reply, and take the reply in. Return False if none comes in time.

        Args:
            seconds: to wait.
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
                take(link)
                return True
            except TimeoutError:
                reason = f"{link.told()} did not come to the end of its reply within {self._seconds:g} seconds"
                raise self.ended(f"{reason}: all were ended", at_once=True) from None
            except (EOFError, OSError) as error:
                raise self._ended_by(link, error) from error
            except Exception:
                raise
            except BaseException:
                self.interrupted()
                raise

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
            if self.look():  # a child of the process may still have its sockets
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
        """Note that a channel of a worker has come to its end, or that its host is silent."""
        if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
            link.note_silence()
        if not self.reason:
            self._note_end(link)

    def _lost(self) -> EngineError:
        """End the workers that are left: at once, because requests wait; gently for a shutdown."""
        return self.ended(self.reason, at_once=self.reason != SHUT_DOWN)

    def ask_beside(self, data: memoryview) -> None:
        """Send a message by the second channel of each worker, and raise the error of a worker.

        Any thread may ask. An interrupt of the main thread ends the processes: nobody knows then
        how much of a message has come.

        Raises:
            EngineError: the workers are lost, or one does not answer.
        """
        try:
            for link in self.links:
                self._beside(link, partial(link.beside.send_encoded, data))
            answers = [self._beside(link, link.beside.receive) for link in self.links]
        except Exception:
            raise
        except BaseException:
            self.interrupted()
            raise
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
                f"{link.told()} did not compile a grammar within {self._seconds:g} seconds: all were ended. "
                "Raise parallel.step_seconds where this was no hang"
            )
        except (EOFError, OSError) as error:
            self._note_failure(link, error)
        self.kill()  # on which the thread that calls ends them
        raise self.error()

    def kill(self) -> None:
        """End the processes at once, whatever they do; from any thread."""
        for link in self.links:
            link.kill()

    def ended(self, reason: str, *, at_once: bool = False) -> EngineError:
        """End them, and return the error that says why."""
        self.end(reason, patience=0.0 if at_once else END_SECONDS)
        return self.error()

    def end(self, reason: str = SHUT_DOWN, patience: float = END_SECONDS) -> None:
        """End the processes, once, from any thread; one that waits for them is told so.

        Args:
            reason: why, unless there is a reason already.
            patience: seconds that they have to end by themselves.
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
