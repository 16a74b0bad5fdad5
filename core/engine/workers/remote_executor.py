"""``RemoteExecutor``: calls workers in other processes through channels."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast

from opgraft.base.log import logger, writes_json
from opgraft.base.text import described
from opgraft.config import OpgraftConfig, set_config
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.engine.step import Step, StepResult
from opgraft.engine.workers.engine_digest import engine_digest
from opgraft.engine.workers.executor import HUNG, Executor
from opgraft.engine.workers.portable_request import expect_portable
from opgraft.engine.workers.rank_places import THIS_HOST, RankPlaces
from opgraft.engine.workers.remote_workers import SHUT_DOWN, RemoteWorkers, StartedWorkers
from opgraft.engine.workers.worker_link import (
    EXECUTE_PARTS,
    STAGES_OF_START,
    WorkerJob,
    WorkerLink,
    expect_greeting,
    hanging,
    output_rank,
)
from opgraft.machine.channel import encoded, encoded_plain
from opgraft.plugins.host import load_plugins

_SETTLE_SECONDS = 2.5
"""Seconds for the other ranks to end a call in which one rank has failed."""

Replies = dict[int, tuple[bool, Any]]
"""Rank → True and the result of the call, or False and the error."""


class RemoteExecutor(Executor):
    """Workers in other processes, one for each rank.

    All ranks make every call. The result of a step comes from the output rank alone, the first rank
    of the last stage. Other ranks reply to a step only if it fails.

    One thread makes calls. Any thread may send grammars, through second channels: workers compile
    grammars beside the steps, and steps name grammars.

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
        self._steps: deque[int] = deque()
        self._slowest = 0.0
        self._awaited: dict[int, Replies] = {}

    @abstractmethod
    def _start_workers(self) -> StartedWorkers:
        """Start the processes."""

    def start(self) -> None:
        """Start the processes, the workers, and the devices of the workers.

        Raises:
            EngineError: a process computes ops in another way than this process, or has other
                versions.
        """
        self._start(self.opgraft_config.parallel.restart_workers)

    def _start(self, restarts_left: int) -> None:
        load_plugins()
        started = self._start_workers()
        self._take(RemoteWorkers(started, self.opgraft_config.parallel.step_seconds, restarts_left))
        self._steps.clear()
        self._awaited.clear()
        with set_config(self.opgraft_config, origin="the engine"):
            digest = engine_digest()
        self._expect_greetings()
        for rank, (local_rank, local_size) in enumerate(started.local_ranks):
            layout, rank_of_job = self._job_of(rank)
            job = WorkerJob(
                self.opgraft_config,
                layout,
                rank_of_job,
                local_rank,
                local_size,
                started.meeting,
                writes_json(),
                digest,
                self._places(started, rank_of_job, layout.world),
            )
            self.workers.begin(rank, encoded(job))
        self.call_all("init_device")

    def _expect_greetings(self) -> None:
        """Wait for the greeting of each worker, with its versions.

        Raises:
            EngineError: a worker has other versions, or sends no greeting in time.
        """
        limit = self.opgraft_config.parallel.start_seconds
        deadline = time.monotonic() + limit
        silent = dict(enumerate(self.workers.links))

        def greeted(link: WorkerLink) -> None:
            expect_greeting(link.calls.receive_bytes(), link.rank)
            del silent[link.rank]

        while silent:
            left = max(0.0, deadline - time.monotonic())
            if not self.workers.reply(left, greeted):
                raise self.workers.ended(hanging(list(silent.values()), 0, limit), at_once=True)

    def _take(self, workers: RemoteWorkers) -> None:
        """Replace the workers.

        Raises:
            EngineError: the engine was shut down while the workers started.
        """
        with self._changing:
            if not self._is_shut_down:
                self.workers = workers
                workers.end_with(self)
                return
        raise workers.ended(SHUT_DOWN)

    def _job_of(self, rank: int) -> tuple[ParallelLayout, int]:
        """Return the layout of a rank's job, and the number of the rank in the job.

        The job is this replica, or all replicas if they compute in rounds.
        """
        parallel = self.opgraft_config.parallel
        if not self.in_rounds or parallel.data_rank is None:
            return self.layout, rank
        whole = ParallelLayout(parallel.tensor, parallel.pipeline, parallel.data)
        return whole, parallel.data_rank * self.layout.world + rank

    def _places(self, started: StartedWorkers, rank: int, size: int) -> RankPlaces:
        """Return the places of a job's ranks. Replicas that compute in rounds are on this host."""
        if size > len(started.local_ranks):
            return RankPlaces(rank, (THIS_HOST,) * size, tuple(range(size)))
        local_ranks = tuple(local_rank for local_rank, _ in started.local_ranks)
        hosts = started.hosts
        if not hosts:
            hosts = (THIS_HOST,) * size
        return RankPlaces(rank, hosts, local_ranks, started.devices)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of all workers, and return the result of the output rank.

        Raises:
            EngineError: there is no worker: before the start, after the shutdown, or if a process
                has ended.
        """
        return self.call_all(method, *args)[self.output_rank]

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers, and return the results in the order of ranks.

        The error of a worker is raised here.

        Raises:
            EngineError: there is no worker: before the start, after the shutdown, or if a process
                has ended.
        """
        number = self._post(method, args)
        replies = self._awaited[number]
        limit = self._limit(method)
        deadline = time.monotonic() + limit

        def all_replied() -> bool:
            return len(replies) == self.layout.world

        in_time = self._wait(deadline, lambda: all_replied() or bool(_failures(replies)))
        # A rank has failed, and others may wait for it for ever.
        if in_time and not all_replied():
            deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
            in_time = self._wait(deadline, all_replied)
        if not in_time:
            self._out_of_step(number, replies, limit)
        del self._awaited[number]
        return self._results(replies)

    @property
    def depth(self) -> int:
        """The number of steps to submit ahead of results: one for each stage."""
        return self.layout.pipeline

    def submit(self, step: Step) -> None:
        """Let the workers compute a step after all submitted steps.

        Raises:
            EngineError: there is no worker.
        """
        self.before_submit()
        self._steps.append(self._send(encoded_step(step, self._name_of)))

    def result(self) -> StepResult:
        """Return the result of the oldest submitted step without a result yet, or raise its error.

        If some ranks have failed and others are in the middle of the step, ranks would wait for
        each other for ever. All workers are ended in this case.

        Raises:
            EngineError: a process has ended, or ranks were out of step.
        """
        number = self._steps.popleft()
        started = time.monotonic()
        replies = self._awaited.get(number, {})
        limit = self._limit("execute")

        def is_decided() -> bool:
            return self.output_rank in replies or bool(_failures(replies))

        if not self._wait(started + limit, is_decided):
            self._out_of_step(number, replies, limit)
        self._slowest = max(self._slowest, time.monotonic() - started)
        if _failures(replies):
            self._settle(replies)
        del self._awaited[number]
        return cast(StepResult, self._results(replies, [self.output_rank])[0])

    def drop(self) -> None:
        """Wait until the workers have computed the submitted steps, and forget the results."""
        while self._steps:
            # Errors of these steps are forgotten, too.
            with suppress(Exception):
                self.result()

    def _post(self, method: str, args: Sequence[Any]) -> int:
        """Send a call with replies from all workers, and return the number of the call."""
        return self._send(encoded((method, args, True)))

    def _send(self, data: memoryview) -> int:
        number = self.workers.calls
        self._awaited[number] = {}
        self.workers.post(data)
        return number

    def _limit(self, method: str) -> float:
        """Return the time limit of a call in seconds. A rank that takes longer hangs."""
        parallel = self.opgraft_config.parallel
        return parallel.start_seconds if method in STAGES_OF_START else parallel.step_seconds

    def _wait(self, deadline: float, is_done: Callable[[], bool]) -> bool:
        """Take replies until a condition holds. The result is False if the time runs out first.

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
            self._awaited[number][link.rank] = (done, answer)
        elif not done:
            raise self.workers.ended(
                f"rank {link.rank} has failed in a step that the others have completed: "
                f"{described(answer)}"
            )

    def _results(self, replies: Replies, ranks: Sequence[int] = ()) -> list[Any]:
        """Return the results of some ranks, by default of all ranks, or raise the first failure."""
        for _, error in _failures(replies):
            raise error
        return [replies[rank][1] for rank in ranks or range(self.layout.world)]

    def _settle(self, failed: Replies) -> None:
        """Wait until every rank has ended its calls, after a failure.

        Raises:
            EngineError: a rank did not end in time, and all workers were ended.
        """
        if self.in_rounds:
            raise self.workers.ended(self._left_behind(failed))
        if self.layout.world == 1:
            return
        number = self._post("synchronize", ())
        replies = self._awaited[number]
        # The ranks compute the submitted steps first.
        seconds_before = 2 * len(self._steps) * self._slowest
        deadline = time.monotonic() + _SETTLE_SECONDS + seconds_before
        if not self._wait(deadline, lambda: len(replies) == self.layout.world):
            raise self.workers.ended(self._left_behind(failed), at_once=True)
        del self._awaited[number]

    def _out_of_step(self, number: int, replies: Replies, limit: float) -> NoReturn:
        """End all workers. Raise the first failure, or an error with the ranks that hang."""
        failed = _failures(replies)
        if not failed:
            raise self.workers.ended(hanging(self.workers.links, number, limit), at_once=True)
        self.workers.ended(self._left_behind(replies), at_once=True)
        _, failure = failed[0]
        raise failure

    def _left_behind(self, replies: Replies) -> str:
        rank, error = _failures(replies)[0]
        return (
            f"rank {rank} has failed ({described(error)}), and others would have waited for it: "
            "all were ended"
        )

    def expect_servable(self, request: Request) -> None:
        """Refuse a request with objects that cannot be sent, such as logits processors.

        Raises:
            RequestError: the request has such an object.
        """
        expect_portable(request)

    def share(self, grammar: Grammar) -> None:
        """Let the workers compile a grammar, unless they have. Any thread may call this.

        Raises:
            InputError: a worker cannot compile the grammar.
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
        """Raise if the workers are lost and cannot start again. Any thread may call this.

        Raises:
            EngineError: the workers are lost.
        """
        workers = self.workers
        if workers.look() and not workers.can_restart:
            raise workers.error()

    def kill(self, reason: str = HUNG) -> None:
        """End the processes at once. Any thread may call this."""
        workers = self.workers
        workers.note(reason)
        workers.kill()

    def shutdown(self) -> None:
        """End the processes. Any thread may call this. Further calls do nothing."""
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
        """Start new workers after a loss. A failed start is repeated as often as is allowed.

        If no start succeeds, the workers stay lost. ``check_health`` and the next call raise the
        reason.

        Args:
            prepare: lets the new workers load the model.
        """
        self.ready_since = math.inf
        try:
            while self.can_restart:
                self._start_again(prepare)
        finally:
            self.ready_since = time.monotonic()

    def _start_again(self, prepare: Callable[[], None]) -> None:
        before = self.workers
        left = before.restarts_left - 1
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
    """Return the message of a call that computes a step. Only the output rank answers.

    Args:
        step: the step.
        name_of: returns the name of a grammar of a new sequence.
    """
    # Most steps add no sequence, and plain parts are encoded faster.
    if not step.added:
        return encoded_plain((EXECUTE_PARTS, step.parts(), False))
    has_grammars = any(new.grammar is not None for new in step.added)
    return encoded(("execute", (step,), False), name_of if has_grammars else None)
