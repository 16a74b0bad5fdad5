"""Data parallelism: several engines, each in a thread and with workers of its own.

``Replicas`` shares the requests of a front end among the engines. A ``RequestRouter`` chooses the
engine of each request. If an engine is lost, its requests move to another one. Without data
parallelism, there is one engine, and everything goes to it.
"""

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

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.binding.explaining import Explanation
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig, ParallelConfig
from opgraft.distributed.groups import parallelism
from opgraft.engine.stats import EngineStats, summed
from opgraft.engine.workers.executor import HUNG, Executor
from opgraft.engine.workers.process_executor import meeting_file
from opgraft.errors import ConfigError, EngineError
from opgraft.models.build import generates
from opgraft.models.files import opened_once
from opgraft.serving.embedding_engine import EmbeddingEngine
from opgraft.serving.engine_thread import EngineThread, NewsReader
from opgraft.serving.handover import HandoverEngine
from opgraft.serving.input_processor import InputProcessor
from opgraft.serving.open_request import OpenRequest, id_in_use, none_open
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.request_engine import RequestEngine
from opgraft.serving.step_reports import OnStep
from opgraft.serving.text_engine import TextEngine

_MOST_MOVES = 1
"""Moves of one request. A request that brings down its engine must not bring down all of them."""

_EXPECTED = 256
"""Expected tokens of an answer with a higher limit: few answers reach their limit."""

BLOCK = 16
"""Tokens of a block. Beginnings of prompts are compared block by block."""

WORTH = 4
"""Outstanding tokens to wait for, instead of computing one token of a prompt anew.

An outstanding token may share its step with a token of the new request. A token computed anew is
work for nothing.
"""


def choose_replica(loads: Mapping[int, int], held: Mapping[int, int]) -> int:
    """Return the replica with the least load, after a deduction for the cached part of the prompt.

    The next turn of a chat goes to the replica with the chat in its cache, unless the queue there
    costs more than computing the chat anew. Among equal replicas, the first is chosen.

    For example, a replica with 1,000 outstanding tokens and 300 cached tokens of the prompt counts
    as -200, and is chosen before an idle replica.

    Args:
        loads: outstanding tokens of each ready replica.
        held: tokens of the prompt's beginning in the cache of each replica; 0 if not named.
    """

    def cost(replica: int) -> tuple[int, int, int]:
        load = loads[replica]
        return load - WORTH * held.get(replica, 0), load, replica

    return min(loads, key=cost)


@PluggableClass.register("request_router")
class RequestRouter(PluggableClass):
    """Routes a request to the least loaded replica, or to one with the beginning of the prompt.

    The router remembers hashes of the prompts' blocks for each replica, as many as the cache of the
    replica has room for. One thread at a time asks the router.

    Args:
        capacities: tokens of the cache of each replica; 0 for a cache without reuse.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._most = [capacity // BLOCK for capacity in capacities]
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]

    def route(self, tokens: Sequence[int], cache_salt: str | None, loads: Mapping[int, int]) -> int:
        """Return the replica for a request, and remember the prompt there.

        Args:
            tokens: of the prompt, and of the output so far if the request has moved.
            cache_salt: requests of different salts share nothing in the cache.
            loads: outstanding tokens of each ready replica; at least one.
        """
        hashes = _hashes(tokens, cache_salt) if any(self._most) else []
        held = {replica: self._held(replica, hashes) for replica in loads}
        chosen = choose_replica(loads, held)
        self._remember(chosen, hashes)
        return chosen

    def forget(self, replica: int) -> None:
        """Forget the prompts of a replica after the loss of its cache."""
        self._known[replica].clear()

    def _held(self, replica: int, hashes: Sequence[int]) -> int:
        """Return the number of first tokens of a prompt that are in the cache of a replica."""
        known = self._known[replica]
        for index, each in enumerate(hashes):
            if each not in known:
                return BLOCK * index
        return BLOCK * len(hashes)

    def _remember(self, replica: int, hashes: Sequence[int]) -> None:
        known = self._known[replica]
        # In reverse, so that the end of a prompt is forgotten before its beginning.
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._most[replica]:
            known.popitem(last=False)


def _hashes(tokens: Sequence[int], cache_salt: str | None) -> list[int]:
    """Return a hash of each beginning of a prompt in whole blocks."""
    hashes: list[int] = []
    # Each hash holds all blocks before, so that equal hashes mean equal beginnings.
    before = hash(cache_salt)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, *tokens[start : start + BLOCK]))
        hashes.append(before)
    return hashes


class Member(Protocol):
    """An engine that makes rounds with others.

    Attributes:
        rounds_made: number of rounds with this engine.
    """

    rounds_made: int

    def look(self) -> None:
        """Wake the thread of the engine, because a round was opened."""


class Rounds:
    """Counts rounds. Every engine makes one step in each round, with requests or without.

    An engine with work makes its next step at any time. The first engine of a round opens the
    round and wakes the others. They make a step too, with or without work. No agreement on a round
    is needed, because collectives of the model bring the steps together. Without work no round is
    opened, and all engines sleep.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = 0
        self.members: list[Member] = []

    def enter(self, member: Member) -> None:
        """Let an engine take part in its next round."""
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
        """Return True if a round is open without a step of this engine so far."""
        return member.rounds_made < self._opened


