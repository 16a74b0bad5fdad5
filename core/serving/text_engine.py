"""``TextEngine``: prompts in, texts out, a step of the engine at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.engine.engine_core import EngineCore, EngineOutput
from opgraft.engine.request import Request
from opgraft.engine.sampling import TokenLogprobs, bad_word_tokens
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import InputError, RequestError
from opgraft.models.config import read_config
from opgraft.models.files import open_weights, opened_once
from opgraft.serving.arguments import expect_params
from opgraft.serving.chat_template import ChatTemplate
from opgraft.serving.detokenizer import Detokenizer
from opgraft.serving.grammars import Grammars
from opgraft.serving.outputs import GrowingOutput, Logprob, RequestMetrics, RequestOutput
from opgraft.serving.prompts import Prompt, tokenized, unsalted
from opgraft.serving.step_reports import OnStep, StepReports
from opgraft.serving.stop_tokens import stop_tokens
from opgraft.serving.tokenizer import Tokenizer, find_tokenizer


@dataclass
class _Answer:
    """One of the answers of a request while it grows."""

    request: Request
    output: GrowingOutput
    detokenizer: Detokenizer | None

    @classmethod
    def of(cls, index: int, request: Request, detokenizer: Detokenizer | None) -> _Answer:
        return cls(request, GrowingOutput(index, detokenizer.written if detokenizer else StringIO()), detokenizer)


@dataclass
class OpenRequest:
    """A request with its answers that have not ended, by the ids that the engine knows them by."""

    output: RequestOutput
    growing: dict[str, _Answer]


class TextEngine:
    """The engine with the tokenizer of its model.

    Args:
        opgraft_config: of the engine.
        on_step: see ``OnStep``. If it raises, that is logged, and it is not called again.

    Raises:
        ModelError: no model is named, or it is no decoder.
        ConfigError: the cache is too small for one request of the longest context.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, opgraft_config: OpgraftConfig, on_step: OnStep | None = None) -> None:
        with opened_once(), ExitStack() as undo:
            self.core = EngineCore(opgraft_config)
            undo.callback(self.core.shutdown)
            weights = open_weights(str(self.core.opgraft_config.model.name))
            self.tokenizer = find_tokenizer(weights)
            config = read_config(weights, plain=True)
            self.eos = stop_tokens(self.tokenizer, config, weights)
            self.vocab_size = int(config.get_text_config().vocab_size)
            undo.pop_all()  # nothing raised: the engine stays
        self._open: dict[str, OpenRequest] = {}
        self._owner: dict[str, str] = {}
        self._texts: dict[int, str] = {}
        self._reports = StepReports(self.core.stats, on_step)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the model."""
        return ChatTemplate(self.expect_tokenizer())

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of structured outputs."""
        return Grammars(self.expect_tokenizer(), self.vocab_size, self.eos, self.core.executor.share)

    def expect_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            InputError: the model has none.
        """
        if self.tokenizer is None:
            raise InputError(
                "the model has no tokenizer: give prompts as token ids, or put tokenizer.json beside its weights"
            )
        return self.tokenizer

    @property
    def has_work(self) -> bool:
        """Tell whether a request has not ended."""
        return bool(self._open)

    def encode(
        self, prompt: Prompt, *, add_special_tokens: bool = True, name: str = "the prompt"
    ) -> tuple[str | None, list[int]]:
        """Return the text of a prompt, None where it is given as token ids, and its token ids; from any thread.

        Raises:
            RequestError: the prompt cannot be taken.
            InputError: it is text, and the model has no tokenizer.
        """
        return tokenized(
            prompt,
            self.expect_tokenizer() if isinstance(prompt, str) else self.tokenizer,  # type: ignore[arg-type]
            vocab_size=self.vocab_size,
            max_model_len=self.core.max_model_len,
            add_special_tokens=add_special_tokens,
            name=name,
        )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        arrival: float | None = None,
        name: str = "",
    ) -> OpenRequest:
        """Check a request and make it ready for ``submit``. It changes nothing, and so may run in another thread.

        Args:
            request_id: unique among those that have not ended.
            prompt: text or token ids.
            params: of sampling.
            priority: lower ones come first, under the policy "priority".
            cache_salt: requests of different salts share nothing in the cache.
            add_special_tokens: begin and end the text as the tokenizer does; not for the text of a chat.
            arrival: when it came, in seconds of ``time.monotonic``; now if not given.
            name: of the prompt, for errors; by its request if not given.

        Raises:
            RequestError: the prompt cannot be taken, an argument is of the wrong type, or a setting is for a token
                beyond the vocabulary.
            InputError: text, stop strings or bad words are given and the model has no tokenizer, or the structured
                output that is asked for cannot be had.
        """
        expect_params(params)
        self._expect_in_vocabulary(params)
        self._expect_ordered_by(priority)
        metrics = RequestMetrics(_arrival(arrival))
        name = name or f"the prompt of request {request_id!r}"
        prompt, salt = unsalted(prompt, name)
        text, ids = self.encode(prompt, add_special_tokens=add_special_tokens, name=name)
        requests = Request(
            request_id,
            ids,
            params,
            eos=self.eos,
            priority=priority,
            cache_salt=salt if cache_salt is None else cache_salt,
            bad_words=bad_word_tokens(params.bad_words, self.expect_tokenizer()) if params.bad_words else (),
            grammar=None if params.structured_output is None else self.grammars.of(params),
        ).split()
        answers = [_Answer.of(i, each, self._detokenizer(each)) for i, each in enumerate(requests)]
        output = RequestOutput(request_id, text, ids, [answer.output for answer in answers], metrics=metrics)
        return OpenRequest(output, {answer.request.request_id: answer for answer in answers})

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
            self._owner.update(dict.fromkeys(prepared.growing, request_id))
        except BaseException:
            self.core.withdraw(requests)
            self._open.pop(request_id, None)
            self._owner = {child: owner for child, owner in self._owner.items() if owner != request_id}
            raise
        return prepared.output

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams, **options: Any) -> RequestOutput:
        """Prepare a request and submit it; arguments and errors are those of ``prepare`` and ``submit``."""
        return self.submit(self.prepare(request_id, prompt, params, **options))

    def _expect_in_vocabulary(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            highest = max(getattr(params, name) or (), default=0)
            if highest >= self.vocab_size:
                raise RequestError(
                    f"{name} has the token id {highest!s:.20}, and the vocabulary has {self.vocab_size}: use 0 to "
                    f"{self.vocab_size - 1}",
                    name,
                )

    def _expect_ordered_by(self, priority: int) -> None:
        """Refuse a priority where the order is that of arrival."""
        policy = self.core.opgraft_config.scheduler.policy
        if policy != "priority" and priority != 0:
            raise RequestError(
                f"priority is {priority!r:.40}, and scheduler.policy is {policy}, by which it has no effect: leave it "
                "out, or set scheduler.policy to priority",
                "priority",
            )

    def _expect_new(self, request_id: str) -> None:
        if request_id in self._open:
            raise RequestError(f"request {request_id!r} is added, and one of that id runs: give each an id of its own")

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        params = request.params
        if self.tokenizer is None and not params.stop:
            return None
        return Detokenizer(
            self.expect_tokenizer(),
            request.prompt,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, and return what it has so far.

        Raises:
            RequestError: none of that id runs or waits.
        """
        opened = self._opened(request_id, "aborted")
        for child, answer in list(opened.growing.items()):
            with suppress(RequestError):  # the core has ended it, if an error cut short the step that it ended in
                self.core.abort(child)
            self._end(opened, child, answer, "abort")
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
                    opened = self._open[self._owner[news.request_id]]
                    self._take(opened, news, now)
                    changed[opened.output.request_id] = opened.output
                    taken += 1
        except BaseException:
            self._give_up(found[taken:])
            raise
        outputs = list(changed.values())
        self._reports.send(outputs)
        return outputs

    def stream(self, request_id: str) -> Generator[RequestOutput, None, None]:
        """Compute steps until a request ends, and yield its output whenever it has grown.

        A request whose iterator is closed before is aborted.

        Raises:
            RequestError: none of that id runs or waits.
        """
        output = self._opened(request_id, "streamed").output
        try:
            while not output.finished:
                if any(changed is output for changed in self.step()):
                    yield output
        finally:
            if not output.finished:
                self.abort(request_id)

    def _opened(self, request_id: str, what: str) -> OpenRequest:
        if request_id not in self._open:
            raise RequestError(
                f"request {request_id!r} cannot be {what}, as none of that id runs or waits: it has finished, or was "
                "never added; see that the id is the one that it was added by"
            )
        return self._open[request_id]

    def _give_up(self, lost: Sequence[EngineOutput]) -> None:
        """Abort the requests of news that were not taken, or not to their end."""
        for news in lost:
            owner = self._owner.get(news.request_id)
            if owner in self._open:
                self.abort(owner)
            self._owner.pop(news.request_id, None)

    def _take(self, opened: OpenRequest, news: EngineOutput, now: float) -> None:
        answer = opened.growing[news.request_id]
        output, reason = answer.output, news.finish_reason
        if news.prompt_logprobs is not None:
            opened.output.prompt_logprobs = [None, *map(self._logprobs, news.prompt_logprobs)]
        if news.token is not None:
            metrics = opened.output.metrics
            if metrics is not None:
                metrics.last_token = now
                if metrics.first_token is None:
                    metrics.admitted, metrics.first_token = answer.request.admitted, now
            output.token_ids.append(news.token)
            if news.logprobs is not None:
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + news.logprobs.logprob
                output.logprobs = [] if output.logprobs is None else output.logprobs
                output.logprobs.append(self._logprobs(news.logprobs))
            if self._show(answer, news.token, reason) and reason is None:
                self.core.abort(news.request_id, "stop")
                reason = "stop"
        if reason is not None:
            output.error, output.refused = news.error, news.refused
            self._end(opened, news.request_id, answer, reason)

    def _show(self, answer: _Answer, token: int, reason: str | None) -> bool:
        """Add a token to the text, and tell whether it came to a stop string."""
        if reason == "stop":
            params = answer.request.params
            if token in params.stop_token_ids:
                answer.output.stop_reason = token
            if not params.include_stop_str_in_output:
                return False
        if answer.detokenizer is None:
            return False
        answer.detokenizer.add(token)
        return answer.detokenizer.stop_reason is not None

    def _end(self, opened: OpenRequest, child: str, answer: _Answer, reason: str) -> None:
        output = answer.output
        if answer.detokenizer is not None:
            answer.detokenizer.finish()
            if answer.detokenizer.stop_reason is not None:
                output.stop_reason, reason = answer.detokenizer.stop_reason, "stop"
        output.finish_reason = reason
        opened.output.outputs[output.index] = output.snapshot()
        del opened.growing[child]
        self._close(opened)
        del self._owner[child]

    def _close(self, opened: OpenRequest) -> None:
        """Forget a request all of whose answers have ended."""
        opened.output.finished = not opened.growing
        if opened.output.finished:
            self._open.pop(opened.output.request_id, None)

    def _logprobs(self, found: TokenLogprobs) -> dict[int, Logprob]:
        """Return the likeliest tokens at a place, and the one that stands there."""
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(found.top, start=1)}
        ranked.setdefault(found.token, (found.logprob, found.rank))
        return {token: Logprob(value, rank, self._text(token)) for token, (value, rank) in ranked.items()}

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def shutdown(self) -> None:
        """Let go of the model and its cache."""
        self.core.shutdown()


def _arrival(given: float | None) -> float:
    if given is None:
        return time.monotonic()
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise RequestError(f"arrival is {given!r:.80}: give seconds of time.monotonic(), or None for now", "arrival")
    return given
