"""``TextEngine``: prompts in, texts out, a step of the engine at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import TypeAlias

from opgraft.base.text import described
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.core import EngineCore, EngineOutput, Starting
from opgraft.engine.request import FinishReason
from opgraft.engine.sampling import TokenLogprobs
from opgraft.engine.stats import EngineStats
from opgraft.engine.step import Step
from opgraft.errors import EngineError, RequestError
from opgraft.logger import logger
from opgraft.models.files import opened_once
from opgraft.serving.input_processor import InputProcessor
from opgraft.serving.open_request import Answer, OpenRequest, id_in_use, none_open
from opgraft.serving.outputs import Logprob, RequestOutput
from opgraft.serving.request_engine import RequestEngine
from opgraft.serving.step_reports import OnStep, StepReports

_NOTHING = Step((), (), (), ())

MakeInputs: TypeAlias = Callable[[OpgraftConfig, int], InputProcessor]


class TextEngine(RequestEngine):
    """The engine with the tokenizer of its model.

    Args:
        opgraft_config: of the engine.
        on_step: see ``OnStep``. If it raises, that is logged, and it is not called again.
        make_inputs: returns the ``InputProcessor`` for a config and the longest context.
        hands_over: whether requests stay open when the workers are lost, for ``surrender``, instead
            of failing.
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
        self.executor = self.core.executor
        self.inputs.share_with(self.executor)
        self._hands_over = self.core.hands_over = hands_over
        self._open: dict[str, OpenRequest] = {}
        self._owner: dict[str, OpenRequest] = {}
        self._texts: dict[int, str] = {}
        self._reports = StepReports(self.core.stats, on_step)

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def submit(self, prepared: OpenRequest) -> RequestOutput:
        request_id = prepared.output.request_id
        if request_id in self._open:
            raise id_in_use(request_id)
        requests = [answer.request for answer in prepared.growing.values()]
        self.core.add(requests)
        self._open[request_id] = prepared
        self._owner.update(dict.fromkeys(prepared.growing, prepared))
        return prepared.output

    def abort(self, request_id: str) -> RequestOutput:
        opened = self._open.get(request_id)
        if opened is None:
            raise none_open(request_id)
        self._end_all(opened, "abort")
        self._reports.send([opened.output])
        return opened.output

    def step(self) -> list[RequestOutput]:
        """Compute a step, and return the requests that have news.

        If the news of a request cannot be taken, the request ends with that error, and the others
        go on.

        Raises:
            EngineError: the engine has stopped.
        """
        changed: dict[str, RequestOutput] = {}
        found = self.core.step()
        with self.core.counters.timed("text"):
            now = time.monotonic()
            for news in found:
                opened = self._owner.get(news.request_id)
                if opened is None:  # an answer beside this one has failed
                    continue
                try:
                    self._take(opened, news, now)
                except Exception as error:
                    self._fail(opened, error)
                changed[opened.output.request_id] = opened.output
        outputs = list(changed.values())
        self._reports.send(outputs)
        return outputs

    def _fail(self, opened: OpenRequest, error: Exception) -> None:
        """End a request after an error that concerns no other request."""
        message = f"the news of request {opened.output.request_id!r} could not be taken: "
        message += described(error)
        logger.error("%s", message)
        for answer in opened.growing.values():
            answer.output.error = message
        self._end_all(opened, "error")

    def _end_all(self, opened: OpenRequest, reason: FinishReason) -> None:
        """End all answers of a request now."""
        for child in list(opened.growing):
            with suppress(RequestError):  # the core may have ended this answer already
                self.core.abort(child, reason)
            self._end(opened, child, reason)
        self._close(opened)

    @property
    def is_lost(self) -> bool:
        return self._hands_over and self.executor.is_lost

    def take_part(self) -> None:
        """Compute a step of no requests, as engines that share the experts of the model compute one."""
        with suppress(EngineError):  # then the workers are lost
            self.executor.submit(_NOTHING)
            self.executor.result()

    def revive(self) -> None:
        self.core.restart()

    def check_health(self) -> None:
        self.core.check_health()

    def surrender(self) -> list[OpenRequest]:
        """Forget the open requests, and return them. Another engine goes on after the tokens so far."""
        given = list(self._open.values())
        self.core.surrender()
        self._open, self._owner = {}, {}
        for opened in given:
            for answer in opened.growing.values():
                answer.request.start_anew()
        return given

    def report_failed(self, outputs: Sequence[RequestOutput], answers: int) -> None:
        """Count and report surrendered requests that failed, with the number of answers that had not ended."""
        self.core.counters.finished["error"] += answers
        self._reports.send(outputs)

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
        tokenizer = self.inputs.tokenizer
        if tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = tokenizer.decode([token], skip_special_tokens=False)
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
