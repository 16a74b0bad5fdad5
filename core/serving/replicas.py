"""Data parallelism: engines that share the requests of a front end, each in a thread with workers of its own."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from operator import methodcaller
from typing import Any, Protocol

from opgraft.base.text import described
from opgraft.binding.explaining import Explanation
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed.groups import parallelism
from opgraft.engine.stats import EngineStats, summed
from opgraft.engine.workers.executor import HUNG, Executor
from opgraft.engine.workers.process_executor import meeting_file
from opgraft.errors import ConfigError, EngineError
from opgraft.logger import logger
from opgraft.models.build import generates
from opgraft.models.files import opened_once
from opgraft.serving.embedding_engine import EmbeddingEngine
from opgraft.serving.engine_thread import EngineThread, Reader
from opgraft.serving.input_processor import InputProcessor
from opgraft.serving.open_request import OpenRequest, id_in_use, none_open
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.request_engine import RequestEngine
from opgraft.serving.step_reports import OnStep
from opgraft.serving.text_engine import TextEngine

_MOST_MOVES = 1
"""Times that a request moves: one that brings down what computes it is not to bring down all replicas."""

_EXPECTED = 256
"""Tokens that an answer is taken to have, where it may have more: few are as long as they may be."""

BLOCK = 16
"""Tokens by which beginnings of prompts are compared."""

WORTH = 4
"""Outstanding tokens that are worth waiting for, rather than to compute one of a prompt anew.

A token that is outstanding shares its step with a newcomer's; one that is computed anew is work for
nothing.
"""


def choose_replica(loads: Mapping[int, int], held: Mapping[int, int]) -> int:
    """Return the replica with the least load, after a deduction for the cached part of the prompt.

    A session's next turn goes to the replica that holds the chat, unless the queue there costs more
    than computing the chat anew. Among equal replicas the first is taken.

    Args:
        loads: outstanding tokens of each replica that can take a request.
        held: tokens of the prompt's beginning in the cache of each replica; 0 if not named.
    """
    return min(
        loads,
        key=lambda replica: (
            loads[replica] - WORTH * held.get(replica, 0),
            loads[replica],
            replica,
        ),
    )


@PluggableClass.register("request_router")
class RequestRouter(PluggableClass):
    """Routes a request to the least loaded replica, or to one that holds the beginning of its prompt.

    It remembers the prompts that went to each replica by hashes of their blocks, as many as that
    replica's cache has room for. It is asked by one thread at a time.

    Args:
        capacities: tokens that the cache of each replica holds; 0 where it reuses none.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._most = [capacity // BLOCK for capacity in capacities]
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]

    def route(self, tokens: Sequence[int], cache_salt: str | None, loads: Mapping[int, int]) -> int:
        """Return the replica that a request goes to, and remember its prompt there.

        Args:
            tokens: of the prompt, and of the output so far where the request has moved.
            cache_salt: requests of different salts share nothing in the cache.
            loads: tokens that are outstanding at each replica that can take a request; at least
                one.
        """
        hashes = _hashes(tokens, cache_salt) if any(self._most) else []
        chosen = choose_replica(loads, {replica: self._held(replica, hashes) for replica in loads})
        self._remember(chosen, hashes)
        return chosen

    def forget(self, replica: int) -> None:
        """Forget what went to a replica, whose cache was lost."""
        self._known[replica].clear()

    def _held(self, replica: int, hashes: Sequence[int]) -> int:
        known = self._known[replica]
        return BLOCK * next(
            (index for index, each in enumerate(hashes) if each not in known), len(hashes)
        )

    def _remember(self, replica: int, hashes: Sequence[int]) -> None:
        known = self._known[replica]
        for each in reversed(
            hashes
        ):  # so that the end of a prompt is forgotten before its beginning
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._most[replica]:
            known.popitem(last=False)


def _hashes(tokens: Sequence[int], cache_salt: str | None) -> list[int]:
    """Return a hash of each beginning of full blocks."""
    hashes: list[int] = []
    before = hash(cache_salt)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[start : start + BLOCK]))
        hashes.append(before)
    return hashes


