"""``EngineCore``: requests in, tokens out, a step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple, TypeAlias

from opgraft.base.text import described
from opgraft.binding.explaining import Explanation
from opgraft.binding.pluggable_class import choose_class
from opgraft.binding.provenance import explain_exception
from opgraft.config import OpgraftConfig
from opgraft.engine.request import FinishReason, Request
from opgraft.engine.runner.cache_layout import CacheSizes, windows_of_all
from opgraft.engine.runner.cache_room import smallest_room
from opgraft.engine.runner.compiled_model import expect_compilable
from opgraft.engine.schedule.kv_cache import KVCacheManager
from opgraft.engine.schedule.scheduler import Scheduler
from opgraft.engine.stats import EngineStats, copied
from opgraft.engine.step import Step, StepResult
from opgraft.engine.workers.executor import Executor
from opgraft.engine.workers.executors import executor_of
from opgraft.engine.workers.worker import Worker
from opgraft.errors import (
    MOST_LISTED,
    ConfigError,
    EngineError,
    ModelError,
    PluginError,
    RequestError,
)
from opgraft.logger import logger
from opgraft.registry.state import host_state

Starting: TypeAlias = Callable[[Executor], AbstractContextManager[object]]


class EngineOutput(NamedTuple):
    """The news of one request; a named tuple, as one is made per sequence and step.

    Attributes:
        token: sampled in this step; ``None`` where the request ended without one.
        finish_reason: why it ended; ``None`` while it goes on.
        error: what failed, for the reason ``"error"``.
        refused: whether it failed by what the request asks for.
        logprobs: of the token, where they are asked for.
        prompt_logprobs: of the prompt, once, where they are asked for.
    """

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: Any = None
    prompt_logprobs: Sequence[Any] | None = None
    refused: bool = False


class _Failure(NamedTuple):
    """An error of a step that was not computed to its end."""

    step: Step
    error: BaseException


class EngineCore:
    """A scheduler and the executor that computes its steps.

    Args:
        opgraft_config: the process's where not given; every section is read from it.
        starting: called with the executor, for a context in which the workers start and prepare.

    Attributes:
        hands_over: whether requests stay when the workers are lost, for ``surrender``, instead of
            failing.
        step_failure: the exception of the last failed step, if a plugin raised it.

    Raises:
        ModelError: no model is named, or it has no attention layers and so is no decoder.
        ConfigError: the cache is too small for one request of the longest context, or too large for
            the memory, or the context is longer than the model was made for, or the devices cannot
            compute the split.
    """

    def __init__(
        self, opgraft_config: OpgraftConfig | None = None, starting: Starting = nullcontext
    ) -> None:
        given = opgraft_config or host_state().settings().handed_down()
        self.opgraft_config = given.resolved()
        expect_compilable(self.opgraft_config)
        worker: type[Worker] = choose_class(Worker).cls
        worker.expect_split(self.opgraft_config.parallel)
        self.executor = executor_of(self.opgraft_config)
        with ExitStack() as undo:
            undo.callback(self.executor.shutdown)
            with starting(self.executor):
                self.executor.start()
                self._prepare()
            undo.pop_all()  # nothing raised: the worker stays
        self.hands_over = False
        self._stopped: BaseException | None = None
        self.step_failure: BaseException | None = None
        self._shut_down = False
        logger.info(self.capacity())

    def _prepare(self) -> None:
        ranks = self._cache_sizes()
        self.max_model_len = self._context()
        room = smallest_room(
            ranks, self.opgraft_config, lambda: self.executor.call_all("cache_bytes")
        )
        self.executor.call_all("expect_memory", *room)
        first = ranks[0]
        reuse = self.opgraft_config.cache.prefix_reuse
        self.cache = KVCacheManager(
            first.kinds,
            room.num_blocks,
            first.block_size,
            reuse,
            room.num_states,
            opgraft_config=self.opgraft_config,
        )
        self._expect_room(max(sizes.bytes_per_block for sizes in ranks))
        self.executor.call_all("allocate_cache", *room)
        fits = self.executor.call("context_fits")
        depth = self.executor.depth
        self.scheduler = Scheduler(self.opgraft_config, self.cache, self.max_model_len, fits, depth)
        self.counters = self.scheduler.counters

    def _cache_sizes(self) -> list[CacheSizes]:
        """Have the model loaded; return which cache each rank needs, with groups of layers that are the same on all."""
        ranks: list[CacheSizes] = self.executor.call_all("load_model")
        if not any(sizes.bytes_per_block or sizes.bytes_per_state for sizes in ranks):
            reason = self.executor.call("why_uncached") or (
                "it cannot generate. If it is an encoder, LLM.embed gives the vectors of texts"
            )
            name = self.opgraft_config.model.name
            raise ModelError(f"the model {name} has no attention layers with a cache: {reason}")
        windows = windows_of_all(ranks)
        if any(sizes.windows != windows for sizes in ranks):
            ranks = self.executor.call_all("group_cache", windows)
        return ranks

    def _context(self) -> int:
        asked = self.opgraft_config.model.max_model_len
        trained = self.executor.call("trained_context")
        if asked is not None and trained is not None and asked > trained:
            raise ConfigError(
                f"model.max_model_len is {asked}, and {self.opgraft_config.model.name} was made for contexts of up to "
                f"{trained} tokens, beyond which it answers nonsense: set it to at most {trained}"
            )
        longest = self.executor.call("max_context")
        if longest is None:
            raise ConfigError(
                "the checkpoint does not say how long a context may be: set model.max_model_len"
            )
        return int(longest)

    def _expect_room(self, bytes_per_block: int) -> None:
        needed = self.cache.most_blocks(
            self.max_model_len, self.opgraft_config.scheduler.max_num_batched_tokens
        )
        there = self.cache.pool.num_blocks
        if needed > there:
            raise ConfigError(
                f"the cache has room for {there} blocks of {bytes_per_block} bytes, and one request of "
                f"{self.max_model_len} tokens takes {needed}: raise cache.memory_bytes to "
                f"{needed * bytes_per_block}, cache.memory_share or cache.num_blocks, or lower "
                "model.max_model_len"
            )

    @property
    def cache_tokens(self) -> int:
        """Return how many tokens of long sequences the cache holds."""
        kinds = self.cache.kinds
        full = sum(kind.sliding_window is None for kind in kinds)
        blocks_of_a_place = full or len(kinds) or 1
        return self.cache.pool.num_blocks // blocks_of_a_place * self.cache.block_size

    def capacity(self) -> str:
        """Say in words what the cache holds."""
        states = f"{self.cache.num_states:,} states and " if self.cache.states else ""
        blocks = f"{self.cache.pool.num_blocks:,} blocks of {self.cache.block_size}"
        held = f"the cache holds {states}{self.cache_tokens:,} tokens in {blocks}"
        return f"{held}; the longest context has {self.max_model_len:,}"

    @property
    def has_work(self) -> bool:
        """Tell whether a request runs or waits, or a step of one that has ended is still computed."""
        return self.scheduler.has_work or len(self.scheduler.steps) > 0

    def add(self, requests: Iterable[Request]) -> None:
        """Have requests wait for their turn: all of them, or none if one cannot be served.

        Raises:
            RequestError: an id is in use, or a request can never be served.
            EngineError: the engine has stopped, or its worker is lost.
        """
        self.restart()
        self.check_health()
        given = list(requests)
        try:
            for request in given:
                self.executor.expect_servable(request)
                self.scheduler.add(request)
        except BaseException:
            self.withdraw(given)
            raise

    def restart(self) -> None:
        """Start workers that are lost again, as often as that is allowed, with an empty cache; not while requests run.

        Where they cannot be started, ``check_health`` says why.
        """
        if self.executor.can_restart and not self.has_work:
            counters = self.counters
            try:
                self.executor.restart(self._prepare)
            finally:
                self.counters = self.scheduler.counters = counters

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Forget requests that were added since the last step, as if they had not been; others are left alone."""
        self.scheduler.withdraw(requests)

    def surrender(self) -> None:
        """Forget all requests, none of which is counted as ended, so that another engine can go on with them."""
        self._recover(None)
        self.scheduler.withdraw(self.scheduler.requests)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request now.

        Raises:
            RequestError: none of that id runs or waits.
        """
        try:
            self.scheduler.abort(request_id, reason)
        except RequestError:
            raise
        except BaseException:
            self._recover(None)
            raise

    def step(self) -> list[EngineOutput]:
        """Compute a step and return the news of its requests; steps behind it may be computed beside it.

        If an error is raised in the middle of it, its requests end with that error and the others
        go on, those of steps behind it anew; under ``scheduler.on_step_error=stop`` all requests
        end, and the engine stops. After an interrupt requests are computed anew.

        Raises:
            EngineError: the engine has stopped.
        """
        self._expect_going()
        taken: Step | None = None
        try:
            found = self._compute()
            if isinstance(found, _Failure):
                self.executor.drop()
                return self._step_failed(self.scheduler.undo(found.step), found.error)
            taken = self.scheduler.steps.first.step
            return self._taken(taken, found)
        except BaseException as error:  # with queues and tables half changed
            batch = self._recover(taken)
            if taken is None or not isinstance(error, step_failures()):
                raise
            return self._step_failed(batch, error)

    def _compute(self) -> StepResult | _Failure:
        """Have steps computed, as many as are useful at once, and return the result of the first.

        Where that fails, nothing has changed but the runner, and the cache keeps its contents.
        """
        while len(self.scheduler.steps) < self.executor.depth:
            with self.counters.timed("schedule"):
                step = self.scheduler.schedule()
            if step is None:
                break
            self.counters.steps += 1
            try:
                self.executor.submit(step)
            except step_failures() as error:
                return _Failure(step, error)
        try:
            return self.executor.result()
        except step_failures() as error:
            return _Failure(self.scheduler.steps.first.step, error)

    def _recover(self, step: Step | None) -> list[Request]:
        self.executor.drop()
        return self.scheduler.recover(step)

    def stats(self) -> EngineStats:
        """Return a snapshot of what runs and of the counters, from any thread."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            blocks_used=self.cache.pool.num_blocks - self.cache.pool.num_free,
            num_blocks=self.cache.pool.num_blocks,
            counters=copied(self.counters),
            replica=self.opgraft_config.parallel.data_rank or 0,
        )

    def explain(self) -> Explanation:
        """Tell which kernel runs each op of the model, and of which classes the parts of the engine are, and why."""
        explained: Explanation = self.executor.call("explain")
        return explained.within(
            scheduler=self.scheduler, kv_cache_manager=self.cache, executor=self.executor
        )

    def check_health(self) -> None:
        """Raise where the engine cannot go on.

        Raises:
            EngineError: it has stopped, or its worker is lost.
        """
        self._expect_going()
        self.executor.check_health()

    def _expect_going(self) -> None:
        if self._shut_down:
            raise EngineError("the engine was shut down: make a new one")
        if self._stopped is not None:
            raise EngineError(
                f"the engine has stopped, because a step failed ({described(self._stopped)}) and "
                "scheduler.on_step_error is stop: start the engine or server anew, or set it to fail_requests"
            ) from self._stopped

    def _step_failed(self, batch: Sequence[Request], error: BaseException) -> list[EngineOutput]:
        self.counters.failed_steps += 1
        told = explain_exception(error)
        # Any other exception would keep the tensors of the step alive through its frames.
        of_plugin = isinstance(error, PluginError) or (told is not None and told.of_plugin)
        self.step_failure = error if of_plugin else None
        message = f"the step of {_named(batch)} failed: {described(error)}"
        if told:
            message += f" ({told})"
        if self.opgraft_config.scheduler.on_step_error == "stop":
            self._stopped = error
            message += "; the engine stops"
            batch = self.scheduler.requests
        elif self.executor.is_lost:
            batch = self.scheduler.requests
        logger.error("%s", message)
        if self.hands_over and self.executor.is_lost:
            return []
        errors = dict.fromkeys((request.request_id for request in batch), message)
        for request_id in errors:
            self.scheduler.abort(request_id, "error")
        return _failed(errors)

    def _taken(self, step: Step, result: StepResult) -> list[EngineOutput]:
        """Take in the result of a step, and return the news that it makes of those that have not left it.

        Raises:
            EngineError: it is none of this step.
        """
        _expect_result_of(step, result)
        with self.counters.timed("schedule"):
            left = self.scheduler.steps.first.left
            errors = result.errors
            if left:
                errors = {name: error for name, error in errors.items() if name not in left}
            ended = self.scheduler.update(step, result.tokens, errors)
            finished = {each.request_id: each.finish_reason for each in ended}
            logprobs = result.logprobs
            prompt_logprobs = result.prompt_logprobs
            tokens = result.tokens
            if errors or left:
                tokens = {
                    name: token
                    for name, token in tokens.items()
                    if name not in errors and name not in left
                }
            news = [  # by half the time of a call of the class
                tuple.__new__(
                    EngineOutput,
                    (
                        name,
                        token,
                        finished.get(name),
                        None,
                        logprobs.get(name),
                        prompt_logprobs.get(name),
                        False,
                    ),
                )
                for name, token in tokens.items()
            ]
        self.counters.add_seconds(result.seconds)
        self.counters.sampled_tokens += len(result.tokens)
        return _failed(errors, result.refused) + news

    def shutdown(self) -> None:
        """Let go of the workers; requests that are added afterwards are refused."""
        self._shut_down = True
        self.executor.shutdown()


