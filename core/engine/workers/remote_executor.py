"""``RemoteExecutor``: workers in other processes, reached by channels."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

from opgraft.base.text import described
from opgraft.config import OpgraftConfig, set_config
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.engine.step import Step, StepResult
from opgraft.engine.workers.engine_digest import engine_digest
from opgraft.engine.workers.executor import HUNG, Executor
from opgraft.engine.workers.portable_request import expect_portable
from opgraft.engine.workers.remote_workers import SHUT_DOWN, RemoteWorkers, Started
from opgraft.engine.workers.worker_link import (
    EXECUTE_PARTS,
    STAGES_OF_START,
    WorkerJob,
    WorkerLink,
    expect_greeting,
    hanging,
    output_rank,
)
from opgraft.logger import logger, writes_json
from opgraft.machine.channel import encoded, encoded_plain
from opgraft.plugins.host import load_plugins

_SETTLE_SECONDS = 2.5
"""Seconds that the other ranks have to come to the end of a call in which one has failed."""

Replies = dict[int, tuple[bool, Any]]
"""Rank → whether its call has succeeded, and its result or what it raised."""


class RemoteExecutor(Executor):
    """Workers in other processes, one for each rank.

    All ranks make every call. The result of a step comes from the output rank alone, that which is
    the first of the last stage; the others tell only what fails.

    It is asked by one thread. Grammars cross by second channels, from any thread: workers compile
    them beside their steps, which name them.

    Args:
        opgraft_config: resolved.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        parallel = opgraft_config.parallel
        self.layout = ParallelLayout(parallel.tensor, parallel.pipeline)
        self.output_rank = output_rank(self.layout)
        self.in_rounds = parallel.in_rounds and parallel.data_rank is not None
        self.workers = RemoteWorkers()
        self.workers.note(SHUT_DOWN)
        self._changing = threading.Lock()
        self._is_shut_down = False
        self._calls = 0
        self._steps: deque[int] = deque()
        self._slowest = 0.0
        self._awaited: dict[int, Replies] = {}

    @abstractmethod
    def _start_workers(self) -> Started:
        """Start the processes."""

    def start(self) -> None:
        """Start the processes, their workers, and the devices of those.

        Raises:
            EngineError: a process computes ops otherwise than this one would, or has other
                versions.
        """
        self._start(self.opgraft_config.parallel.restart_workers)

    def _start(self, restarts_left: int) -> None:
        load_plugins()
        started = self._start_workers()
        self._take(RemoteWorkers(started, self.opgraft_config.parallel.step_seconds, restarts_left))
        self._calls = 0
        self._steps.clear()
        self._awaited.clear()
        with set_config(self.opgraft_config, origin="the engine"):
            digest = engine_digest()
        self._expect_greetings()
        for rank, local in enumerate(started.local_ranks):
            told = (
                self.opgraft_config,
                *self._job_of(rank),
                *local,
                started.meeting,
                writes_json(),
                digest,
            )
            self.workers.begin(rank, encoded(WorkerJob(*told)))
        self.call_all("init_device")

    def _expect_greetings(self) -> None:
        """Wait until each worker has said which versions it has.

        Raises:
            EngineError: they are others, or one says nothing in time.
        """
        limit = self.opgraft_config.parallel.start_seconds
        silent, deadline = dict(enumerate(self.workers.links)), time.monotonic() + limit

        def greeted(link: WorkerLink) -> None:
            expect_greeting(link.calls.receive_bytes(), link.rank)
            del silent[link.rank]

        while silent:
            left = max(0.0, deadline - time.monotonic())
            if not self.workers.reply(left, greeted):
                raise self.workers.ended(hanging(list(silent.values()), 0, limit), at_once=True)

    def _take(self, workers: RemoteWorkers) -> None:
        """Have others be the workers.

        Raises:
            EngineError: the engine was shut down while they started.
        """
        with self._changing:
            if not self._is_shut_down:
                self.workers = workers
                workers.end_with(self)
                return
        raise workers.ended(SHUT_DOWN)

    def _job_of(self, rank: int) -> tuple[ParallelLayout, int]:
        """Return the layout of the job of a rank, and the rank there.

        The job is this replica, or all replicas together.
        """
        parallel = self.opgraft_config.parallel
        if not self.in_rounds or parallel.data_rank is None:
            return self.layout, rank
        whole = ParallelLayout(parallel.tensor, parallel.pipeline, parallel.data)
        return whole, parallel.data_rank * self.layout.world + rank

    def call(self, method: str, *args: Any) -> Any:
        """Return the result of a method on the output rank, once all ranks have made the call.

        Raises:
            EngineError: there is no worker: before the start, after the shutdown, or when a process
                has ended.
        """
        return self.call_all(method, *args)[self.output_rank]

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Return the results of a method of all workers, in the order of ranks, or raise an error of one.

        Raises:
            EngineError: there is no worker before the start, after the shutdown, or if a process
                has ended.
        """
        number = self._post(method, args)
        replies = self._awaited[number]
        limit = self._limit(method)
        deadline = time.monotonic() + limit

        def all_replied() -> bool:
            return len(replies) == self.layout.world

        in_time = self._wait(deadline, lambda: all_replied() or bool(_failures(replies)))
        if in_time and not all_replied():  # one has failed
            in_time = self._wait(min(deadline, time.monotonic() + _SETTLE_SECONDS), all_replied)
        if not in_time:
            self._out_of_step(number, replies, limit)
        del self._awaited[number]
        return self._results(replies)

    @property
    def depth(self) -> int:
        """The number of steps that are worth submitting ahead of results: one for each stage."""
        return self.layout.pipeline

    def submit(self, step: Step) -> None:
        """Let the workers compute a step after the steps that were submitted before.

        Raises:
            EngineError: there is no worker.
        """
        self.before_submit()
        self._steps.append(self._send(encoded_step(step, self._name_of)))

    def result(self) -> StepResult:
        """Return the result of the oldest submitted step without a result yet, or raise its error.

        If some ranks have failed and others are in the middle of the step, ranks would wait for
        each other for ever. Then all are ended.

        Raises:
            EngineError: a process has ended, or ranks were out of step.
        """
        number = self._steps.popleft()
        started = time.monotonic()
        replies = self._awaited.get(number, {})
        limit = self._limit("execute")
        if not self._wait(
            started + limit, lambda: self.output_rank in replies or bool(_failures(replies))
        ):
            self._out_of_step(number, replies, limit)
        self._slowest = max(self._slowest, time.monotonic() - started)
        if _failures(replies):
            self._settle(replies)
        del self._awaited[number]
        return cast(StepResult, self._results(replies, [self.output_rank])[0])

    def drop(self) -> None:
        """Forget the submitted steps, once the workers have computed all."""
        while self._steps:
            with suppress(Exception):  # which nobody asks for either
                self.result()

    def _post(self, method: str, args: Sequence[Any]) -> int:
        """Send a call that all workers answer, and return the number of the call."""
        return self._send(encoded((method, args, True)))

    def _send(self, data: memoryview) -> int:
        try:
            number = self._calls
            self._calls += 1
            self._awaited[number] = {}
            self.workers.post(number, data)
            return number
        except Exception:
            raise
        except BaseException:
            # Workers count calls, too, and a call may have reached some ranks only.
            self.workers.interrupted()
            raise

    def _limit(self, method: str) -> float:
        """Return the seconds of a call after which a rank counts as hanging."""
        parallel = self.opgraft_config.parallel
        return parallel.start_seconds if method in STAGES_OF_START else parallel.step_seconds

    def _wait(self, deadline: float, is_done: Callable[[], bool]) -> bool:
        """Take replies until a condition holds. Return False if the time is over before.

        Raises:
            EngineError: a process has ended.
        """
        while not is_done():
            if not self.workers.reply(max(0.0, deadline - time.monotonic()), self._take_reply):
                return False
        return True

    def _take_reply(self, link: WorkerLink) -> None:
        number, done, answer = link.calls.receive()
        if number in self._awaited:
            self._awaited[number][link.rank] = done, answer
        elif not done:
            raise self.workers.ended(
                f"rank {link.rank} has failed in a step that the others have completed: {described(answer)}"
            )

    def _results(self, replies: Replies, ranks: Sequence[int] = ()) -> list[Any]:
        """Return the results of ranks, of all if none are named, or raise the first failure."""
        for _, error in _failures(replies):
            raise error
        return [replies[rank][1] for rank in ranks or range(self.layout.world)]

    def _settle(self, failed: Replies) -> None:
        """Wait until every rank has ended its calls, after one has failed.

        Raises:
            EngineError: a rank did not end in time, so all were ended.
        """
        if self.in_rounds:
            raise self.workers.ended(self._left_behind(failed))
        if self.layout.world == 1:
            return
        number = self._post("synchronize", ())
        replies = self._awaited[number]
        behind = 2 * len(self._steps) * self._slowest  # steps that they compute before
        deadline = time.monotonic() + _SETTLE_SECONDS + behind
        if not self._wait(deadline, lambda: len(replies) == self.layout.world):
            raise self.workers.ended(self._left_behind(failed), at_once=True)
        del self._awaited[number]

    def _out_of_step(self, number: int, replies: Replies, limit: float) -> NoReturn:
        """End all workers. Raise the first failure, or an error that names the ranks that hang."""
        failed = _failures(replies)
        reason = (
            self._left_behind(replies) if failed else hanging(self.workers.links, number, limit)
        )
        error = self.workers.ended(reason, at_once=True)
        raise failed[0][1] if failed else error

    def _left_behind(self, replies: Replies) -> str:
        rank, error = _failures(replies)[0]
        return f"rank {rank} has failed ({described(error)}), and others would have waited for it: all were ended"

    def expect_servable(self, request: Request) -> None:
        """Refuse a request with logits processors, which are functions of this process, or what else cannot leave it.

        Raises:
            RequestError: it has some.
        """
        expect_portable(request)

    def share(self, grammar: Grammar) -> None:
        """Have the workers compile a grammar, unless they have; from any thread.

        Raises:
            InputError: it cannot be compiled there.
            EngineError: a process has ended.
        """
        workers = self.workers
        if workers.links:
            workers.grammars.share(grammar, workers.ask_beside)

    def _name_of(self, found: Any) -> int | None:
        """Share a grammar, and return its name; ``None`` for any other object."""
        if not isinstance(found, Grammar):
            return None
        self.share(found)
        return id(found)

    def check_health(self) -> None:
        """Raise if the workers are lost, and none start in their place; from any thread.

        Raises:
            EngineError: that is so.
        """
        workers = self.workers
        if workers.look() and not workers.can_restart:
            raise workers.error()

    def kill(self, reason: str = HUNG) -> None:
        """End the processes at once, whatever they do; from any thread."""
        workers = self.workers
        workers.note(reason)
        workers.kill()

    def shutdown(self) -> None:
        """End the processes of the workers, from any thread. Further calls do nothing."""
        with self._changing:
            self._is_shut_down = True
            self.workers.restarts_left = 0
        self.workers.end()

    @property
    def loss(self) -> str:
        """The reason why the workers are lost: one has ended, or all were ended. Empty before."""
        return self.workers.loss

    @property
    def can_restart(self) -> bool:
        """True if a worker is lost, and ``parallel.restart_workers`` allows another start."""
        return self.workers.can_restart

    def restart(self, prepare: Callable[[], None]) -> None:
        """Start workers in the place of those that are lost, as often as is allowed until that succeeds.

        Where it does not, the workers stay lost, and ``check_health`` and the next call say why.

        Args:
            prepare: has the new workers load the model.
        """
        self.ready_since = math.inf
        try:
            while self.can_restart:
                self._start_again(prepare)
        finally:
            self.ready_since = time.monotonic()

    def _start_again(self, prepare: Callable[[], None]) -> None:
        before, left = self.workers, self.workers.restarts_left - 1
        logger.warning("%s; the workers start again, and may %d times more", before.reason, left)
        before.end()
        try:
            self._start(left)
            prepare()
        except BaseException as error:
            if self.workers is before:
                self._take(RemoteWorkers(restarts_left=left))
            self.workers.end(f"the workers could not be started again: {described(error)}")
            if not isinstance(error, Exception):
                raise


def _failures(replies: Replies) -> list[tuple[int, Exception]]:
    return [(rank, answer) for rank, (done, answer) in sorted(replies.items()) if not done]


def encoded_step(step: Step, name_of: Callable[[Any], Any] | None = None) -> memoryview:
    """Return the call that computes a step, as channels send it. Only the output rank answers.

    Args:
        step: which is plain where it adds no sequence, as most do not.
        name_of: names the grammars of those that it adds.
    """
    if not step.added:
        return encoded_plain((EXECUTE_PARTS, step.parts(), False))
    has_grammars = any(new.grammar is not None for new in step.added)
    return encoded(("execute", (step,), False), name_of if has_grammars else None)
