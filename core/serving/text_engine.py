"""``TextEngine``: prompts in, texts out, a step of the engine at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import TypeAlias

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.engine_core import EngineCore, EngineOutput, Starting
from opgraft.engine.sampling import TokenLogprobs
from opgraft.engine.stats import EngineStats
from opgraft.engine.step import Step
from opgraft.errors import EngineError, RequestError
from opgraft.models.files import opened_once
from opgraft.serving.front_end import FrontEnd
from opgraft.serving.input_processor import InputProcessor
from opgraft.serving.open_request import Answer, OpenRequest, none_open
from opgraft.serving.outputs import Logprob, RequestOutput
from opgraft.serving.step_reports import OnStep, StepReports

_NOTHING = Step((), (), (), ())

MakeInputs: TypeAlias = Callable[[OpgraftConfig, int], InputProcessor]


class TextEngine(FrontEnd):
    """The engine with the tokenizer of its model.

    Args:
        opgraft_config: of the engine.
        on_step: see ``OnStep``. If it raises, that is logged, and it is not called again.
        make_inputs: returns the ``InputProcessor`` for a config and the longest context.
        hands_over: whether requests stay open when the workers are lost, for ``surrender``, instead of failing.
        starting: see ``EngineCore``.

    Raises:
        ModelError: no model is named, or it is no decoder.
        ConfigError: the cache is too small for one request of the longest context.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(
        self,
        opgraft_config: OpgraftConfig,
        on_step: OnStep | None = None,
        make_inputs: MakeInputs = InputProcessor,
        hands_over: bool = False,
        starting: Starting = nullcontext,
    ) -> None:
        with opened_once(), ExitStack() as undo:
            self.core = EngineCore(opgraft_config, starting)
            undo.callback(self.core.shutdown)
            self.inputs = make_inputs(self.core.opgraft_config, self.core.max_model_len)
            undo.pop_all()  # nothing raised: the engine stays
        self.inputs.share_with(self.core.executor)
        self._hands_over = self.core.hands_over = hands_over
        self._open: dict[str, OpenRequest] = {}
        self._owner: dict[str, OpenRequest] = {}
        self._texts: dict[int, str] = {}
        self._reports = StepReports(self.core.stats, on_step)

    @property
    def has_work(self) -> bool:
        """Tell whether a request has not ended."""
        return bool(self._open)

    def submit(self, prepared: OpenRequest) -> RequestOutput:
        """Have a request wait for its turn, and return its output, which grows with the steps.

        Raises:
            RequestError: one of its id runs, or it could never be served.
            EngineError: the engine has stopped.
        """
        request_id = prepared.output.request_id
        self._expect_new(request_id)
        requests = [answer.request for answer in prepared.growing.values()]
        try:
            self.core.add(requests)
            self._open[request_id] = prepared
            self._owner.update(dict.fromkeys(prepared.growing, prepared))
        except BaseException:
            self.core.withdraw(requests)
            self._open.pop(request_id, None)
            self._owner = {
                child: owner for child, owner in self._owner.items() if owner is not prepared
            }
            raise
        return prepared.output

    def _expect_new(self, request_id: str) -> None:
        if request_id in self._open:
            raise RequestError(
                f"request {request_id!r} is added, and one of that id runs: give each an id of its own"
            )

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, and return what it has so far.

        Raises:
            RequestError: none of that id runs or waits.
        """
        opened = self._opened(request_id, "aborted")
        for child in list(opened.growing):
            with suppress(
                RequestError
            ):  # the core has ended it, if an error cut short the step that it ended in
                self.core.abort(child)
            self._end(opened, child, "abort")
        self._close(opened)
        self._reports.send([opened.output])
        return opened.output

    def step(self) -> list[RequestOutput]:
        """Compute a step, and return the requests that have news.

        Requests whose news an interrupt keeps from being taken are aborted, as they cannot go on without them.

        Raises:
            EngineError: the engine has stopped.
        """
        found: list[EngineOutput] = []
        taken = 0
        changed: dict[str, RequestOutput] = {}
        try:
            found = self.core.step()
            with self.core.counters.timed("text"):
                now = time.monotonic()
                for news in found:
                    opened = self._owner[news.request_id]
                    self._take(opened, news, now)
                    changed[opened.output.request_id] = opened.output
                    taken += 1
        except BaseException:
            self._give_up(found[taken:])
            raise
        outputs = list(changed.values())
        self._reports.send(outputs)
        return outputs

    @property
    def is_lost(self) -> bool:
        """Tell whether the workers are lost, and the requests that are open are to be surrendered."""
        return self._hands_over and self.core.executor.is_lost

    def take_part(self) -> None:
        """Compute a step of no requests, as others that share the model's experts compute one."""
        with suppress(EngineError):  # then the workers are lost
            self.core.executor.submit(_NOTHING)
            self.core.executor.result()

    def restart(self) -> None:
        """Start the workers again, if that is allowed.

        Raises:
            EngineError: it is not, or they are lost again.
        """
        self.core.restart()
        self.core.check_health()

    def surrender(self) -> list[OpenRequest]:
        """Forget all requests, and return them as another engine can go on with them: they have what was computed."""
        given = list(self._open.values())
        self.core.surrender()
        self._open, self._owner = {}, {}
        for opened in given:
            for answer in opened.growing.values():
                answer.request.start_anew()
        return given

    def report_failed(self, outputs: Sequence[RequestOutput], answers: int) -> None:
        """Count and report requests that were surrendered and failed, with so many answers that had not ended."""
        self.core.counters.finished["error"] += answers
        self._reports.send(outputs)

    def is_open(self, output: RequestOutput) -> bool:
        return not output.finished

    def output_of(self, request_id: str) -> RequestOutput:
        return self._opened(request_id, "streamed").output

    def _opened(self, request_id: str, what: str) -> OpenRequest:
        if request_id not in self._open:
            raise none_open(request_id, what)
        return self._open[request_id]

    def _give_up(self, lost: Sequence[EngineOutput]) -> None:
        """Abort the requests of news that were not taken, or not to their end."""
        for news in lost:
            owner = self._owner.get(news.request_id)
            if owner is not None and owner.output.request_id in self._open:
                self.abort(owner.output.request_id)
            self._owner.pop(news.request_id, None)

    def _take(self, opened: OpenRequest, news: EngineOutput, now: float) -> None:
        request_id, token, reason, error, logprobs, prompt_logprobs, refused = news
        answer = opened.growing[request_id]
        output = answer.output
        if prompt_logprobs is not None:
            opened.output.prompt_logprobs = [None, *map(self._logprobs, prompt_logprobs)]
        if token is not None:
            metrics = opened.output.metrics
            if metrics is not None:
                metrics.last_token = now
                if metrics.first_token is None:
                    metrics.admitted, metrics.first_token = answer.request.admitted, now
            output.token_ids.append(token)
            if logprobs is not None:
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs.logprob
                output.logprobs = [] if output.logprobs is None else output.logprobs
                output.logprobs.append(self._logprobs(logprobs))
            if self._show(answer, token, reason) and reason is None:
                self.core.abort(request_id, "stop")
                reason = "stop"
        if reason is not None:
            output.error, output.refused = error, refused
            self._end(opened, request_id, reason)

    def _show(self, answer: Answer, token: int, reason: str | None) -> bool:
        """Add a token to the text, and tell whether it came to a stop string."""
        if reason == "stop":
            params = answer.request.params
            if token in params.stop_token_ids:
                answer.output.stop_reason = token
            if not params.include_stop_str_in_output:
                return False
        return answer.detokenizer is not None and answer.detokenizer.add(token)

    def _end(self, opened: OpenRequest, child: str, reason: str) -> None:
        """End an answer, and forget a request all of whose answers have ended."""
        opened.end(child, reason)
        self._close(opened)
        del self._owner[child]

    def _close(self, opened: OpenRequest) -> None:
        opened.output.finished = not opened.growing
        if opened.output.finished:
            self._open.pop(opened.output.request_id, None)

    def _logprobs(self, found: TokenLogprobs) -> dict[int, Logprob]:
        """Return the likeliest tokens at a place, and the one that stands there."""
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(found.top, start=1)}
        ranked.setdefault(found.token, (found.logprob, found.rank))
        return {
            token: Logprob(value, rank, self._text(token))
            for token, (value, rank) in ranked.items()
        }

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def stats(self) -> EngineStats:
        return self.core.stats()

    def explain(self) -> Explanation:
        return self.core.explain()

    def capacity(self) -> str:
        return self.core.capacity()

    @property
    def cache_tokens(self) -> int:
        return self.core.cache_tokens

    def shutdown(self) -> None:
        self.core.shutdown()
