"""``Replicas``: engines that share the requests of a front end, each in a thread with workers of its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

from opgraft.base.text import described
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed.groups import parallelism
from opgraft.engine.executor import Executor
from opgraft.engine.process_executor import meeting_file
from opgraft.engine.rounds import Rounds, expect_rounds
from opgraft.engine.stats import EngineStats, summed
from opgraft.errors import EngineError, RequestError
from opgraft.logger import logger
from opgraft.serving.engine_thread import EngineThread, Reader
from opgraft.serving.input_processor import InputProcessor
from opgraft.serving.open_request import OpenRequest, none_open
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.replica import Replica
from opgraft.serving.router import RequestRouter
from opgraft.serving.step_reports import OnStep
from opgraft.serving.text_engine import TextEngine

_MOST_MOVES = 1
"""Times that a request moves: one that brings down what computes it is not to bring down all replicas."""


class Replicas:
    """``parallel.data`` engines, which start at once.

    Requests are numbered in the order of their arrival at all replicas, so that a request without a seed has the same
    random numbers in each replica.

    Args:
        opgraft_config: the engines' settings.
        on_step: see ``OnStep``; called in the threads of the engines, by one at a time.

    Attributes:
        each: the replicas.
        inputs: makes requests of prompts, for all replicas.
        router: chooses the replica of a request.

    Raises:
        ModelError, ConfigError, CheckpointError: as ``TextEngine``.
    """

    def __init__(self, opgraft_config: OpgraftConfig, on_step: OnStep | None = None) -> None:
        self._parallel = opgraft_config.parallel
        self._lock = threading.RLock()
        self._arrivals = count()
        self._making_inputs = threading.Lock()
        self._inputs: InputProcessor | None = None
        watched = None if on_step is None else _one_at_a_time(on_step)
        self.each: list[Replica] = []
        self._meeting = ExitStack()  # of the ranks of all replicas
        self._routes = False
        self._starting: list[Executor] = []
        self._failed: BaseException | None = None  # the first that a start failed by
        if not is_replicated(self._parallel):
            make = partial(TextEngine, opgraft_config, watched, self._shared_inputs)
            self.each.append(Replica(0, EngineThread(make)))
        else:
            self._start(opgraft_config, watched)
        self._wait()
        reuse = opgraft_config.resolved().cache.prefix_reuse and len(self.each) > 1
        self.router = RequestRouter(
            [each.engine.cache_tokens if reuse else 0 for each in self.each]
        )
        self._routes = True

    def _start(self, opgraft_config: OpgraftConfig, on_step: OnStep | None) -> None:
        """Have the threads of several engines begin."""
        rounds = None
        if self._parallel.in_rounds:
            expect_rounds(self._parallel)
            rounds = Rounds()
            opgraft_config = _with(
                opgraft_config, meeting=self._meeting.enter_context(meeting_file())
            )
        for number in range(self._parallel.data):
            ranked = _with(opgraft_config, data_rank=number)
            options: dict[str, Any] = {"hands_over": True, "starting": self._start_of}
            make = partial(TextEngine, ranked, on_step, self._shared_inputs, **options)
            told = partial(self._surrendered, number), partial(self._lost, number)
            self.each.append(Replica(number, EngineThread(make, *told, rounds)))

    def _shared_inputs(self, opgraft_config: OpgraftConfig, max_model_len: int) -> InputProcessor:
        with self._making_inputs:
            if self._inputs is None:
                self._inputs = InputProcessor(opgraft_config, max_model_len)
            return self._inputs

    @contextmanager
    def _start_of(self, executor: Executor) -> Iterator[None]:
        """End all starts at once where this one fails, or another has: they may wait for it, as they share experts."""
        with self._lock:
            self._starting.append(executor)
            failed = self._failed is not None
        try:
            if failed:
                executor.shutdown()
            yield
        except BaseException as error:
            with self._lock:
                self._failed = self._failed or error
                starting = list(self._starting)
            for each in starting:
                each.shutdown()
            raise

    def _wait(self) -> None:
        """Wait until all engines are made; where one is not, let go of the others, and raise what failed first."""
        failed: dict[int, Exception] = {}
        for replica in self.each:
            try:
                replica.thread.wait()
            except Exception as error:
                failed[replica.number] = error
            except BaseException:
                self._stop()
                raise
        if failed:
            self.shutdown()
            first = self._failed or next(iter(failed.values()))
            for number, other in failed.items():
                if other is not first:
                    logger.error("replica %d did not start either: %s", number, described(other))
            raise first

    @property
    def first(self) -> TextEngine:
        """The first engine, whose settings are those of all."""
        return self.each[0].engine

    @property
    def inputs(self) -> InputProcessor:
        """The way from prompts to requests, for all engines."""
        return self.first.inputs

    def choices(
        self, prepared: OpenRequest, only: Replica | None = None, lost: int | None = None
    ) -> Iterator[Replica]:
        """Yield the replica that a request goes to, and others as long as it is refused because a replica is lost.

        Args:
            prepared: the request.
            only: the one replica that it may go to.
            lost: the number of a replica that it may not go to, as it comes from there.

        Raises:
            RequestError: one of its id runs.
            EngineError: no replica is left that could take it.
        """
        tried = set() if lost is None else {lost}
        while True:
            with self._lock:
                self._expect_new(prepared)
                ready = [
                    each for each in ([only] if only else self.each) if each.number not in tried
                ]
                ready = [each for each in ready if len(self.each) == 1 or each.state == "ready"]
                if not ready:
                    raise self._none_left()
                chosen = ready[0] if len(ready) == 1 else self._routed(prepared, ready)
                self._number(prepared)
                if len(self.each) > 1:
                    chosen.requests[prepared.output.request_id] = prepared
            tried.add(chosen.number)
            yield chosen

    def _routed(self, prepared: OpenRequest, ready: Sequence[Replica]) -> Replica:
        answers = list(prepared.growing.values())
        request = answers[0].request
        loads = {each.number: each.load() for each in ready}
        return self.each[self.router.route(request.tokens(), request.cache_salt, loads)]

    def _expect_new(self, prepared: OpenRequest) -> None:
        name = prepared.output.request_id
        for replica in self.each:
            replica.forget_ended()
        holder = self._holder(name) if len(self.each) > 1 else None
        if holder is not None and holder.requests.get(name) is not prepared:
            raise RequestError(
                f"request {name!r} is added, and one of that id runs: give each an id of its own"
            )

    def _number(self, prepared: OpenRequest) -> None:
        for answer in prepared.growing.values():
            if len(self.each) > 1 and answer.request.arrival < 0:
                answer.request.arrival = next(self._arrivals)

    def _holder(self, request_id: str) -> Replica | None:
        """Return the replica that a request runs in; of one engine that is it, and it knows its requests itself."""
        if len(self.each) == 1:
            return self.each[0]
        for replica in self.each:
            held = replica.requests.get(request_id)
            if held is not None and not held.output.finished:
                return replica
        return None

    def _lost(self, number: int, reason: str) -> None:
        """Forget what a lost replica held; others that share its experts cannot go on, and say why."""
        left = sum(other.state == "ready" for other in self.each if other.number != number)
        logger.error("replica %d is lost: %d of %d are ready", number, left, len(self.each))
        with self._lock:
            if self._routes:  # else it is lost before a request comes, while others start
                self.router.forget(number)
        for other in self.each if self._parallel.in_rounds else ():
            if other.number != number:
                other.thread.kill(f"replica {number}, whose experts it shares, was lost: {reason}")

    def _surrendered(self, number: int, reader: Reader, opened: OpenRequest, reason: str) -> bool:
        """Have a request of a lost replica go on in another one, or fail, and tell which; in the lost one's thread."""
        name = opened.output.request_id
        self.each[number].requests.pop(name, None)
        reason += self._other_losses(number, reason)
        why = f"replica {number} was lost while it computed request {name!r}: {reason}"
        if self._parallel.on_replica_loss == "move" and opened.moves < _MOST_MOVES:
            opened.moves += 1
            if self._moved(number, reader, opened, why):
                return True
        _fail(reader, opened, why)
        return False

    def _other_losses(self, number: int, reason: str) -> str:
        """Say why others were lost that share the experts of a lost replica: one of them may be the cause."""
        others = [each for each in self.each if self._parallel.in_rounds and each.number != number]
        losses = {each.number: each.engine.core.executor.loss for each in others}
        return "".join(
            f"; replica {other}: {loss}"
            for other, loss in losses.items()
            if loss and loss not in reason and reason not in loss
        )

    def _moved(self, number: int, reader: Reader, opened: OpenRequest, why: str) -> bool:
        """Bring a request of a replica to another one, and tell whether there is one."""

        def note(opening: Future[bool]) -> None:
            if opening.exception() is not None:
                _fail(reader, opened, f"{why}; it could not go on elsewhere: {opening.exception()}")

        try:
            for replica in self.choices(opened, lost=number):
                try:
                    replica.open(reader, opened).add_done_callback(note)
                except EngineError:
                    continue
                logger.warning("%s; it goes on in replica %d", why, replica.number)
                return True
        except EngineError:
            return False
        return False

    def close(self, reader: Reader) -> None:
        """Abort a request that nobody reads any more, if it still runs."""
        with self._lock:
            reader.left = True
            replica = self._holder(reader.request_id)
            if replica is not None:
                replica.thread.call(replica.thread.close, reader)

    def abort(self, request_id: str) -> Future[RequestOutput]:
        """Abort a request, whose reader gets what it has so far.

        Raises:
            RequestError: none of that id runs or waits.
            EngineError: the engine has ended.
        """
        with self._lock:
            replica = self._holder(request_id)
            if replica is None:
                raise none_open(request_id, "aborted")
            return replica.thread.call(replica.thread.abort, request_id)

    def check(self) -> None:
        """Raise where all threads have ended.

        Raises:
            EngineError: they have.
        """
        for replica in self.each:
            try:
                return replica.thread.check()
            except EngineError as error:
                ended = error
        raise ended

    def check_health(self) -> None:
        """Raise where fewer replicas are left than there must be; see to those that have lost their workers.

        Raises:
            EngineError: the threads have ended, or engines have stopped.
        """
        for replica in self.each:
            if replica.engine.core.executor.is_lost:
                replica.thread.look()
        left = sum(replica.fault() is None for replica in self.each)
        if left < min(self._parallel.least_replicas, len(self.each)):
            raise self._none_left()

    def _none_left(self) -> EngineError:
        faults = [
            fault for fault in (replica.fault() for replica in self.each) if fault is not None
        ]
        if len(self.each) == 1 and faults:
            return faults[0]
        lost = "; ".join(dict.fromkeys(map(str, faults)))
        return EngineError(
            f"{len(faults)} of {len(self.each)} replicas are lost, the others are not ready: {lost}"
        )

    def states(self) -> list[str]:
        """Return the state of each replica: ``starting``, ``ready``, ``restarting`` or ``lost``."""
        return [replica.state for replica in self.each]

    @property
    def busy_seconds(self) -> float:
        """The seconds that the step of this moment has taken, in the replica that has begun with one last."""
        return min(replica.thread.busy_seconds for replica in self.each)

    def end_hanging(self, seconds: float) -> None:
        """End the workers of replicas whose step takes longer than so many seconds, where there are others."""
        for replica in self.each if len(self.each) > 1 else ():
            if replica.thread.busy_seconds > seconds:
                replica.engine.core.executor.kill(
                    f"its step took more than {seconds:g} s: the workers were ended"
                )

    def stats(self) -> EngineStats:
        """Return what runs in all replicas, and totals since they were made."""
        found = [replica.engine.stats() for replica in self.each]
        return found[0] if len(found) == 1 else summed(found)

    def explain(self) -> Future[Explanation]:
        """Tell which kernel runs each op, in the first replica that is left.

        Raises:
            EngineError: none is.
        """
        self.check()
        replica = next((each for each in self.each if each.fault() is None), self.each[0])
        # Nobody asks the router if there is one replica.
        parts = {"router": self.router} if len(self.each) > 1 else {}
        return replica.thread.call(lambda: replica.engine.explain().within(**parts))

    def capacity(self) -> str:
        """Say in words what the caches hold."""
        several = "" if len(self.each) == 1 else f"of each of {len(self.each)} replicas, "
        return f"{several}{self.first.capacity()}"

    def kill(self) -> None:
        """End workers that do not answer."""
        for replica in self.each:
            replica.engine.core.executor.kill()

    def shutdown(self) -> None:
        """Abort all requests and let go of the engines."""
        self._stop()
        for replica in self.each:
            replica.thread.shutdown()
        self._meeting.close()

    def _stop(self) -> None:
        for replica in self.each:
            replica.thread.stop()


def is_replicated(parallel: ParallelConfig) -> bool:
    """Tell whether this process is the front end of several engines, rather than a rank of one that others started."""
    here = parallelism().layout.world == 1 and parallel.executor != "external"
    return parallel.data > 1 and here


def _with(opgraft_config: OpgraftConfig, **values: Any) -> OpgraftConfig:
    resolved = opgraft_config.resolved()
    return dataclasses.replace(resolved, parallel=dataclasses.replace(resolved.parallel, **values))


def _one_at_a_time(on_step: OnStep) -> OnStep:
    lock = threading.Lock()

    def locked(*args: object) -> None:
        with lock:
            on_step(*args)  # type: ignore[arg-type]

    return locked


def _fail(reader: Reader, opened: OpenRequest, message: str) -> None:
    opened.fail(message)
    reader.put(opened.output.deferred_snapshot())
