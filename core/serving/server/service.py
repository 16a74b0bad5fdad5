"""The served model, with the limits of requests and the requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from opgraft.base.text import printable
from opgraft.base.timeline import phase
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig, text_of
from opgraft.config.declaration import values_of
from opgraft.engine.lora.held import ADAPTER_UNUSABLE
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import EngineStats
from opgraft.errors import EngineError, HTTPError, RequestError
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.serving.async_llm import AsyncLLM
from opgraft.serving.chat_format import texts_of
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.prometheus import PrometheusExporter
from opgraft.serving.server.adapters import ServedAdapters
from opgraft.serving.server.admission import Admission, Slot
from opgraft.serving.server.faults import worded_for_clients
from opgraft.serving.server.http_metrics import HTTPMetrics
from opgraft.serving.server.response_store import ResponseStore
from opgraft.serving.tokenizer import Tokenizer
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    # Needs the extra otel.
    from opgraft.serving.server.tracing import Tracing

_T = TypeVar("_T")
_CHARACTERS = 64
"""Characters for each token of the context. A longer text is not tokenized."""

_WHOLE = ". For this model, a library makes token ids of whole chats, and truncation comes after"
"""Ends the message about a chat that has too many characters for a library."""

TIME_OPS_EVERY = 256
"""One step in so many times its ops, if the settings leave that open."""


@dataclass(frozen=True)
class Job:
    """The prompts of a request, and the way to answer them.

    Attributes:
        request_id: the id.
        arrival: the time of arrival, by ``time.monotonic``.
        prompts: token ids.
        params: the sampling.
        grammar_field: the field of the request with the grammar.
        priority: see ``LLM``.
        cache_salt: see ``LLM``.
        lora: the adapter, if the request names one.
    """

    request_id: str
    arrival: float
    prompts: Sequence[list[int]]
    params: SamplingParams
    grammar_field: str
    priority: int = 0
    cache_salt: str | None = None
    lora: LoRARequest | None = None


class Flight:
    """A request in flight.

    Attributes:
        reason: the error that ended the request, or None.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.reason: HTTPError | None = None

    def end(self, reason: HTTPError) -> None:
        """End the request, free everything of the request, and answer with the reason."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()


class Service:
    """A language model or an encoder behind the interface.

    Args:
        model: a checkpoint's folder or file, or the name of a packaged model.
        opgraft_config: every setting.
        tracing: makes spans; None for none.

    Attributes:
        registry: of the metrics.
        http_metrics: of answers.
        kernels: the number of kernels by provider, in words; empty before the service is ready.
        created: the time of the load, in seconds since 1970.
        names: of the model, for clients.
        name: the first of these, which answers have.
        settings: of the server.
        adapters: that clients choose by name.
        admission: of requests.
        flights: requests in flight.
        responses: kept ones, for clients that go on with them.
        draining: the server is about to end, and takes no new requests.
    """

    def __init__(
        self, model: str, opgraft_config: OpgraftConfig, tracing: Tracing | None = None
    ) -> None:
        self.settings = opgraft_config.server
        self.names = tuple(self.settings.model_name) or (_name_of(model),)
        self.name = self.names[0]
        self.registry = CollectorRegistry()
        prefix = self.settings.metrics_prefix
        self._exporter = PrometheusExporter(self.name, self.registry, prefix)
        self.admission = Admission(self.settings)
        self.http_metrics = HTTPMetrics(self.name, self.registry, self.admission, prefix)
        self.tracing = tracing
        self._model = AsyncLLM(
            opgraft_config=_with_times_of_ops(opgraft_config), on_step=self._observe
        )
        self.adapters = ServedAdapters(self._model, self.names)
        if not self._model.embeds:
            self._show_grammars()
        self.created = int(time.time())
        self.draining = False
        self.flights: set[Flight] = set()
        self.responses = ResponseStore(self.settings.max_kept_bytes, self.settings.max_body_bytes)
        self.kernels = ""

    def _show_grammars(self) -> None:
        inputs = self._model.engine.inputs
        self.http_metrics.show(
            "grammars_kept",
            "Compiled grammars of structured outputs that are kept.",
            lambda: 0 if inputs.tokenizer is None else len(inputs.grammars),
        )

    def _observe(self, stats: EngineStats, outputs: Sequence[RequestOutput]) -> None:
        self._exporter(stats, outputs)
        if self.tracing is not None:
            self.tracing.observe(stats, outputs)

    @property
    def llm(self) -> AsyncLLM:
        """The language model.

        Raises:
            HTTPError: the model is an encoder.
        """
        if not self._model.embeds:
            return self._model
        step = "POST /v1/embeddings gives the vectors of texts"
        message = f"{self.name} is an encoder, which answers no prompt: {step}"
        raise HTTPError(400, message, field="model", code="unsupported_model")

    @property
    def encoder(self) -> AsyncLLM:
        """The encoder.

        Raises:
            HTTPError: the model is no encoder.
        """
        if self._model.embeds:
            return self._model
        message = f"{self.name} generates text, and has no embeddings: ask a server of an encoder"
        raise HTTPError(400, message, field="model", code="unsupported_model")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
            InputError: the model has no tokenizer.
        """
        return self._model.tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""
        return self._model.max_model_len

    def capacity(self) -> str:
        """Return the size of the cache in words."""
        return self._model.capacity()

    async def prepare(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function in the thread that prepares requests."""
        return await self._model.prepare(function, *args)

    async def warm_up(self) -> None:
        """Generate or embed a token. The service is ready then.

        Raises:
            EngineError: the engine has failed.
            RequestError: an adapter of ``server.lora_modules`` cannot be used.
        """
        await self._model.warm_up()
        with phase("load adapters"):
            for name, path in self.settings.lora_modules.items():
                await self.adapters.load(name, path)
        with phase("explain"):
            explanation = await self._model.explain()
        self._exporter.show_kernels(explanation)
        for replica in self._model.replicas.each:
            self._exporter.show_cache(self._model.opgraft_config.cache, replica.engine.stats())
        self.kernels = _summary_of_decision(explanation)

    def shutdown(self) -> None:
        """Let go of the model."""
        self._model.shutdown()

    def kill(self) -> None:
        """End a hanging worker in a process of its own."""
        self._model.kill()

    def cards(self) -> list[dict[str, Any]]:
        """Return the model under each of its names, and its adapters."""
        return [self.card(each) for each in (*self.names, *self.adapters.names)]

    def card(self, name: str) -> dict[str, Any]:
        """Return the model or an adapter under one name, in the form of OpenAI's lists."""
        parent = {} if name in self.names else {"parent": self.name}
        return {
            "id": name,
            **parent,
            "object": "model",
            "created": self.created,
            "owned_by": "opgraft",
            "task": "embed" if self._model.embeds else "generate",
            "max_model_len": self.max_model_len,
        }

    def info(self) -> dict[str, Any]:
        """Return the platform, and every setting with a value as text."""
        settings = {
            field.name: text_of(value)
            for field, value in values_of(self._model.opgraft_config)
            if value is not None
        }
        return {"model": self.name, "platform": current_platform().name, "settings": settings}

    async def decisions(self) -> dict[str, Any]:
        """Return the platform, and the kernel and provider of each op, with reasons."""
        explanation = await self._model.explain()
        decision = selected_platform().decision.to_dict()
        health = self.health()
        told = {
            "model": self.name,
            "platform": current_platform().name,
            "decision": decision,
            **explanation.to_dict(),
        }
        # A single engine is not listed.
        if "engines" in health:
            told["engines"] = health["engines"]
        return told

    async def check_health(self) -> None:
        """Check that the engine can go on.

        Raises:
            EngineError: the engine has stopped, or hangs.
        """
        self._model.end_hanging(self.settings.step_seconds)
        await self._model.check_health()
        if self.hangs:
            raise EngineError(
                f"a step has taken longer than {self.settings.step_seconds:g} seconds: a kernel "
                "seems to hang. Start a new server, or raise server.step_seconds"
            )

    @property
    def hangs(self) -> bool:
        """Return True if a step takes so long that it seems never to end."""
        return self._model.busy_seconds > self.settings.step_seconds

    async def check(self) -> None:
        """Check that requests can be served.

        Raises:
            HTTPError: the model is not ready yet, or the server is about to end.
            EngineError: the engine has stopped.
        """
        await self.check_health()
        if self.draining:
            message = "the server is shutting down: send the request to another one"
            raise HTTPError(503, message, code="draining")
        if "ready" not in self._states():
            message = "the model is not ready yet: try again"
            raise HTTPError(503, message, code="starting", headers={"retry-after": "1"})

    def health(self) -> dict[str, Any]:
        """Return the state of the service, with several engines also the state of each."""
        states = self._states()
        if len(states) == 1:
            return {"status": "ready"}
        engines = [{"engine": number, "status": state} for number, state in enumerate(states)]
        all_ready = set(states) == {"ready"}
        return {"status": "ready" if all_ready else "degraded", "engines": engines}

    def _states(self) -> list[str]:
        return self._model.states()

    def expect_model(self, name: str | None) -> None:
        """Check that a request is for this model. A request without a name is.

        Raises:
            HTTPError: the request names another model.
        """
        if name is not None and name not in (*self.names, *self.adapters.names):
            message = f"the model {name[:80]!r} is not served here: ask for {self.name!r}"
            raise HTTPError(404, message, field="model", code="model_not_found")

    def expect_characters(self, text: str, field: str, why: str = "") -> None:
        """Check that a text is short enough to be tokenized.

        Args:
            text: of a prompt.
            field: of the request.
            why: a further sentence for the client.

        Raises:
            HTTPError: the text is too long.
        """
        limit = self._most_characters
        if len(text) > limit:
            raise HTTPError(
                400,
                f"{field} has a text of {len(text)} characters, and this server takes {limit}, as "
                f"this model's maximum context length is {self.max_model_len} tokens: shorten it{why}",
                field=field,
                code="context_length_exceeded",
            )

    def rendered_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> str | list[int]:
        """Return the prompt of a chat: text, or token ids.

        Args:
            messages: for templates.
            **options: as for ``InputProcessor.render_chat``.

        Raises:
            HTTPError: the messages are too long for a library, which makes token ids of them.
            RequestError: the messages cannot be written.
        """
        inputs = self.llm.engine.inputs
        if inputs.writes_tokens and options.get("source") is None:
            texts = texts_of([messages, options.get("tools"), options.get("values")])
            self.expect_characters("".join(texts), "messages", _WHOLE)
        return inputs.render_chat(messages, **options)

    def last_characters(self, text: str) -> str:
        """Return the end of a text, short enough to be tokenized."""
        return text[-self._most_characters :]

    @property
    def _most_characters(self) -> int:
        # All other requests would wait for a tokenizer. Few tokens have so many characters.
        return self.settings.max_prompt_characters or _CHARACTERS * self.max_model_len

    async def answers(
        self, job: Job, slot: Slot
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Answer the prompts of a job. Yield number and output of a prompt after each growth.

        Raises:
            HTTPError: a prompt failed, or the engine gave up on it.
            RequestError: a prompt cannot be taken.
            EngineError: the engine has stopped.
        """
        prompts = range(len(job.prompts))
        waiting = {(number, index) for number in prompts for index in range(job.params.n)}
        self.admission.take(slot, len(waiting), sum(map(len, job.prompts)))
        streams = [self._answer(job, number) for number in prompts]
        async with aclosing(_merged(streams)) as news:
            async for number, output in news:
                if waiting:
                    begun = [answer.index for answer in output.outputs if answer.token_ids]
                    waiting -= {(number, index) for index in begun}
                    # The answers of a prompt share the prompt.
                    left = [job.prompts[prompt] for prompt, index in waiting if index == 0]
                    tokens = sum(map(len, left))
                    self.admission.begun(slot, len(waiting), tokens)
                _expect_no_error(output, job)
                yield number, output

    def _answer(self, job: Job, number: int) -> AsyncGenerator[RequestOutput, None]:
        return self.llm.generate(
            job.prompts[number],
            job.params,
            request_id=f"{job.request_id}-{number}",
            priority=job.priority,
            cache_salt=job.cache_salt,
            lora_request=job.lora,
            arrival=job.arrival,
        )


def _with_times_of_ops(opgraft_config: OpgraftConfig) -> OpgraftConfig:
    """Return settings with times of ops in some steps, unless the given ones tell a number."""
    if opgraft_config.server.time_ops_every is not None:
        return opgraft_config
    server = replace(opgraft_config.server, time_ops_every=TIME_OPS_EVERY)
    return replace(opgraft_config, server=server)


def _name_of(model: str) -> str:
    """Return the name of a model for clients: the last part of a path, any other name as it is."""
    return PurePath(model).name if Path(model).exists() else model


def _summary_of_decision(explanation: Explanation) -> str:
    counts = Counter(str(row.provider) for row in explanation.rows if row.runs)
    parts = [f"{count} of {provider}" for provider, count in counts.most_common()]
    return printable(", ".join(parts))


def _expect_no_error(output: RequestOutput, job: Job) -> None:
    for answer in output.outputs:
        if answer.refused:
            field = None if job.params.structured_output is None else job.grammar_field
            message = f"the answer ended: {worded_for_clients(str(answer.error))}"
            raise HTTPError(400, message, field=field, code="invalid_value")
        # At its arrival, such a request gets the same answer.
        if answer.error_code == ADAPTER_UNUSABLE:
            raise RequestError(str(answer.error), "lora_request", code=ADAPTER_UNUSABLE)
        if answer.finish_reason == "error":
            message = (
                "the request failed while it was computed: the log of the server has the cause"
            )
            raise HTTPError(500, message, code="failed") from EngineError(answer.error)
        if answer.finish_reason == "abort":
            message = "the request was aborted, as the server ends: send it to another one"
            raise HTTPError(503, message, code="aborted")


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the items of all streams with the number of the stream. An error ends all streams."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    # One item, so that a slow reader holds up the streams.
    news: asyncio.Queue[Any] = asyncio.Queue(1)
    tasks = [
        asyncio.create_task(_forward(number, stream, news)) for number, stream in enumerate(streams)
    ]
    try:
        left = len(tasks)
        while left:
            number, found = await news.get()
            if isinstance(found, Exception):
                raise found
            left -= found is None
            if found is not None:
                yield number, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    number: int, stream: AsyncIterator[RequestOutput], news: asyncio.Queue[Any]
) -> None:
    try:
        async with aclosing(stream):  # type: ignore[type-var]
            async for output in stream:
                await news.put((number, output))
    # The reader raises the error again.
    except Exception as error:
        await news.put((number, error))
    else:
        await news.put((number, None))
