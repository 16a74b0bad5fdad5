"""``RemoteExecutor``: workers in other processes, reached by channels."""

from __future__ import annotations

import select
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, cast

from opgraft.config import OpgraftConfig, set_config
from opgraft.distributed.layout import ParallelLayout
from opgraft.engine.engine_digest import engine_digest
from opgraft.engine.executor import Executor
from opgraft.engine.grammar_sharing import GrammarSharing
from opgraft.engine.portable_request import expect_portable
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar
from opgraft.engine.step import Step, StepResult
from opgraft.engine.worker_link import END_SECONDS, WorkerJob, WorkerLink, end_workers, hanging, output_rank
from opgraft.errors import EngineError
from opgraft.logger import logger, writes_json
from opgraft.machine.broadcast import BY_CHANNEL
from opgraft.machine.channel import encoded
from opgraft.plugins.host import load_plugins
from opgraft.text import described

_SETTLE_SECONDS = 2.5
"""Seconds that the other ranks have to come to the end of a call in which one has failed."""

_SHUT_DOWN = "the engine was shut down"

_OF_THE_START = ("init_device", "load_model", "cache_bytes", "allocate_cache")
"""Calls with the time limit of the start."""

Replies = dict[int, tuple[bool, Any]]
"""Rank → whether its call has succeeded, and its result or what it raised."""