class Replica(EngineThread):
    """One of the engines, in its thread.

    Args:
        number: among the replicas.
        make: makes the engine.
        owner: handles the loss of this replica, if there are others.
        rounds: common to engines that step together.

    Attributes:
        requests: open requests of the engine by id, if there are other replicas.
        rounds_made: number of rounds with this engine.
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
        # Nobody reads these, so they need not move.
        for reader in list(self._streams.values()):
            if reader.left:
                self.close(reader)
        failed = []
        answers = 0
        for opened in self.engine.surrender():
            # Counted first: a failed request has no growing answers any more.
            growing = len(opened.growing)
            name = opened.output.request_id
            if not self._owner.move(self, self._streams[name], opened, reason):
                failed.append(opened.output)
                answers += growing
            del self._streams[name]
        self.engine.report_failed(failed, answers)

    def begin(
        self, reader: NewsReader, prepared: OpenRequest, beside: Sequence[NewsReader] = ()
    ) -> Future[bool]:
        """Let the engine begin with a request.

        Args:
            reader: reads the news.
            prepared: the request.
            beside: readers of all requests of the same call. If one request is refused, all leave.

        Returns:
            The future of True; of False if the reader has left; or of an ``EngineError``.

        Raises:
            EngineError: the engine has ended.
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
        """Return the error that keeps the engine from going on, or None."""
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
        """Return the number of outstanding tokens."""
        # A copy, as other threads take ended requests out.
        requests = list(self.requests.values())
        return sum(each.outstanding(_EXPECTED) for each in requests)