class Member(Protocol):
    """An engine that makes rounds with others.

    Attributes:
        rounds_made: rounds that the engine has taken part in.
    """

    rounds_made: int

    def look(self) -> None:
        """See that a round was opened, in a thread of the engine's own."""


class Rounds:
    """Counts rounds, in each of which every engine makes one step: of its requests, or of none.

    An engine with work makes the next step when it likes, and opens a round if it is the first. The
    other engines are woken, and make a step in the round too, with or without work. Nobody waits
    for an agreement on a round, as collectives of the model bring the steps together. Without work
    no round is opened, and all engines sleep.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = 0
        self.members: list[Member] = []

    def enter(self, member: Member) -> None:
        """Have an engine take part in the next round."""
        with self._lock:
            member.rounds_made += 1
            opens = member.rounds_made > self._opened
            self._opened = max(self._opened, member.rounds_made)
        if not opens:
            return
        for other in self.members:
            if other is not member:
                other.look()

    def is_behind(self, member: Member) -> bool:
        """Return True if a round is open in which an engine has not made a step."""
        return member.rounds_made < self._opened


class Replica(EngineThread):
    """One of the engines, in the thread that steps it.

    Args:
        number: among the replicas.
        make: makes the engine.
        owner: handles the loss of this replica, if there are others.
        rounds: in which the engine steps together with the others.

    Attributes:
        requests: those that went to the engine and have not ended, by id, if there are other
            replicas.
        rounds_made: rounds that the engine has taken part in.
    """

    def __init__(
        self,
        number: int,
        make: Callable[[], RequestEngine],
        owner: Replicas | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        self.number = number
        self.requests: dict[str, OpenRequest] = {}
        self.rounds_made = 0
        self._owner = owner
        self._rounds = rounds
        if rounds is not None:
            rounds.members.append(self)
        super().__init__(make)

    def _make(self, make: Callable[[], RequestEngine]) -> None:
        super()._make(make)
        if self._rounds is not None:
            self.engine.executor.before_submit = partial(self._rounds.enter, self)

    def _is_behind(self) -> bool:
        return self._rounds is not None and self._rounds.is_behind(self)

    def _take_part(self) -> None:
        if isinstance(self.engine, TextEngine):
            self.engine.take_part()

    def _surrender(self, reason: str) -> None:
        if self._owner is None or not isinstance(self.engine, TextEngine):
            return
        self._owner.forget_cache(self, reason)
        for reader in list(self._streams.values()):
            if reader.left:
                self.close(reader)
        failed, answers = [], 0
        for opened in self.engine.surrender():
            growing = len(opened.growing)
            name = opened.output.request_id
            if not self._owner.move(self, self._streams[name], opened, reason):
                failed.append(opened.output)
                answers += growing
            del self._streams[name]
        self.engine.report_failed(failed, answers)

    def begin(
        self, reader: Reader, prepared: OpenRequest, beside: Sequence[Reader] = ()
    ) -> Future[bool]:
        """Have the engine begin with a request; the result is False if the reader has left.

        Args:
            reader: reads the news.
            prepared: the request.
            beside: readers of all requests of the same call, which leave if one is refused.

        Raises:
            EngineError: the engine has ended; the result may raise the error too.
        """
        name = prepared.output.request_id

        def note(opening: Future[bool]) -> None:
            if opening.cancelled() or opening.exception() is not None or not opening.result():
                self.requests.pop(name, None)

        try:
            opening = self.call(self.open, reader, prepared, beside)
        except EngineError:
            self.requests.pop(name, None)
            raise
        opening.add_done_callback(note)
        return opening

    def fault(self) -> EngineError | None:
        """Return the reason why the engine cannot go on, or None."""
        try:
            self.check()
            self.engine.check_health()
        except EngineError as error:
            return error
        return None

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``restarting`` or ``lost``."""
        if not self.has_engine:
            return "starting"
        if self.fault() is not None:
            return "lost"
        executor = self.engine.executor
        return "restarting" if executor.is_lost or executor.is_restarting else "ready"

    def forget_ended(self) -> None:
        """Forget requests that have ended."""
        for name, request in list(self.requests.items()):
            if request.output.finished:
                self.requests.pop(name, None)

    def load(self) -> int:
        """Return the tokens that are outstanding."""
        return sum(each.outstanding(_EXPECTED) for each in list(self.requests.values()))


