"""The course of a request for generated text, in any form of the answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from fastapi.responses import Response
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.sampling_params import SamplingParams
from opgraft.serving.outputs import CompletionOutput, RequestOutput
from opgraft.serving.server import conventions, sampling
from opgraft.serving.server.contradictions import expect_no_contradiction
from opgraft.serving.server.faults import at
from opgraft.serving.server.forms import form_of
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.protocol import GenerationFields
from opgraft.serving.server.service import Job, Service
from opgraft.serving.server.streams import (
    DONE,
    EventStream,
    JSONAnswer,
    News,
    SentParts,
    event,
    of_place,
    usage,
)

_B = TypeVar("_B", bound=GenerationFields)


class Generating(ABC, Generic[_B]):
    """A request, and the form of its answer.

    Args:
        service: answers the request.
        body: of the request.
        passing: the request over HTTP. Its line in the log gets more fields.
    """

    prefix: ClassVar[str]
    operation: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]
    grammar_field = "response_format"

    def __init__(self, service: Service, body: _B, passing: Passing) -> None:
        self.service = service
        self.body = body
        self.record = passing.record
        self.slot = passing.slot
        self.arrival = passing.started
        self.id = f"{self.prefix}-{passing.id}"
        self.created = int(time.time())
        self.params = SamplingParams()
        self.prompt_ids: Sequence[list[int]] = ()
        self._cached_tokens: list[int] = []
        self.lora: LoRARequest | None = None
        self.form = form_of(body)
        if self.form is not None:
            self.grammar_field = self.form.field

    @abstractmethod
    async def prompts(self) -> list[list[int]]:
        """Return the token ids of the prompts.

        Raises:
            RequestError: a prompt cannot be taken.
            InputError: the model has no tokenizer.
        """

    def short_text(self, text: str, kept: int | None) -> str:
        """Return the text of a prompt, short enough to be tokenized.

        Args:
            text: of a prompt.
            kept: tokens to keep, the last ones. None: the prompt must be short as a whole.

        Raises:
            HTTPError: the text is too long.
        """
        if kept is not None:
            return self.service.last_characters(text)
        self.service.expect_characters(text, self.prompt_field)
        return text

    def structured(self) -> dict[str, Any]:
        """Return settings of sampling. They go before the settings of the body."""
        return {}

    def counted(self, output: RequestOutput) -> int:
        """Return the number of tokens in the answers to a prompt."""
        return sum(len(answer.token_ids) for answer in output.outputs)

    def prompt_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        """Return a field with the log-probabilities of the prompt, if the request wants them."""
        if self.body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": list(map(of_place, output.prompt_logprobs or ()))}

    def prompt_tokens(self, output: RequestOutput) -> dict[str, Any]:
        """Return a field with the token ids of the prompt, if the answer has one prompt."""
        return {}

    @abstractmethod
    def deltas(
        self, index: int, output: RequestOutput, answer: CompletionOutput, news: News
    ) -> Iterator[dict[str, Any]]:
        """Yield the choices of chunks with the news of an answer, choice number ``index``."""

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """Return a whole choice."""

    async def respond(self) -> Response:
        """Answer the request, whole or as a stream.

        Raises:
            HTTPError: the request is not admitted, names a missing thing, or has failed.
            RequestError: the request cannot be taken.
            InputError: the model has no tokenizer.
            EngineError: the engine has stopped.
        """
        await self.service.check()
        self.service.expect_model(self.body.model)
        expect_no_contradiction(self.body)
        self.service.llm.engine.inputs.expect_priority(self.body.priority or 0)
        # Nothing waits until the adapter is in use, so that it cannot be unloaded in between.
        self.lora = self.service.adapters.find(self.body.model)
        news = self._answers()
        if self.body.stream:
            # An error before the first news still gets a status of its own.
            first = await anext(news)
            return EventStream(self._events(first, news))
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(news):
            async for number, output in news:
                outputs[number] = output
        whole = partial(self._respond, [outputs[number] for number in range(len(outputs))])
        if self.params.logprobs is None and self.params.prompt_logprobs is None:
            return whole()
        # Log-probabilities may take seconds to write, so a thread does.
        return await self.service.prepare(whole)

    async def _answers(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        with self.service.adapters.used(self.lora):
            job = await self._prepared()
            tokens = [0] * len(self.prompt_ids)
            self._cached_tokens = [0] * len(self.prompt_ids)
            async with aclosing(self.service.answers(job, self.slot)) as news:
                async for number, output in news:
                    tokens[number] = self.counted(output)
                    self._cached_tokens[number] = output.num_cached_tokens
                    self._note(number, output, sum(tokens))
                    if output.finished:
                        conventions.note_answer(output)
                    yield number, output

    async def _prepared(self) -> Job:
        """Read the prompts and the sampling of the request, within the limits of the server."""
        if self.service.settings.log_prompts:
            logged = self.body.model_dump(include={self.prompt_field})
            self.record["prompt"] = logged[self.prompt_field]
        with at(self.prompt_field):
            self.prompt_ids = await self.prompts()
        sampling.expect_prompts(self.body, self.prompt_ids, self.service)
        settled = self.structured()
        self.params = sampling.params_of(
            self.body, self.prompt_ids, self.service, self.form, settled
        )
        if self.params.structured_output is not None:
            with at(self.grammar_field):
                await self.service.llm.compile(self.params)
        prompt_tokens = sum(map(len, self.prompt_ids))
        answers = len(self.prompt_ids) * self.params.n
        certain = answers * sampling.certain_tokens(self.body, self.params)
        sampling.expect_few_logprobs(self.params, prompt_tokens, certain, self.service)
        self.record |= {"prompt_tokens": prompt_tokens, "completion_tokens": 0}
        self._note_for_spans(prompt_tokens)
        return Job(
            self.id,
            self.arrival,
            self.prompt_ids,
            self.params,
            self.grammar_field,
            self.body.priority or 0,
            self.body.cache_salt,
            self.lora,
        )

    def _note_for_spans(self, prompt_tokens: int) -> None:
        further = {
            "gen_ai.response.id": self.id,
            **conventions.of_sampling(self.params, self.service.settings.log_prompts),
        }
        conventions.note_request(self.operation, self.model_name, prompt_tokens, further)

    def _note(self, number: int, output: RequestOutput, answer_tokens: int) -> None:
        """Note the progress for the log, and check the number of log-probabilities."""
        self.record["completion_tokens"] = answer_tokens
        seconds = round(time.monotonic() - self.arrival, 6)
        self.record.setdefault("seconds_to_first_token", seconds)
        prompt_tokens = self.record["prompt_tokens"]
        sampling.expect_few_logprobs(self.params, prompt_tokens, answer_tokens, self.service)
        if self.service.settings.log_prompts:
            answers = {f"{number}/{answer.index}": answer.text for answer in output.outputs}
            self.record.setdefault("answers", {}).update(answers)

    async def _events(
        self,
        first: tuple[int, RequestOutput],
        news: AsyncGenerator[tuple[int, RequestOutput], None],
    ) -> AsyncGenerator[bytes, None]:
        reader = SentParts()
        for written in self.beginning():
            yield written
        for written in self._chunks(first, reader):
            yield written
        async with aclosing(news):
            async for found in news:
                for written in self._chunks(found, reader):
                    yield written
        for written in self.ending():
            yield written

    def beginning(self) -> Iterator[bytes]:
        """Yield the events of a stream before all chunks."""
        yield from ()

    def written(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a chunk."""
        yield event(chunk)

    def ending(self) -> Iterator[bytes]:
        """Yield the events of a stream behind all chunks."""
        if self._tells_usage:
            yield event(
                {
                    **self._head(self.chunk_object),
                    "choices": [],
                    "usage": self._usage(),
                }
            )
        yield DONE

    @property
    def _tells_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    def _chunks(self, found: tuple[int, RequestOutput], reader: SentParts) -> Iterator[bytes]:
        number, output = found
        for answer in output.outputs:
            news = reader.news(number, answer)
            if news is None:
                continue
            index = number * self.params.n + answer.index
            head = self._head(self.chunk_object)
            if news.first:
                head |= self.prompt_tokens(output)
            for choice in self.deltas(index, output, answer, news):
                yield from self.written(
                    {
                        **head,
                        "choices": [choice],
                        **self._usage_so_far(),
                    }
                )
                head = self._head(self.chunk_object)

    def _usage_so_far(self) -> dict[str, Any]:
        """Return the usage of a chunk in a stream with usage: null, or the tokens so far."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": self._usage() if options.continuous_usage_stats else None}

    def _respond(self, outputs: Sequence[RequestOutput]) -> Response:
        return JSONAnswer(self.whole(outputs))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for number, output in enumerate(outputs):
            for answer in output.outputs:
                index = number * self.params.n + answer.index
                choices.append(self.choice(index, output, answer))
        head = self._head(self.whole_object)
        told = {
            "choices": choices,
            "usage": self._usage(),
            **self.prompt_tokens(outputs[0]),
        }
        return {**head, **told}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
        }

    @property
    def model_name(self) -> str:
        """The name of the model for answers: that of the adapter, if the request names one."""
        return self.service.name if self.lora is None else self.lora.lora_name

    @property
    def cached_tokens(self) -> int:
        """The tokens of the prompts that the cache held."""
        return sum(self._cached_tokens)

    def _usage(self) -> dict[str, Any]:
        prompts = self.record["prompt_tokens"]
        answers = self.record["completion_tokens"]
        return usage(prompts, answers, self.cached_tokens)