def step_failures() -> tuple[type[BaseException], ...]:
    """Return the exceptions that fail a step.

    In the main thread an exit or an interrupt may be a signal's, and is raised on. No signal comes
    to another thread: there only the code of a step can have raised the exception.
    """
    main = threading.current_thread() is threading.main_thread()
    return (Exception,) if main else (BaseException,)


def _failed(errors: Mapping[str, str], refused: Set[str] = frozenset()) -> list[EngineOutput]:
    return [
        EngineOutput(request_id, None, "error", message, refused=request_id in refused)
        for request_id, message in errors.items()
    ]


def _expect_result_of(step: Step, result: StepResult) -> None:
    """Raise where a result has tokens or errors for others than those that a step computes."""
    unknown = result.tokens.keys() - {each.request_id for each in step.sequences if each.samples}
    if result.errors:
        unknown |= result.errors.keys() - {each.request_id for each in step.sequences}
    if unknown:
        raise EngineError(
            f"the model runner has a token or an error for {sorted(unknown)[0]!r}, which the step does not sample: it "
            "is to use the ids of Step.sequences"
        )


def _named(requests: Sequence[Request]) -> str:
    """Name requests for a message: all of them, or the first of many."""
    if not requests:
        return "no request"
    names = ", ".join(repr(request.request_id) for request in requests[:MOST_LISTED])
    if len(requests) > MOST_LISTED:
        names += f" and {len(requests) - MOST_LISTED} more"
    noun = "request" if len(requests) == 1 else "requests"
    return f"{noun} {names}"