class Replicas:
    """``parallel.data`` engines, which start at once.

    Requests are numbered in the order of their arrival at all replicas, so that a request without a
    seed has the same random numbers in each replica.

    Args:
        opgraft_config: the engines' settings.
        on_step: see ``OnStep``; called in the threads of the engines, by one at a time.

    Attributes:
        each: the replicas.
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
        self._failed: BaseException | None = None  # the first error of a start
        if not is_replicated(self._parallel):
            make = partial(_engine, opgraft_config, watched)
            self.each.append(Replica(0, make))
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
        _expect_decoder(opgraft_config)
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
            make = partial(_engine, ranked, on_step, self._shared_inputs, **options)
            self.each.append(Replica(number, make, self, rounds))

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
                replica.wait()
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
    def first(self) -> RequestEngine:
        """The first engine, which has the settings of all."""
        return self.each[0].engine

    def open(
        self, asked: Sequence[tuple[Reader, OpenRequest]], only: Replica | None = None
    ) -> list[Future[None]]:
        """Have replicas begin with requests. All requests of a replica begin with the same step.

        If a replica is lost before it begins with a request, another one does. Each result is None
        once a replica has begun, or the error that keeps all of them from it: a ``RequestError`` if
        a request of the id runs, or if the request could never be served; an ``EngineError`` if no
        replica is left. If an engine refuses a request, none of those that it has is computed, and
        the others are aborted.

        Args:
            asked: each request, with the reader of its news.
            only: the one replica that may take the requests.
        """
        self.expect_own_process()
        readers = [reader for reader, _ in asked]
        with ExitStack() as together:
            for replica in self.each:
                together.enter_context(replica.together())
            return [
                self._opened(reader, prepared, self._choices(prepared, only), readers)
                for reader, prepared in asked
            ]

    def _opened(
        self,
        reader: Reader,
        prepared: OpenRequest,
        choices: Iterator[Replica],
        beside: Sequence[Reader] = (),
    ) -> Future[None]:
        result: Future[None] = Future()
        result.set_running_or_notify_cancel()  # who gives it up closes the reader
        begin = methodcaller("begin", reader, prepared, beside)
        self._begin(result, choices, begin)
        return result

    def _begin(
        self,
        result: Future[None],
        choices: Iterator[Replica],
        begin: Callable[[Replica], Future[bool]],
    ) -> None:
        """Have the next replica that may take a request begin with it, and so on until one has begun."""

        def note(opening: Future[bool]) -> None:
            error = opening.exception()
            if isinstance(error, EngineError) and len(self.each) > 1:
                self._begin(result, choices, begin)
            else:
                _settle(result, error)

        try:
            for replica in choices:
                try:
                    opening = begin(replica)
                except EngineError:
                    continue
                opening.add_done_callback(note)
                return
        except BaseException as error:  # of the request, or of a plugin's router
            _settle(result, error)

    def _choices(
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
            raise id_in_use(name)

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

    def forget_cache(self, lost: Replica, reason: str) -> None:
        """Forget which prompts a lost replica holds. Replicas that share experts with it cannot go on, and end."""
        number = lost.number
        left = sum(other.state == "ready" for other in self.each if other is not lost)
        logger.error("replica %d is lost: %d of %d are ready", number, left, len(self.each))
        with self._lock:
            if self._routes:  # else it is lost before a request comes, while others start
                self.router.forget(number)
        if not self._parallel.in_rounds:
            return
        for other in self.each:
            if other is not lost:
                other.kill(f"replica {number}, whose experts it shares, was lost: {reason}")

    def move(self, lost: Replica, reader: Reader, opened: OpenRequest, reason: str) -> bool:
        """Have a request of a lost replica go on in another one, or fail; in the thread of the lost one.

        Returns:
            True if the request goes on.
        """
        name = opened.output.request_id
        lost.requests.pop(name, None)
        reason += self._other_losses(lost.number, reason)
        why = f"replica {lost.number} was lost while it computed request {name!r}: {reason}"
        moves = self._parallel.on_replica_loss == "move" and opened.moves < _MOST_MOVES
        if not moves:
            _fail(reader, opened, why)
            return False
        opened.moves += 1
        opening = self._opened(reader, opened, self._choices(opened, lost=lost.number))
        if opening.done() and opening.exception() is not None:
            _fail(reader, opened, why)
            return False

        def note(opening: Future[None]) -> None:
            if opening.exception() is not None:
                _fail(reader, opened, f"{why}; it could not go on elsewhere: {opening.exception()}")

        opening.add_done_callback(note)
        holder = self._holder(name)
        if holder is not None:
            logger.warning("%s; it goes on in replica %d", why, holder.number)
        return True

    def _other_losses(self, number: int, reason: str) -> str:
        """Say why others were lost that share the experts of a lost replica: one of them may be the cause."""
        others = [each for each in self.each if self._parallel.in_rounds and each.number != number]
        losses = {each.number: each.engine.executor.loss for each in others}
        return "".join(
            f"; replica {other}: {loss}"
            for other, loss in losses.items()
            if loss and loss not in reason and reason not in loss
        )

    def close(self, reader: Reader) -> Future[None] | None:
        """Abort a request that nobody reads any more.

        Returns:
            Done once the request is gone; None if no replica has the request.

        Raises:
            EngineError: the engine has ended.
        """
        self.expect_own_process()
        reader.left = True  # a replica that begins with the request from now on aborts it
        with self._lock:
            replica = self._holder(reader.request_id)
        return None if replica is None else replica.call(replica.close, reader)

    def abort(self, request_id: str) -> Future[RequestOutput]:
        """Abort a request, and have the reader get the output so far.

        Raises:
            RequestError: none of that id runs or waits.
            EngineError: the engine has ended.
        """
        self.expect_own_process()
        with self._lock:
            replica = self._holder(request_id)
        if replica is None:
            raise none_open(request_id)
        return replica.call(replica.abort, request_id)

    def current(self) -> Replica | None:
        """Return the replica whose thread this is, or None in any other thread."""
        return next((replica for replica in self.each if replica.is_current), None)

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked from the one with the engines."""
        return self.each[0].is_inherited

    def expect_own_process(self) -> None:
        """Refuse calls of a process without the engines.

        Raises:
            EngineError: the engines are in the process that forked this one.
        """
        self.each[0].expect_own_process()

    def check(self) -> None:
        """Raise where all threads have ended.

        Raises:
            EngineError: they have.
        """
        for replica in self.each:
            try:
                return replica.check()
            except EngineError as error:
                ended = error
        raise ended

    def check_health(self) -> None:
        """Raise where fewer replicas are left than there must be; see to those that have lost their workers.

        Raises:
            EngineError: the threads have ended, or engines have stopped.
        """
        for replica in self.each:
            if replica.engine.executor.is_lost:
                replica.look()
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
        return min(replica.busy_seconds for replica in self.each)

    def end_hanging(self, seconds: float) -> None:
        """End the workers of replicas whose step takes longer than so many seconds, where there are others."""
        for replica in self.each if len(self.each) > 1 else ():
            if replica.busy_seconds > seconds:
                replica.kill(f"its step took more than {seconds:g} s: the workers were ended")

    def stats(self) -> EngineStats:
        """Return what runs in all replicas, and totals since they were made."""
        found = [replica.engine.stats() for replica in self.each]
        return found[0] if len(found) == 1 else summed(found)

    def explain(self) -> Future[Explanation]:
        """Tell which kernel runs each op, in the first replica that is left, or in the one whose thread asks.

        Raises:
            EngineError: none is.
        """
        self.check()
        replica = next((each for each in self.each if each.fault() is None), self.each[0])
        # Nobody asks the router if there is one replica.
        parts = {"router": self.router} if len(self.each) > 1 else {}
        current = self.current()
        if current is None:
            return replica.call(lambda: replica.engine.explain().within(**parts))
        # The thread of an engine would wait for itself, or for one that waits to call on_step.
        explained: Future[Explanation] = Future()
        explained.set_result(current.engine.explain().within(**parts))
        return explained

    @property
    def cache_tokens(self) -> int:
        """The tokens of long sequences that all caches hold."""
        return sum(replica.engine.cache_tokens for replica in self.each)

    def capacity(self) -> str:
        """Return in words how much the caches hold."""
        several = "" if len(self.each) == 1 else f"of each of {len(self.each)} replicas, "
        return f"{several}{self.first.capacity()}"

    def kill(self, reason: str = HUNG) -> None:
        """End workers that do not answer, if they have processes of their own."""
        for replica in self.each:
            replica.kill(reason)

    def shutdown(self, patience: float | None = None) -> None:
        """Abort all requests and let go of the engines; wait for steps that run, for so many seconds at most."""
        self._stop()
        for replica in self.each:
            replica.join(patience)
        self._meeting.close()

    def _stop(self) -> None:
        for replica in self.each:
            replica.stop()