class Replicas:
    """The ``parallel.data`` engines of a front end. All start at the same time.

    All replicas together number requests in the order of arrival. So a request without a seed has
    the same random numbers in each replica.

    Args:
        opgraft_config: the engines' settings.
        on_step: see ``OnStep``; called in the threads of the engines, one call at a time.
        template: see ``InputProcessor``.

    Attributes:
        each: the replicas.
        router: chooses the replica of a request.

    Raises:
        ModelError, ConfigError, CheckpointError: as ``TextEngine``.
    """

    def __init__(
        self,
        opgraft_config: OpgraftConfig,
        on_step: OnStep | None = None,
        template: str | None = None,
    ) -> None:
        self._parallel = opgraft_config.parallel
        self._lock = threading.RLock()
        self._arrivals = count()
        self._making_inputs = threading.Lock()
        self._make_inputs = partial(InputProcessor, template=template)
        self._inputs: InputProcessor | None = None
        watched = None if on_step is None else _one_at_a_time(on_step)
        self.each: list[Replica] = []
        # The meeting file of the ranks of all replicas.
        self._meeting = ExitStack()
        self._routes = False
        self._starting: list[Executor] = []
        # The first error of a start.
        self._failed: BaseException | None = None
        if not is_replicated(self._parallel):
            make = partial(_engine, opgraft_config, watched, self._make_inputs)
            self.each.append(Replica(0, make))
        else:
            self._start(opgraft_config, watched)
        self._wait()
        # One replica needs no router, and a router without room remembers no prompts.
        reuse = opgraft_config.resolved().cache.prefix_reuse and len(self.each) > 1
        capacities = [each.engine.cache_tokens if reuse else 0 for each in self.each]
        self.router = RequestRouter(capacities)
        self._routes = True

    def _start(self, opgraft_config: OpgraftConfig, on_step: OnStep | None) -> None:
        """Start the threads of several engines."""
        _expect_decoder(opgraft_config)
        rounds = None
        if self._parallel.in_rounds:
            expect_rounds(self._parallel)
            rounds = Rounds()
            meeting = self._meeting.enter_context(meeting_file())
            opgraft_config = _with(opgraft_config, meeting=meeting)
        for number in range(self._parallel.data):
            ranked = _with(opgraft_config, data_rank=number)
            options: dict[str, Any] = {"hands_over": True, "starting": self._start_of}
            make = partial(_engine, ranked, on_step, self._shared_inputs, **options)
            self.each.append(Replica(number, make, self, rounds))

    def _shared_inputs(self, opgraft_config: OpgraftConfig, max_model_len: int) -> InputProcessor:
        # A tokenizer takes a second and much memory, and all replicas have the same one.
        with self._making_inputs:
            if self._inputs is None:
                self._inputs = self._make_inputs(opgraft_config, max_model_len)
            return self._inputs

    @contextmanager
    def _start_of(self, executor: Executor) -> Iterator[None]:
        """End all starts once one has failed. Ranks with the same experts wait for each other."""
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
        """Wait until all engines are made. If one fails, release the others, and raise the error.

        If several fail, the first error is raised, and the others are logged.
        """
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
        """The first engine. All engines have the same settings."""
        return self.each[0].engine

    def open(
        self, asked: Sequence[tuple[NewsReader, OpenRequest]], only: Replica | None = None
    ) -> list[Future[None]]:
        """Let replicas begin with requests. All requests of one replica begin in the same step.

        If a replica is lost before it begins with a request, another replica takes the request. If
        an engine refuses a request, none of its requests is computed, and those of other replicas
        are aborted.

        Args:
            asked: each request, with the reader of its news.
            only: the one replica that may take the requests.

        Returns:
            A future for each request: of None once a replica has begun; of a ``RequestError`` if a
            request of the same id runs, or if the request could never be served; or of an
            ``EngineError`` if no replica is left.
        """
        self.expect_own_process()
        readers = [reader for reader, _ in asked]
        opened = []
        with ExitStack() as together:
            # No engine makes a step before it has all its requests of this call.
            for replica in self.each:
                together.enter_context(replica.together())
            for reader, prepared in asked:
                choices = self._choices(prepared, only)
                opened.append(self._opened(reader, prepared, choices, readers))
        return opened

    def _opened(
        self,
        reader: NewsReader,
        prepared: OpenRequest,
        choices: Iterator[Replica],
        beside: Sequence[NewsReader] = (),
    ) -> Future[None]:
        """Return the future of a request, and let the first of its choices begin."""
        result: Future[None] = Future()
        # From here on, the future cannot be cancelled. Callers close the reader instead.
        result.set_running_or_notify_cancel()
        begin = methodcaller("begin", reader, prepared, beside)
        self._begin(result, choices, begin)
        return result

    def _begin(
        self,
        result: Future[None],
        choices: Iterator[Replica],
        begin: Callable[[Replica], Future[bool]],
    ) -> None:
        """Let the next choice begin with a request, and further ones until one has begun."""

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
        # Of the request, or of the router of a plugin.
        except BaseException as error:
            _settle(result, error)

    def _choices(
        self, prepared: OpenRequest, only: Replica | None = None, lost: int | None = None
    ) -> Iterator[Replica]:
        """Yield replicas for a request, best first, one after each loss of the replica before.

        Args:
            prepared: the request.
            only: the one replica that may take the request.
            lost: the number of a lost replica that had the request.

        Raises:
            RequestError: a request of the same id runs.
            EngineError: no replica is left for the request.
        """
        tried = set() if lost is None else {lost}
        while True:
            # Choice and note are one: two threads must not take a request of one id.
            with self._lock:
                self._expect_new(prepared)
                allowed = [only] if only else self.each
                ready = [each for each in allowed if each.number not in tried]
                # A single engine says itself why it takes no request.
                if len(self.each) > 1:
                    ready = [each for each in ready if each.state == "ready"]
                if not ready:
                    raise self._none_left()
                chosen = ready[0] if len(ready) == 1 else self._routed(prepared, ready)
                self._number(prepared)
                if len(self.each) > 1:
                    chosen.requests[prepared.output.request_id] = prepared
            tried.add(chosen.number)
            yield chosen

    def _routed(self, prepared: OpenRequest, ready: Sequence[Replica]) -> Replica:
        """Return the router's choice for a request."""
        answers = list(prepared.growing.values())
        request = answers[0].request
        loads = {each.number: each.load() for each in ready}
        number = self.router.route(request.tokens(), request.cache_salt, loads)
        return self.each[number]

    def _expect_new(self, prepared: OpenRequest) -> None:
        """Refuse a request with the id of another one that runs."""
        name = prepared.output.request_id
        for replica in self.each:
            replica.forget_ended()
        # A single engine knows its requests itself.
        holder = self._holder(name) if len(self.each) > 1 else None
        if holder is not None and holder.requests.get(name) is not prepared:
            raise id_in_use(name)

    def _number(self, prepared: OpenRequest) -> None:
        """Give the answers of a request their numbers in the order of arrival."""
        if len(self.each) == 1:
            return
        for answer in prepared.growing.values():
            # A request that moves keeps its number, and with it its random numbers.
            if answer.request.arrival < 0:
                answer.request.arrival = next(self._arrivals)

    def _holder(self, request_id: str) -> Replica | None:
        """Return the replica of a running request. A single replica is returned for any id."""
        if len(self.each) == 1:
            return self.each[0]
        for replica in self.each:
            held = replica.requests.get(request_id)
            if held is not None and not held.output.finished:
                return replica
        return None

    def forget_cache(self, lost: Replica, reason: str) -> None:
        """Forget the prompts of a lost replica, and end replicas with the same experts."""
        number = lost.number
        left = sum(other.state == "ready" for other in self.each if other is not lost)
        logger.error("replica %d is lost: %d of %d are ready", number, left, len(self.each))
        with self._lock:
            # While other replicas still start, there is no router.
            if self._routes:
                self.router.forget(number)
        if not self._parallel.in_rounds:
            return
        for other in self.each:
            if other is not lost:
                other.kill(f"replica {number}, whose experts it shares, was lost: {reason}")

    def move(self, lost: Replica, reader: NewsReader, opened: OpenRequest, reason: str) -> bool:
        """Move a request of a lost replica to another one, or fail the request.

        The thread of the lost replica calls this.

        Args:
            lost: the replica.
            reader: of the request.
            opened: the request.
            reason: of the loss.

        Returns:
            True if the request goes on.
        """
        name = opened.output.request_id
        lost.requests.pop(name, None)
        reason += self._other_losses(lost.number, reason)
        why = f"replica {lost.number} was lost while it computed request {name!r}: {reason}"
        may_move = self._parallel.on_replica_loss == "move" and opened.moves < _MOST_MOVES
        if not may_move:
            _fail(reader, opened, why)
            return False
        opened.moves += 1
        choices = self._choices(opened, lost=lost.number)
        opening = self._opened(reader, opened, choices)
        # Done already, if no replica was left to ask.
        if opening.done() and opening.exception() is not None:
            _fail(reader, opened, why)
            return False

        def note(opening: Future[None]) -> None:
            error = opening.exception()
            if error is not None:
                _fail(reader, opened, f"{why}; it could not go on elsewhere: {error}")

        opening.add_done_callback(note)
        holder = self._holder(name)
        if holder is not None:
            logger.warning("%s; it goes on in replica %d", why, holder.number)
        return True

    def _other_losses(self, number: int, reason: str) -> str:
        """Return the losses of other replicas with the same experts. One of them may be the cause.

        Args:
            number: of the lost replica.
            reason: of its loss.
        """
        if not self._parallel.in_rounds:
            return ""
        told = ""
        for replica in self.each:
            loss = replica.engine.executor.loss
            if replica.number == number or not loss:
                continue
            if loss not in reason and reason not in loss:
                told += f"; replica {replica.number}: {loss}"
        return told

    def close(self, reader: NewsReader) -> Future[None] | None:
        """Abort a request that nobody reads any more.

        Returns:
            Done once the request is gone; None if no replica has the request.

        Raises:
            EngineError: the engine has ended.
        """
        self.expect_own_process()
        # A replica that has not begun with the request aborts it at the beginning.
        reader.left = True
        with self._lock:
            replica = self._holder(reader.request_id)
        return None if replica is None else replica.call(replica.close, reader)

    def abort(self, request_id: str) -> Future[RequestOutput]:
        """Abort a request. Its reader receives the output so far.

        Raises:
            RequestError: no request of that id runs or waits.
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
        """Check that the thread of a replica runs.

        Raises:
            EngineError: all threads have ended.
        """
        for replica in self.each:
            try:
                return replica.check()
            except EngineError as error:
                ended = error
        raise ended

    def check_health(self) -> None:
        """Check that enough replicas are left, and wake replicas that have lost their workers.

        Raises:
            EngineError: fewer than ``parallel.least_replicas`` can go on.
        """
        for replica in self.each:
            if replica.engine.executor.is_lost:
                replica.look()
        left = sum(replica.fault() is None for replica in self.each)
        if left < min(self._parallel.least_replicas, len(self.each)):
            raise self._none_left()

    def _none_left(self) -> EngineError:
        """Return the error for a request without a replica, with the faults of all replicas."""
        found = [replica.fault() for replica in self.each]
        faults = [fault for fault in found if fault is not None]
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
        """The seconds of the youngest step of all replicas so far."""
        return min(replica.busy_seconds for replica in self.each)

    def end_hanging(self, seconds: float) -> None:
        """End the workers of replicas with a step of more than ``seconds``.

        A single replica is left alone, because no other could go on.
        """
        if len(self.each) == 1:
            return
        for replica in self.each:
            if replica.busy_seconds > seconds:
                replica.kill(f"its step took more than {seconds:g} s: the workers were ended")

    def stats(self) -> EngineStats:
        """Return the sums of the states and counters of all replicas."""
        found = [replica.engine.stats() for replica in self.each]
        return found[0] if len(found) == 1 else summed(found)

    def on_engines(self, function: Callable[[Any], None]) -> list[Future[None]]:
        """Call a function of each sound engine, in the engine's thread.

        Raises:
            EngineError: no replica is left.
        """
        self.check()
        sound = [replica for replica in self.each if replica.fault() is None]
        return [replica.call(function, replica.engine) for replica in sound]

    def explain(self) -> Future[Explanation]:
        """Return the kernel of each op and the class of each part, in the first sound replica.

        In the thread of a replica, as in ``on_step``, the answer is that of this replica.

        Raises:
            EngineError: no replica is left.
        """
        self.check()
        replica = next((each for each in self.each if each.fault() is None), self.each[0])
        # A single replica has no use for a router.
        parts = {"router": self.router} if len(self.each) > 1 else {}
        current = self.current()
        if current is None:
            return replica.call(lambda: replica.engine.explain().within(**parts))
        # The thread of an engine would wait for itself, or for another thread in on_step.
        explained: Future[Explanation] = Future()
        explained.set_result(current.engine.explain().within(**parts))
        return explained

    @property
    def cache_tokens(self) -> int:
        """The number of tokens of long sequences in all caches together."""
        return sum(replica.engine.cache_tokens for replica in self.each)

    def capacity(self) -> str:
        """Return the sizes of the caches as a sentence."""
        several = "" if len(self.each) == 1 else f"of each of {len(self.each)} replicas, "
        return f"{several}{self.first.capacity()}"

    def kill(self, reason: str = HUNG) -> None:
        """End the workers of all replicas, if workers have processes of their own."""
        for replica in self.each:
            replica.kill(reason)

    def shutdown(self, patience: float | None = None) -> None:
        """Abort all requests and release the engines.

        Args:
            patience: the longest wait for running steps, in seconds.
        """
        # All are told before the first wait, so that they end side by side.
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
    """Make the engine for a model: of a decoder, or of an encoder."""
    with opened_once():
        if generates(opgraft_config):
            hands_over = opgraft_config.resolved().handover.tokens is not None
            made = HandoverEngine if hands_over else TextEngine
            return made(opgraft_config, on_step, *arguments, **options)
        return EmbeddingEngine(opgraft_config, on_step)


def _expect_decoder(opgraft_config: OpgraftConfig) -> None:
    """Refuse replicas of an encoder.

    Raises:
        ConfigError: the model is an encoder.
    """
    if not generates(opgraft_config):
        name = opgraft_config.model.name
        raise ConfigError(
            f"parallel.data is {opgraft_config.parallel.data}, and {name} is an encoder, which "
            "runs as one engine: leave it out, and start a server for each device"
        )


def is_replicated(parallel: ParallelConfig) -> bool:
    """Return True in the front end of several engines.

    A rank of an engine has the same settings, but another process has started it.
    """
    here = parallelism().layout.world == 1 and parallel.executor != "external"
    return parallel.data > 1 and here


def _with(opgraft_config: OpgraftConfig, **values: Any) -> OpgraftConfig:
    resolved = opgraft_config.resolved()
    return dataclasses.replace(resolved, parallel=dataclasses.replace(resolved.parallel, **values))


def _one_at_a_time(on_step: OnStep) -> OnStep:
    """Return a function for several threads that makes one call of ``on_step`` at a time."""
    lock = threading.Lock()

    def locked(*args: object) -> None:
        with lock:
            on_step(*args)  # type: ignore[arg-type]

    return locked


def _settle(result: Future[None], error: BaseException | None) -> None:
    """Give a future its result, unless an interrupt has ended the wait before."""
    if result.done():
        return
    if error is None:
        result.set_result(None)
    else:
        result.set_exception(error)


def _fail(reader: NewsReader, opened: OpenRequest, message: str) -> None:
    opened.fail(message)
    reader.put(opened.output)


def expect_rounds(parallel: ParallelConfig) -> None:
    """Check settings of replicas that share experts.

    Raises:
        ConfigError: workers are not processes, replicas have several stages, lost workers would
            have to start again, or requests to move.
    """
    shared = f"parallel.expert is {parallel.expert}, so that replicas share experts"
    if parallel.restart_workers:
        raise ConfigError(
            f"{shared}, and parallel.restart_workers {parallel.restart_workers}: the ranks of all "
            "are one job, in which none can be replaced, so that they are lost together. Set it "
            "to 0, and have a supervisor start a new server where one ends with the exit code "
            f"{EngineError.exit_code}"
        )
    if parallel.on_replica_loss == "move":
        raise ConfigError(
            f"{shared}, and parallel.on_replica_loss is move: they are lost together, and none is "
            "left that requests could move to: set it to fail"
        )
    if parallel.executor not in (None, "processes"):
        raise ConfigError(
            f"{shared}, and parallel.executor is {parallel.executor}, where each replica is a job "
            "of its own, and experts are shared within one: set it to processes, on this host, or "
            "parallel.data to 1 and parallel.expert to parallel.tensor, which may be ranks of "
            "several hosts"
        )
    if parallel.pipeline > 1:
        raise ConfigError(
            f"{shared}, and parallel.pipeline {parallel.pipeline}: they make their steps together "
            "only without stages. Set one of the two to 1"
        )