class RemoteExecutor(Executor):
    """Workers in other processes, one for each rank.

    All ranks make every call. The result of a step comes from the output rank alone, that which is the first of the
    last stage; the others tell only what fails.

    It is asked by one thread. Grammars cross by second channels, from any thread: workers compile them beside their
    steps, which name them.

    Args:
        opgraft_config: resolved.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        super().__init__(opgraft_config)
        parallel = opgraft_config.parallel
        self.layout = ParallelLayout(parallel.tensor, parallel.pipeline)
        self.output_rank = output_rank(self.layout)
        self.in_rounds = parallel.in_rounds and parallel.data_rank is not None
        self._workers: list[WorkerLink] = []
        self._meeting: tuple[str, int] | None = None
        self._release: Callable[[], None] = lambda: None
        self._ended = ""
        self._calls = 0
        self._steps: deque[int] = deque()
        self._slowest = 0.0
        self._awaited: dict[int, Replies] = {}
        self._grammars = GrammarSharing()
        self._restarts_left = parallel.restart_workers

    @abstractmethod
    def _start_workers(self) -> list[WorkerLink]:
        """Start the processes, in the order of ranks; where there are several, ``_meeting`` is set afterwards.

        ``_release`` may be set to what is called once they have ended; it does not hold this executor.
        """

    def _shared_by_all(self, number: int, data: memoryview) -> bytes:
        """Write a call to memory that all workers share, and return its token; where there is none, each is sent it."""
        return BY_CHANNEL

    @abstractmethod
    def _local_ranks(self) -> list[tuple[int, int]]:
        """Return the local rank of each worker, and the number of workers of its host."""

    def start(self) -> None:
        """Start the processes, their workers, and the devices of those.

        Raises:
            EngineError: a process computes ops otherwise than this one would, or has other versions.
        """
        load_plugins()
        self._workers = self._start_workers()
        # Nothing that it holds may hold this executor, which would then live as long as the interpreter.
        self._end = weakref.finalize(self, end_workers, tuple(self._workers), self._release)
        with set_config(self.opgraft_config, origin="the engine"):
            digest = engine_digest()
        for worker, local in zip(self._workers, self._local_ranks(), strict=True):
            told = self.opgraft_config, *self._job_of(worker), *local, self._meeting, writes_json(), digest
            worker.post(encoded(WorkerJob(*told)))
        self._poll = select.poll()
        for worker in self._workers:
            self._poll.register(worker.calls.fileno(), select.POLLIN)
        self._by_file = {worker.calls.fileno(): worker for worker in self._workers}
        self.call_all("init_device")

    def _job_of(self, worker: WorkerLink) -> tuple[ParallelLayout, int]:
        """Return the layout of the job that a worker is in, and its rank there: of this replica, or of all together."""
        parallel = self.opgraft_config.parallel
        if not self.in_rounds or parallel.data_rank is None:
            return self.layout, worker.rank
        whole = ParallelLayout(parallel.tensor, parallel.pipeline, parallel.data)
        return whole, parallel.data_rank * self.layout.world + worker.rank

    def call(self, method: str, *args: Any) -> Any:
        """Return what a method of the worker of the output rank returns, once all have made the call.

        Raises:
            EngineError: there is no worker: before the start, after the shutdown, or when a process has ended.
        """
        return self.call_all(method, *args)[self.output_rank]

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Return what a method of each worker returns, in the order of ranks, or raise what one raises.

        Raises:
            EngineError: there is no worker: before the start, after the shutdown, or when a process has ended.
        """
        with self._not_interrupted():
            number = self._post(method, args, everyone=True)
            replies, limit = self._awaited[number], self._limit(method)
            while len(replies) < len(self._workers):
                if not self._take_reply(_SETTLE_SECONDS if _failures(replies) else limit):
                    self._out_of_step(number, replies, limit)
            del self._awaited[number]
            return self._results(replies)

    @property
    def depth(self) -> int:
        """The number of steps that are worth submitting before the result of the first is asked for: one a stage."""
        return self.layout.pipeline

    def submit(self, step: Step) -> None:
        """Have the workers compute a step, behind those that were submitted before.

        Raises:
            EngineError: there is no worker.
        """
        self.before_submit()
        with self._not_interrupted():
            name_of = self._name_of if any(new.grammar is not None for new in step.added) else None
            self._steps.append(self._post("execute", (step,), everyone=False, name_of=name_of))

    def result(self) -> StepResult:
        """Return the result of the oldest step that was submitted and not asked for yet, or raise what failed in it.

        Where some ranks have failed and the others are in the middle of it, they would wait for each other for ever:
        then all are ended.

        Raises:
            EngineError: a process has ended, or ranks were out of step.
        """
        with self._not_interrupted():
            number, started = self._steps.popleft(), time.monotonic()
            replies, limit = self._awaited.get(number, {}), self._limit("execute")
            while self.output_rank not in replies and not _failures(replies):
                if not self._take_reply(limit):
                    self._out_of_step(number, replies, limit)
            self._slowest = max(self._slowest, time.monotonic() - started)
            if _failures(replies):
                self._settle(replies)
            del self._awaited[number]
            return cast(StepResult, self._results(replies, [self.output_rank])[0])

    def drop(self) -> None:
        """Forget the steps whose results were not asked for, once the workers have computed them."""
        while self._steps:
            with suppress(Exception):  # which nobody asks for either
                self.result()

    def _post(
        self, method: str, args: Sequence[Any], *, everyone: bool, name_of: Callable[[Any], Any] | None = None
    ) -> int:
        """Send a call to all workers and return its number. Others than the output rank answer only where told to."""
        if self._ended:
            raise self._again()
        if not self._workers:
            raise EngineError("the engine was shut down, or not started, and has no worker: make a new one")
        data = encoded((method, args, everyone), name_of)
        number = self._calls
        self._calls += 1
        self._awaited[number] = {}
        token = self._shared_by_all(number, data)
        for worker in self._workers:
            try:
                worker.post(data, token)
            except OSError as error:
                raise self._lost(worker) from error
        return number

    def _limit(self, method: str) -> float:
        """Return the seconds after which ranks that have not come to the end of a call are taken to hang."""
        parallel = self.opgraft_config.parallel
        return parallel.start_seconds if method in _OF_THE_START else parallel.step_seconds

    def _take_reply(self, seconds: float) -> bool:
        """Wait for a reply and note it; false where none has come in time.

        Raises:
            EngineError: a process has ended.
        """
        if self._ended:
            raise self._again()
        worker = self._replying(seconds)
        if worker is None:
            return False
        try:
            number, done, answer = worker.calls.receive()
        except (EOFError, OSError) as error:
            raise self._lost(worker) from error
        if number in self._awaited:
            self._awaited[number][worker.rank] = done, answer
        elif not done:
            self._finish(f"rank {worker.rank} has failed in a step that the others have completed: {described(answer)}")
            raise self._again()
        return True

    def _replying(self, seconds: float) -> WorkerLink | None:
        for worker in self._workers:
            if worker.calls.holds_message:
                return worker
        found = self._poll.poll(seconds * 1000)
        return self._by_file[found[0][0]] if found else None

    def _results(self, replies: Replies, ranks: Sequence[int] = ()) -> list[Any]:
        """Return the results of ranks, of all if none are named, or raise the first failure."""
        for _, error in _failures(replies):
            raise error
        return [replies[rank][1] for rank in ranks or range(len(self._workers))]

    def _settle(self, failed: Replies) -> None:
        """Wait until every rank has come to the end of what it was asked for, one of which has failed.

        Raises:
            EngineError: one has not, so all were ended.
        """
        if self.in_rounds:
            self._finish(self._left_behind(failed))
            raise self._again()
        if len(self._workers) == 1:
            return
        number = self._post("synchronize", (), everyone=True)
        behind = 2 * len(self._steps) * self._slowest  # steps that they compute before
        replies, deadline = self._awaited[number], time.monotonic() + _SETTLE_SECONDS + behind
        while len(replies) < len(self._workers):
            if not self._take_reply(max(0.0, deadline - time.monotonic())):
                self._finish(self._left_behind(failed), at_once=True)
                raise self._again()
        del self._awaited[number]

    def _out_of_step(self, number: int, replies: Replies, limit: float) -> NoReturn:
        """End all and raise the first failure, or that ranks hang; those that have failed are waited for in vain."""
        failed = _failures(replies)
        self._finish(self._left_behind(replies) if failed else hanging(self._workers, number, limit), at_once=True)
        raise failed[0][1] if failed else self._again()

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
        if self._workers:
            with self._not_interrupted():
                self._grammars.share(grammar, self._ask_beside)

    def _ask_beside(self, data: memoryview) -> None:
        """Send a message by the second channel of each worker, and raise what one of them raises."""
        if self._ended:
            raise self._again()
        replies: Replies = {}
        for function in (
            lambda worker: worker.beside.send_encoded(data),
            lambda worker: replies.update({worker.rank: worker.beside.receive()[1:]}),
        ):
            self._with_each(function)
        self._results(replies)

    def _with_each(self, function: Callable[[WorkerLink], None]) -> None:
        for worker in self._workers:
            try:
                function(worker)
            except (EOFError, OSError) as error:
                raise self._lost(worker) from error

    def _name_of(self, found: Any) -> int | None:
        """Return the name of a grammar, which the workers know from then on; of all else there is none."""
        if not isinstance(found, Grammar):
            return None
        self.share(found)
        return id(found)

    @contextmanager
    def _not_interrupted(self) -> Iterator[None]:
        """End the processes on an interrupt, after which nobody knows how much of a message has come."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._finish("an interrupt came while the process of the worker was asked, which was ended")
            raise

    def check_health(self) -> None:
        """Raise where a process has ended; from any thread.

        Raises:
            EngineError: one has.
        """
        for worker in self._workers:
            if (self._ended or worker.ended()) and not self.can_restart:
                raise self._lost(worker)

    def _lost(self, worker: WorkerLink) -> EngineError:
        """Return the error that says why there is no worker any more, which is the first reason that there was."""
        if not self._ended:
            dead = next((each for each in self._workers if each.ended()), worker)
            how = dead.ended(END_SECONDS) or "as far as its channels tell"
            whose = f"rank {dead.rank}" if len(self._workers) > 1 else "the worker"
            stage = dead.progress().stage
            self._finish(f"the process of {whose} has ended, {how}; last stage: {stage}. stderr may say why")
        return self._again()

    def _again(self) -> EngineError:
        advice = "workers start again with the next request" if self.can_restart else "make a new engine"
        return EngineError(f"{self._ended}; {advice}")

    def kill(self) -> None:
        """End the processes at once, whatever they do; from any thread."""
        for worker in self._workers:
            worker.kill()

    def shutdown(self) -> None:
        """End the processes, and with them their workers. Further calls do nothing."""
        if self._workers:
            self._finish(_SHUT_DOWN)

    def _finish(self, reason: str, *, at_once: bool = False) -> None:
        self._ended = self._ended or reason
        if at_once:
            self.kill()
        self._end()

    @property
    def is_lost(self) -> bool:
        """Tell whether a worker has ended, or all were ended as one hung."""
        return self._ended not in ("", _SHUT_DOWN) or (not self._ended and any(each.ended() for each in self._workers))

    @property
    def can_restart(self) -> bool:
        """Tell whether a worker is lost, and ``parallel.restart_workers`` allows to start it again."""
        return self._restarts_left > 0 and self.is_lost

    def restart(self) -> None:
        """Start workers in the place of those that are lost, without a model.

        Raises:
            EngineError: they cannot be started.
        """
        self._restarts_left -= 1
        self._lost(self._workers[0])  # or whichever has ended
        logger.warning("%s; the workers start again, and may %d times more", self._ended, self._restarts_left)
        self._workers, self._ended, self._calls = [], "", 0
        self._steps.clear()
        self._awaited.clear()
        self._grammars = GrammarSharing()
        self.start()


def _failures(replies: Replies) -> list[tuple[int, Exception]]:
    return [(rank, answer) for rank, (done, answer) in sorted(replies.items()) if not done]