def _engine(
    opgraft_config: OpgraftConfig, on_step: OnStep | None, *arguments: Any, **options: Any
) -> RequestEngine:
    """Make the engine that a model needs."""
    with opened_once():
        if generates(opgraft_config):
            return TextEngine(opgraft_config, on_step, *arguments, **options)
        return EmbeddingEngine(opgraft_config, on_step)


def _expect_decoder(opgraft_config: OpgraftConfig) -> None:
    """Refuse replicas of an encoder.

    Raises:
        ConfigError: the model is an encoder.
    """
    if not generates(opgraft_config):
        name = opgraft_config.model.name
        raise ConfigError(
            f"parallel.data is {opgraft_config.parallel.data}, and {name} is an encoder, which runs as one engine: "
            "leave it out, and start a server for each device"
        )


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


def _settle(result: Future[None], error: BaseException | None) -> None:
    """End the wait for a replica to begin, unless an interrupt has ended it before."""
    if result.done():
        return
    if error is None:
        result.set_result(None)
    else:
        result.set_exception(error)


def _fail(reader: Reader, opened: OpenRequest, message: str) -> None:
    opened.fail(message)
    reader.put(opened.output)


def expect_rounds(parallel: ParallelConfig) -> None:
    """Refuse settings under which replicas cannot share experts, or which promise what those that do cannot keep.

    Raises:
        ConfigError: workers are no processes, replicas have several stages, workers are to start
            again, or requests to move.
    """
    shared = f"parallel.expert is {parallel.expert}, so that replicas share experts"
    if parallel.restart_workers:
        raise ConfigError(
            f"{shared}, and parallel.restart_workers {parallel.restart_workers}: the ranks of all are one job, in "
            "which none can be replaced, so that they are lost together. Set it to 0, and have a supervisor start a "
            f"new server where one ends with the exit code {EngineError.exit_code}"
        )
    if parallel.on_replica_loss == "move":
        raise ConfigError(
            f"{shared}, and parallel.on_replica_loss is move: they are lost together, and none is left that requests "
            "could move to: set it to fail"
        )
    if parallel.executor not in (None, "processes"):
        raise ConfigError(
            f"{shared}, and parallel.executor is {parallel.executor}, where each replica is a job of its own, and "
            "experts are shared within one: set it to processes, on this host, or parallel.data to 1 and "
            "parallel.expert to parallel.tensor, which may be ranks of several hosts"
        )
    if parallel.pipeline > 1:
        raise ConfigError(
            f"{shared}, and parallel.pipeline {parallel.pipeline}: they make their steps together only without stages. "
            "Set one of the two to 1"
        )
