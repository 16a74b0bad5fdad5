"""``PrefillProcess``: an engine with a worker process of its own, which computes prompts alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.core import EngineCore
from opgraft.engine.request import Request
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import EngineStats
from opgraft.errors import EngineError
from opgraft.models.files import opened_once
from opgraft.serving.engine_thread import EngineThread, NewsReader
from opgraft.serving.open_request import Answer, OpenRequest, none_open
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.request_engine import RequestEngine

_RESTARTS = 10
"""Starts of the process anew, at least. Without it, the engine computes all prompts."""

_WRITE_SECONDS = 60.0
"""Seconds for writing the last blocks of a prompt. Blocks that come later are computed."""

_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

Done = Callable[[str, str], None]
"""Called with the name of a prompt, and the error; the error is empty if all blocks are stored."""


def config_of_prefill(opgraft_config: OpgraftConfig) -> OpgraftConfig:
    """Return the settings of the process for the settings of an engine with a store."""
    parallel = opgraft_config.parallel
    restarts = max(parallel.restart_workers, _RESTARTS)
    return replace(
        opgraft_config,
        handover=replace(opgraft_config.handover, part="computes"),
        parallel=replace(parallel, executor="processes", restart_workers=restarts),
        # One prompt after the other: the first is done sooner, and the last is no later.
        scheduler=replace(
            opgraft_config.scheduler,
            max_num_seqs=1,
            chunked_prefill=True,
            on_step_error="fail_requests",
        ),
        speculation=replace(opgraft_config.speculation, method=None),
    )


class PrefillEngine(RequestEngine):
    """Computes prompts, and stores their blocks.

    Args:
        opgraft_config: of ``config_of_prefill``.

    Raises:
        ConfigError, EngineError: as ``EngineCore``.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        with opened_once():
            self.core = EngineCore(opgraft_config)
        self.executor = self.core.executor
        self._open: dict[str, OpenRequest] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def submit(self, prepared: OpenRequest) -> RequestOutput:
        self.core.add(answer.request for answer in prepared.growing.values())
        self._open[prepared.output.request_id] = prepared
        return prepared.output

    def abort(self, request_id: str) -> RequestOutput:
        opened = self._open.pop(request_id, None)
        if opened is None:
            raise none_open(request_id)
        self.core.abort(request_id)
        opened.abort()
        return opened.output

    def step(self) -> list[RequestOutput]:
        ended = []
        for news in self.core.step():
            # The one sampled token is not used. The engine samples it again, by its own settings.
            if news.finish_reason is not None:
                opened = self._open.pop(news.request_id)
                opened.growing[news.request_id].output.error = news.error
                opened.end(news.request_id, news.finish_reason)
                ended.append(opened.output)
        if ended and self.core.stored is not None:
            self.core.stored.finish(_WRITE_SECONDS)
            # The engine removes blocks that it has taken. A block that this cache still has would
            # not be written again.
            self.core.cache.pool.forget()
        return ended

    def revive(self) -> None:
        self.core.restart()

    def check_health(self) -> None:
        self.core.check_health()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def explain(self) -> Explanation:
        return self.core.explain()

    def capacity(self) -> str:
        return self.core.capacity()

    def shutdown(self) -> None:
        self.core.shutdown()


class _Reader(NewsReader):
    """Waits for the end of a prompt."""

    def __init__(self, name: str, done: Done) -> None:
        super().__init__(name)
        self._done = done

    def put(self, output: RequestOutput) -> bool:
        if output.finished:
            (answer,) = output.outputs
            self._done(self.request_id, answer.error or "")
        return not self.left

    def fail(self, error: BaseException) -> None:
        self._done(self.request_id, str(error))


class PrefillProcess:
    """The thread of a ``PrefillEngine``, for the thread of another engine.

    Args:
        opgraft_config: of ``config_of_prefill``.
        done: called for each prompt that ends, in any thread.

    Raises:
        ConfigError, EngineError: the process cannot start.
    """

    def __init__(self, opgraft_config: OpgraftConfig, done: Done) -> None:
        self._done = done
        self._slow = opgraft_config.handover.seconds
        self._readers: dict[str, _Reader] = {}
        self.thread = EngineThread(partial(PrefillEngine, opgraft_config))
        self.thread.wait()

    def fault(self) -> str:
        """Return why the process computes no prompt now; empty if it does.

        A lost process starts again meanwhile, unless it was lost too often.
        """
        thread = self.thread
        executor = thread.engine.executor
        try:
            thread.check()
            thread.engine.check_health()
        except EngineError as error:
            return str(error)
        if executor.is_restarting:
            return "it starts again"
        if executor.is_lost:
            reason = executor.loss
            thread.look()
            return reason
        if thread.busy_seconds > self._slow:
            return f"its step takes more than handover.seconds, {self._slow:g}"
        return ""

    def ask(self, name: str, request: Request) -> None:
        """Begin with the prompt of a request.

        Raises:
            EngineError: the thread has ended.
        """
        copy = Request(
            name,
            request.prompt,
            _PARAMS,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        answer = Answer.of(0, copy, None)
        output = RequestOutput(name, None, copy.prompt, [answer.output])
        reader = _Reader(name, self._done)
        opened = OpenRequest(output, {name: answer})
        opening = self.thread.call(self.thread.open, reader, opened)
        self._readers[name] = reader

        def note(_: object) -> None:
            error = None if opening.cancelled() else opening.exception()
            if error is not None:
                self._done(name, str(error))

        opening.add_done_callback(note)

    def forget(self, name: str) -> None:
        """Forget a prompt. If it is still computed, it leaves after the present step."""
        reader = self._readers.pop(name, None)
        if reader is None:
            return
        reader.left = True
        try:
            self.thread.call(self.thread.close, reader)
        # It has ended, with the prompt.
        except EngineError:
            return

    def shutdown(self, patience: float) -> None:
        """End the process, in the middle of a step or start that takes longer than the patience."""
        self.thread.stop()
        self.thread.join(patience)
        # Ends the workers, so that a step that still waits for them fails.
        self.thread.engine.executor.shutdown()
        self.thread.join(patience)
