"""``TextEngine``: prompts in, texts out, a step of the engine at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import TypeAlias

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.base.timeline import phase
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.core import EngineCore, EngineOutput, Starting
from opgraft.engine.request import FinishReason
from opgraft.engine.sampling import TokenLogprobs
from opgraft.engine.stats import EngineStats
from opgraft.engine.step import Step
from opgraft.errors import EngineError, RequestError
from opgraft.models.files import opened_once
from opgraft.serving.input_processor import InputProcessor
from opgraft.serving.open_request import Answer, OpenRequest, id_in_use, none_open
from opgraft.serving.outputs import CompletionOutput, Logprob, RequestOutput
from opgraft.serving.request_engine import RequestEngine
from opgraft.serving.step_reports import OnStep, StepReports

_NOTHING = Step((), (), (), ())

MakeInputs: TypeAlias = Callable[[OpgraftConfig, int], InputProcessor]


class TextEngine(RequestEngine):
    """The engine with the tokenizer of its model.

    Args:
        opgraft_config: of the engine.
        on_step: see ``OnStep``. A function that raises an error is logged and not called again.
        make_inputs: returns the ``InputProcessor`` for a config and the longest context.
        hands_over: True if requests stay open for ``surrender`` when the workers are lost.
            Otherwise they fail.
        starting: see ``EngineCore``.

    Raises:
        ModelError: no model is named, or the model is no decoder.
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
            with phase("read tokenizer"):
                self.inputs = make_inputs(self.core.opgraft_config, self.core.max_model_len)
            # Nothing raised, so the engine stays.
            undo.pop_all()
        self.executor = self.core.executor
        self.inputs.share_with(self.executor)
        self.core.hands_over = hands_over
        self._hands_over = hands_over
        self._replica = self.core.opgraft_config.parallel.data_rank or 0
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
        """Compute a step, and return the outputs of requests with news.

        If an error is raised while the text of a request grows, the request ends with this error,
        and the others go on.

        Raises:
            EngineError: the engine has stopped.
        """
        changed: dict[str, RequestOutput] = {}
        found = self.core.step()
        with self.core.counters.timed("text"):
            now = time.monotonic()
            for news in found:
                opened = self._owner.get(news.request_id)
                # Another answer of the request has failed in this step, or the text of an earlier
                # token of the step has a stop string.
                if opened is None:
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
            # The core may have ended this answer already.
            with suppress(RequestError):
                self.core.abort(child, reason)
            self._end(opened, child, reason)
        self._close(opened)

    @property
    def is_lost(self) -> bool:
        return self._hands_over and self.executor.is_lost

    def take_part(self) -> None:
        """Compute a step without requests, because engines with the same experts compute one."""
        # The error of lost workers is noticed by the next check.
        with suppress(EngineError):
            self.executor.submit(_NOTHING)
            self.executor.result()

    def revive(self) -> None:
        self.core.restart()

    def check_health(self) -> None:
        self.core.check_health()

    def surrender(self) -> list[OpenRequest]:
        """Forget the open requests, and return them.

        Another engine can go on after the tokens so far.
        """
        given = list(self._open.values())
        self.core.surrender()
        self._open = {}
        self._owner = {}
        for opened in given:
            for answer in opened.growing.values():
                # The blocks of the cache are lost with the workers.
                answer.request.start_anew()
        return given

    def report_failed(self, outputs: Sequence[RequestOutput], answers: int) -> None:
        """Count and report surrendered requests that failed.

        Args:
            outputs: of the requests.
            answers: number of their unfinished answers.
        """
        self.core.counters.finished["error"] += answers
        self._reports.send(outputs)

    def _take(self, opened: OpenRequest, news: EngineOutput, now: float) -> None:
        """Add the news of one answer to the output of its request.

        Args:
            opened: the request.
            news: of an answer of the request.
            now: moment of the step, in seconds of ``time.monotonic()``.
        """
        request_id, token, reason, error, logprobs, prompt_logprobs, refused, error_code = news
        answer = opened.growing[request_id]
        output = answer.output
        if prompt_logprobs is not None:
            # Nothing comes before the first token, so it has none.
            opened.output.prompt_logprobs = [None, *map(self._logprobs, prompt_logprobs)]
        if token is not None:
            metrics = opened.output.metrics
            if metrics is not None:
                metrics.last_token = now
                # Another engine may have lost the request after some tokens.
                metrics.replica = self._replica
                if metrics.first_token is None:
                    metrics.admitted = answer.request.admitted
                    metrics.first_token = now
                    opened.output.num_cached_tokens = answer.request.num_cached
            output.token_ids.append(token)
            if logprobs is not None:
                self._take_logprobs(output, logprobs)
            if self._show(answer, token, reason) and reason is None:
                # A later token of the same step may have ended the request already.
                if answer.request.status != "finished":
                    self.core.abort(request_id, "stop")
                reason = "stop"
        if reason is not None:
            output.error = error
            output.refused = refused
            output.error_code = error_code
            self._end(opened, request_id, reason)

    def _take_logprobs(self, output: CompletionOutput, found: TokenLogprobs) -> None:
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + found.logprob
        if output.logprobs is None:
            output.logprobs = []
        output.logprobs.append(self._logprobs(found))

    def _show(self, answer: Answer, token: int, reason: str | None) -> bool:
        """Add a token to the text, and return True if the text now has a stop string."""
        # The engine has found a stop token. Stop strings are found here, in the text.
        if reason == "stop":
            params = answer.request.params
            if token in params.stop_token_ids:
                answer.output.stop_reason = token
            if not params.include_stop_str_in_output:
                return False
        return answer.detokenizer is not None and answer.detokenizer.add(token)

    def _end(self, opened: OpenRequest, child: str, reason: str) -> None:
        """End an answer, and forget the request after its last answer."""
        opened.end(child, reason)
        self._close(opened)
        del self._owner[child]

    def _close(self, opened: OpenRequest) -> None:
        opened.output.finished = not opened.growing
        if opened.output.finished:
            self._open.pop(opened.output.request_id, None)

    def _logprobs(self, found: TokenLogprobs) -> dict[int, Logprob]:
        """Return the likeliest tokens at a place, and the token of the output."""
        logprobs = {}
        for rank, (token, value) in enumerate(found.top, start=1):
            logprobs[token] = Logprob(value, rank, self._text(token))
        if found.token not in logprobs:
            text = self._text(found.token)
            logprobs[found.token] = Logprob(found.logprob, found.rank, text)
        return logprobs

    def _text(self, token: int) -> str | None:
        """Return the text of a single token; None without a tokenizer."""
        tokenizer = self.inputs.tokenizer
        if tokenizer is None:
            return None
        text = self._texts.get(token)
        # Frequent tokens come back at many places.
        if text is None:
            text = tokenizer.decode([token], skip_special_tokens=False)
            self._texts[token] = text
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
