"""``EngineCore``: requests in, tokens out, a step at a time.

One step has three parts, in ``EngineCore.step``:

1. Schedule. ``Scheduler.schedule`` chooses the tokens to compute, gives their sequences blocks of
   the cache, and returns a ``Step``: plain data without tensors. The executor sends the step to the
   workers.
2. Run. The ``ModelRunner`` of each worker makes tensors of the step, calls the model and samples.
   The executor returns a ``StepResult``: a token for each sequence that samples, or several for
   one with a draft.
3. Update. ``Scheduler.update`` appends the tokens to their requests, and requests end. The step
   returns an ``EngineOutput`` for each new token.

For example, a request with a prompt of five tokens takes one step for the prompt, which samples the
first token, and one step for each further token.

``Scheduler(...)``, ``Worker(...)`` and ``Sampler(...)`` construct a plugin's subclass if one is
active (``PluggableClass``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple, TypeAlias

from opgraft.base.log import logger
from opgraft.base.text import described, printable
from opgraft.base.timeline import phase
from opgraft.binding.explaining import Explanation
from opgraft.binding.pluggable_class import choose_class
from opgraft.binding.provenance import explain_exception
from opgraft.config import OpgraftConfig
from opgraft.engine.lora.held import ADAPTER_UNUSABLE, HeldAdapters
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.request import FinishReason, Request
from opgraft.engine.runner.cache_layout import CacheSizes, windows_of_all
from opgraft.engine.runner.cache_room import smallest_room
from opgraft.engine.runner.compiled_model import expect_compilable
from opgraft.engine.runner.recorded_steps import blocks_of_padding, expect_recorder
from opgraft.engine.schedule.kv_cache import KVCacheManager
from opgraft.engine.schedule.scheduler import Scheduler
from opgraft.engine.schedule.stored_prefixes import StoredPrefixes
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
from opgraft.registry.state import host_state

Starting: TypeAlias = Callable[[Executor], AbstractContextManager[object]]


class EngineOutput(NamedTuple):
    """The news of one request. A named tuple is cheap to make: each sequence and step has one.

    Attributes:
        request_id: of the request.
        token: sampled in this step; ``None`` if the request ended without a token.
        finish_reason: the reason of the end; ``None`` while the request goes on.
        error: a description of the failure, for the reason ``"error"``.
        refused: True if the request asks for something impossible, and failed for this reason.
        logprobs: of the token, if the request asks for them.
        prompt_logprobs: of the prompt, once, if the request asks for them.
        error_code: the kind of the failure, if it has one.
    """

    request_id: str
    token: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: Any = None
    prompt_logprobs: Sequence[Any] | None = None
    refused: bool = False
    error_code: str | None = None


class _Failure(NamedTuple):
    """An error that ended the computation of a step."""

    step: Step
    error: BaseException


class EngineCore:
    """A scheduler and the executor that computes its steps.

    Args:
        opgraft_config: settings; by default, those of the process. Every section is used.
        starting: called with the executor. Returns a context; the workers start within.

    Attributes:
        hands_over: True if requests stay for ``surrender`` when the workers are lost. Otherwise
            they fail.
        step_failure: the exception of the last failed step, if a plugin raised it.
        stored: blocks outside of the cache; ``None`` unless ``cache.store`` is set.

    Raises:
        ModelError: no model is named, or the model has no attention layers and is no decoder.
        ConfigError: the cache is too small for one request of the longest context, or too large for
            the memory; the context is longer than the model was made for; or the devices cannot
            compute the split.
    """

    stored: StoredPrefixes | None = None

    def __init__(
        self, opgraft_config: OpgraftConfig | None = None, starting: Starting = nullcontext
    ) -> None:
        given = opgraft_config or host_state().settings().handed_down()
        self.opgraft_config = given.resolved()
        expect_compilable(self.opgraft_config)
        expect_recorder(self.opgraft_config)
        worker: type[Worker] = choose_class(Worker).cls
        worker.expect_split(self.opgraft_config.parallel)
        self.executor = executor_of(self.opgraft_config)
        self.adapters = HeldAdapters(
            self.opgraft_config, self.executor.call_all, lambda: self.scheduler.requests
        )
        with ExitStack() as undo:
            undo.callback(self.executor.shutdown)
            with starting(self.executor):
                with phase("start workers"):
                    self.executor.start()
                self._prepare()
            # Nothing raised, so the workers stay.
            undo.pop_all()
        self.hands_over = False
        self._stopped: BaseException | None = None
        self.step_failure: BaseException | None = None
        self._shut_down = False
        logger.info(self.capacity())

    def _prepare(self) -> None:
        """Load the model, and size the cache and the scheduler for it."""
        call_all = self.executor.call_all
        with phase("load model"):
            ranks = self._cache_sizes()
        self.max_model_len = self._context()
        with phase("measure memory"):
            room = smallest_room(ranks, self.opgraft_config, lambda: call_all("cache_bytes"))
            call_all("expect_memory", *room)
        self.cache = KVCacheManager(
            ranks[0].kinds,
            room.num_blocks,
            ranks[0].block_size,
            self.opgraft_config.cache.prefix_reuse,
            room.num_states,
            opgraft_config=self.opgraft_config,
        )
        # Before the memory is taken: a refusal then costs nothing.
        self._expect_room(max(sizes.bytes_per_block for sizes in ranks))
        # Compiles the model, too, if the settings ask for that.
        with phase("allocate cache"):
            call_all("allocate_cache", *room)
        self.scheduler = Scheduler(
            self.opgraft_config,
            self.cache,
            self.max_model_len,
            self.executor.call("context_fits"),
            self.executor.depth,
            self.adapters,
        )
        if self.opgraft_config.cache.store is not None:
            with phase("open the store of blocks"):
                call_all("open_store")
            saves = self.opgraft_config.handover.part != "takes"
            self.stored = StoredPrefixes(self.cache, call_all, self.scheduler.counters, saves)
            self.cache.stored = self.stored
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.vocab_size = self.executor.call("vocab_size")
        self.counters = self.scheduler.counters

    def _cache_sizes(self) -> list[CacheSizes]:
        """Load the model, and return the cache of each rank.

        All ranks have the same groups of layers, because one table of blocks serves all of them.
        """
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
        """Return the tokens of the longest context."""
        asked = self.opgraft_config.model.max_model_len
        trained = self.executor.call("trained_context")
        if asked is not None and trained is not None and asked > trained:
            name = self.opgraft_config.model.name
            raise ConfigError(
                f"model.max_model_len is {asked}, and {name} was made for contexts of up to "
                f"{trained} tokens, beyond which it answers nonsense: set it to at most {trained}"
            )
        longest = self.executor.call("max_context")
        if longest is None:
            raise ConfigError(
                "the checkpoint does not say how long a context may be: set model.max_model_len"
            )
        return int(longest)

    def _expect_room(self, bytes_per_block: int) -> None:
        """Refuse a cache that is too small for one request of the longest context."""
        step_tokens = self.opgraft_config.scheduler.max_num_batched_tokens
        needed = self.cache.most_blocks(self.max_model_len, step_tokens)
        there = self.cache.pool.num_blocks
        if needed <= there:
            return
        padding = blocks_of_padding(self.opgraft_config)
        enough = (needed + padding) * bytes_per_block
        raise ConfigError(
            f"the cache has room for {there} blocks of {bytes_per_block} bytes, and one request of "
            f"{self.max_model_len} tokens takes {needed}: raise cache.memory_bytes to "
            f"{enough}, cache.memory_share or cache.num_blocks, or lower model.max_model_len"
        )

    @property
    def cache_tokens(self) -> int:
        """Return the number of tokens of long sequences that the cache has room for."""
        kinds = self.cache.kinds
        full = sum(kind.sliding_window is None for kind in kinds)
        # Layers with a window hardly cost a long sequence anything.
        blocks_of_a_place = full or len(kinds) or 1
        places = self.cache.pool.num_blocks // blocks_of_a_place
        return places * self.cache.block_size

    def capacity(self) -> str:
        """Return the sizes of the cache as a sentence for the log."""
        cache = self.cache
        blocks = f"{cache.pool.num_blocks:,} blocks of {cache.block_size}"
        held = f"{self.cache_tokens:,} tokens in {blocks}"
        if cache.states:
            held = f"{cache.num_states:,} states and {held}"
        longest = f"the longest context has {self.max_model_len:,}"
        return f"the cache holds {held}; {longest}"

    @property
    def has_work(self) -> bool:
        """Return True while a request runs or waits, or workers compute a step without requests."""
        return self.scheduler.has_work or len(self.scheduler.under_way) > 0

    def add(self, requests: Iterable[Request]) -> None:
        """Add requests to those that wait. If one cannot be served, none is added.

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
                self.adapters.load_for(request)
        except BaseException:
            self.withdraw(given)
            raise

    def add_lora(self, wanted: LoRARequest) -> None:
        """Load an adapter before a request names it.

        Raises:
            RequestError: the adapter cannot be used.
            EngineError: the engine has stopped, or its worker is lost.
        """
        self.restart()
        self.check_health()
        self.adapters.load(wanted)

    def remove_lora(self, number: int) -> None:
        """Forget an adapter now, or after the last request that names it has ended."""
        self.adapters.remove(number)

    def restart(self) -> None:
        """Start lost workers again with an empty cache, as often as settings allow.

        Nothing happens while requests run, but held ones stay. If workers cannot start,
        ``check_health`` raises.
        """
        before = self.scheduler
        if not self.executor.can_restart or not before.only_holds or before.under_way:
            return
        counters = self.counters
        try:
            self.executor.restart(self._prepare)
            self.adapters.forget_all()
        finally:
            # The new scheduler goes on counting: metrics of a server never fall.
            self.counters = counters
            self.scheduler.counters = counters
            if self.stored is not None:
                self.stored.counters = counters
            if self.scheduler is not before:
                self.scheduler.hold_anew(before.requests)

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Forget requests that were added since the last step, without a count; others stay."""
        self.scheduler.withdraw(requests)

    def surrender(self) -> None:
        """Forget all requests, so that another engine can go on with them. None counts as ended."""
        self._recover(None)
        self.scheduler.withdraw(self.scheduler.requests)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request now.

        Raises:
            RequestError: no request of that id runs or waits.
        """
        try:
            self.scheduler.abort(request_id, reason)
        except RequestError:
            raise
        except BaseException:
            # Queues and tables may be half changed.
            self._recover(None)
            raise

    def step(self) -> list[EngineOutput]:
        """Compute a step: schedule, run, update. Return the news of the oldest step under way.

        In a pipeline, workers compute further steps beside this one, as many as there are stages.

        If workers or the update fail, the requests of their step end with the error, and others are
        computed anew. Under ``scheduler.on_step_error=stop`` all requests end, and the engine
        stops. If the choice of a step fails, or after an interrupt, all requests are computed anew,
        and the error is raised.

        Raises:
            EngineError: the engine has stopped.
        """
        self._expect_going()
        updated: Step | None = None
        try:
            refused = self._load_adapters_again()
            if refused is not None:
                return refused
            failure = self._schedule()
            # Workers failed, not the scheduler: its steps are taken back, and the cache stays.
            if failure is not None:
                return self._undo(failure)
            result = self._run()
            if isinstance(result, _Failure):
                return self._undo(result)
            updated = self.scheduler.under_way.first.step
            news = self._update(updated, result)
            self.adapters.drop_leaving()
            return news
        except BaseException as error:
            # The scheduler's queues and tables may be half changed, so the cache is emptied.
            requests = self._recover(updated)
            # Before the update, no requests are to blame: the choice of a step failed, or an
            # interrupt came.
            if updated is None or not isinstance(error, exceptions_that_fail_a_step()):
                raise
            return self._end(requests, error)

    def _load_adapters_again(self) -> list[EngineOutput] | None:
        """Load the adapters that requests need next.

        Returns:
            The news of requests without their adapters; ``None`` if all requests go on.
        """
        scheduler = self.scheduler
        # A step admits no further ones.
        waiting = scheduler.waiting[: scheduler.config.max_num_seqs]
        try:
            errors = self.adapters.load_again(scheduler.running, waiting)
        except exceptions_that_fail_a_step() as error:
            # Workers failed, not the scheduler: its steps are taken back, and the cache stays.
            self.executor.drop()
            scheduler.undo()
            unloaded = [
                each
                for each in scheduler.requests
                if each.lora is not None and each.lora_number not in self.adapters
            ]
            return self._end(unloaded, error)
        if not errors:
            return None
        for request_id in errors:
            scheduler.abort(request_id, "error")
        news = _news_of_errors(errors)
        return [each._replace(error_code=ADAPTER_UNUSABLE) for each in news]

    def _schedule(self) -> _Failure | None:
        """Choose steps and send them to the workers, until ``executor.depth`` steps are under way.

        The depth is 1, unless the model is split into stages of a pipeline.
        """
        while len(self.scheduler.under_way) < self.executor.depth:
            with self.counters.timed("schedule"):
                step = self.scheduler.schedule()
            if step is None:
                return None
            self.counters.steps += 1
            try:
                self.executor.submit(step)
            except exceptions_that_fail_a_step() as error:
                return _Failure(step, error)
        return None

    def _run(self) -> StepResult | _Failure:
        """Wait for the workers, and return the result of the step that was sent first."""
        try:
            return self.executor.result()
        except exceptions_that_fail_a_step() as error:
            return _Failure(self.scheduler.under_way.first.step, error)

    def _update(self, step: Step, result: StepResult) -> list[EngineOutput]:
        """Append sampled tokens to the requests, and return the news of all but aborted requests.

        Raises:
            EngineError: the result is not of this step.
        """
        _expect_result_of(step, result)
        with self.counters.timed("schedule"):
            errors = result.errors
            tokens = result.tokens
            # Requests aborted while the step was computed. Nobody wants their tokens any more.
            left = self.scheduler.under_way.first.left
            if left:
                errors = {
                    request_id: error
                    for request_id, error in errors.items()
                    if request_id not in left
                }
            ended = self.scheduler.update(step, tokens, errors, result.further)
            if self.stored is not None:
                self.stored.save()
            finished = {request.request_id: request.finish_reason for request in ended}
            if errors or left:
                tokens = {
                    request_id: token
                    for request_id, token in tokens.items()
                    if request_id not in errors and request_id not in left
                }
            logprobs = result.logprobs
            prompt_logprobs = result.prompt_logprobs
            # The fields of EngineOutput, in their order. A call of the class takes twice as long.
            news = [
                tuple.__new__(
                    EngineOutput,
                    (
                        request_id,
                        token,
                        finished.get(request_id),
                        None,  # error
                        logprobs.get(request_id),
                        prompt_logprobs.get(request_id),
                        False,  # refused
                        None,  # error_code
                    ),
                )
                for request_id, token in tokens.items()
            ]
        if result.further:
            news = _with_further_tokens(news, result.further)
        self._count(step, result)
        return _news_of_errors(errors, result.refused) + news

    def _count(self, step: Step, result: StepResult) -> None:
        """Count the tokens of a step, and note its time."""
        self.counters.add_seconds(result.seconds)
        self.counters.add_op_seconds(result.op_seconds)
        further = sum(map(len, result.further.values()))
        self.counters.sampled_tokens += len(result.tokens) + further
        drafting = self.scheduler.drafting
        if drafting is not None:
            # The worker's time: all ranks of a launcher must choose the same drafts.
            drafting.observe(step, sum(result.seconds.values()))

    def _undo(self, failure: _Failure) -> list[EngineOutput]:
        """End the requests of a step that failed in the workers.

        Only the runner has changed. The scheduler takes the steps back, and the cache keeps all
        contents.
        """
        self.executor.drop()
        requests = self.scheduler.undo(failure.step)
        return self._end(requests, failure.error)

    def _recover(self, step: Step | None) -> list[Request]:
        """Drop all steps and the cache's contents, and return the requests of ``step``."""
        self.executor.drop()
        return self.scheduler.recover(step)

    def _end(self, requests: Sequence[Request], error: BaseException) -> list[EngineOutput]:
        """End the requests of a failed step with the error, and return the news."""
        self.counters.failed_steps += 1
        told = explain_exception(error)
        # Any other exception would keep the tensors of the step alive through its frames.
        of_plugin = isinstance(error, PluginError) or (told is not None and told.of_plugin)
        self.step_failure = error if of_plugin else None
        message = f"the step of {_names_of_requests(requests)} failed: {described(error)}"
        if told:
            message += f" ({told})"
        for note in getattr(error, "__notes__", ()):
            message += f". {printable(str(note))}"
        if self.opgraft_config.scheduler.on_step_error == "stop":
            self._stopped = error
            message += "; the engine stops"
            requests = self.scheduler.requests
        elif self.executor.is_lost:
            requests = self.scheduler.requests
        logger.error("%s", message)
        if self.hands_over and self.executor.is_lost:
            return []
        errors = {request.request_id: message for request in requests}
        for request_id in errors:
            self.scheduler.abort(request_id, "error")
        return _news_of_errors(errors)

    def stats(self) -> EngineStats:
        """Return a snapshot of the queues and counters. Any thread may call this."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            blocks_used=self.cache.pool.num_blocks - self.cache.pool.num_free,
            num_blocks=self.cache.pool.num_blocks,
            counters=copied(self.counters),
            replica=self.opgraft_config.parallel.data_rank or 0,
        )

    def explain(self) -> Explanation:
        """Return the kernel of each op of the model and the class of each part of the engine."""
        explained: Explanation = self.executor.call("explain")
        parts: dict[str, object] = {
            "scheduler": self.scheduler,
            "kv_cache_manager": self.cache,
            "executor": self.executor,
        }
        if self.scheduler.drafting is not None:
            parts["proposer"] = self.scheduler.drafting.proposer
        return explained.within(**parts)

    def check_health(self) -> None:
        """Check that the engine can go on.

        Raises:
            EngineError: the engine has stopped, or its worker is lost.
        """
        self._expect_going()
        self.executor.check_health()

    def _expect_going(self) -> None:
        if self._shut_down:
            raise EngineError("the engine was shut down: make a new one")
        if self._stopped is not None:
            raise EngineError(
                f"the engine has stopped, because a step failed ({described(self._stopped)}) and "
                "scheduler.on_step_error is stop: start the engine or server anew, or set it to "
                "fail_requests"
            ) from self._stopped

    def shutdown(self) -> None:
        """Release the workers. The engine refuses requests that are added afterwards."""
        self._shut_down = True
        self.executor.shutdown()


def exceptions_that_fail_a_step() -> tuple[type[BaseException], ...]:
    """Return the exceptions of a step's code that end requests of the step. All others are raised.

    In the main thread an exit or an interrupt may come from a signal, and is raised on. Other
    threads receive no signals: there, only the code of a step can raise such an exception.
    """
    # For example, a kernel that calls sys.exit() fails the step in the thread of a server. In the
    # main thread, the same SystemExit ends the program.
    main = threading.current_thread() is threading.main_thread()
    return (Exception,) if main else (BaseException,)


def _news_of_errors(
    errors: Mapping[str, str], refused: Set[str] = frozenset()
) -> list[EngineOutput]:
    return [
        EngineOutput(request_id, None, "error", message, refused=request_id in refused)
        for request_id, message in errors.items()
    ]


def _with_further_tokens(
    news: Sequence[EngineOutput], further: Mapping[str, Sequence[tuple[int, Any]]]
) -> list[EngineOutput]:
    """Return the news of a step with drafts: one for each token, in their order.

    The last one of a request has the reason of its end.
    """
    found = []
    for output in news:
        found.append(output._replace(finish_reason=None))
        for token, logprobs in further.get(output.request_id, ()):
            next_output = EngineOutput(output.request_id, token, logprobs=logprobs)
            found.append(next_output)
        found[-1] = found[-1]._replace(finish_reason=output.finish_reason)
    return found


def _expect_result_of(step: Step, result: StepResult) -> None:
    """Check that a result has tokens and errors for requests of the step only."""
    sampling = {each.request_id for each in step.sequences if each.samples}
    unknown = result.tokens.keys() - sampling
    if result.further:
        unknown |= result.further.keys() - {
            each.request_id for each in step.sequences if each.draft
        }
    if result.errors:
        unknown |= result.errors.keys() - {each.request_id for each in step.sequences}
    if unknown:
        raise EngineError(
            f"the model runner has a token or an error for {sorted(unknown)[0]!r}, which the step "
            "does not sample: it is to use the ids of Step.sequences"
        )


def _names_of_requests(requests: Sequence[Request]) -> str:
    """Name requests for a message: all of them, or the first of many."""
    if not requests:
        return "no request"
    names = ", ".join(repr(request.request_id) for request in requests[:MOST_LISTED])
    if len(requests) > MOST_LISTED:
        names += f" and {len(requests) - MOST_LISTED} more"
    noun = "request" if len(requests) == 1 else "requests"
    return f"{noun} {names}"
