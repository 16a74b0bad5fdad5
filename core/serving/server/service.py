"""The model that is served, with the limits of requests and those that are in flight."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from opgraft.base.text import printable
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import EngineError, HTTPError
from opgraft.plugins.selection import current_platform, selected_platform
from opgraft.serving.async_llm import AsyncLLM
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.prometheus import PrometheusExporter
from opgraft.serving.server.admission import Admission, Slot
from opgraft.serving.server.http_metrics import HTTPMetrics
from opgraft.serving.tokenizer import Tokenizer
from prometheus_client import CollectorRegistry

_T = TypeVar("_T")
_CHARACTERS = 64
"""Characters for each token of the context, beyond which a text is not tokenized; few tokens have as many."""


@dataclass(frozen=True)
class Job:
    """Prompts as token ids, how each is to be answered, and when the request came, by ``time.monotonic``.

    ``grammar_field`` is the field that a grammar comes from.
    """

    request_id: str
    arrival: float
    prompts: Sequence[list[int]]
    params: SamplingParams
    grammar_field: str
    priority: int = 0
    cache_salt: str | None = None


class Flight:
    """A request that is being answered.

    Attributes:
        reason: why it was ended, where it was.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.reason: HTTPError | None = None

    def end(self, reason: HTTPError) -> None:
        """End the request, which frees what it holds, and answer with the reason."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()


class Service:
    """A language model or an encoder behind the interface.

    Args:
        model: a checkpoint's folder or file, or the name of a packaged model.
        opgraft_config: every setting.

    Attributes:
        registry: of the metrics.
        http_metrics: of answers.
        kernels: how many of whose kernels run, in words; empty before the service is ready.
        created: when it was loaded, in seconds since 1970.
        name: of the model, for clients.
        settings: of the server.
        admission: of requests.
        flights: requests that are being answered.
        draining: whether the server is about to end, and takes no new requests.
    """

    def __init__(self, model: str, opgraft_config: OpgraftConfig) -> None:
        self.settings = opgraft_config.server
        self.name = self.settings.model_name or _name_of(model)
        self.registry = CollectorRegistry()
        self._exporter = PrometheusExporter(self.name, self.registry)
        self.admission = Admission(self.settings)
        self.http_metrics = HTTPMetrics(self.name, self.registry, self.admission)
        self._model = AsyncLLM(opgraft_config=opgraft_config, on_step=self._exporter)
        if not self._model.embeds:
            inputs = self._model.engine.inputs
            self.http_metrics.show(
                "grammars_kept",
                "Compiled grammars of structured outputs that are kept.",
                lambda: 0 if inputs.tokenizer is None else len(inputs.grammars),
            )
        self.created = int(time.time())
        self.draining = False
        self.flights: set[Flight] = set()
        self._warm = False
        self.kernels = ""

    @property
    def llm(self) -> AsyncLLM:
        """The language model.

        Raises:
            HTTPError: the model is an encoder.
        """
        if not self._model.embeds:
            return self._model
        raise HTTPError(
            400,
            f"{self.name} is an encoder, which answers no prompt: POST /v1/embeddings gives the vectors of texts",
            field="model",
            code="unsupported_model",
        )

    @property
    def encoder(self) -> AsyncLLM:
        """The encoder.

        Raises:
            HTTPError: the model is none.
        """
        if self._model.embeds:
            return self._model
        raise HTTPError(
            400,
            f"{self.name} generates text, and has no embeddings: ask a server of an encoder",
            field="model",
            code="unsupported_model",
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
            InputError: it has none.
        """
        return self._model.tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""
        return self._model.max_model_len

    def capacity(self) -> str:
        """Say in words what the model can hold."""
        return self._model.capacity()

    async def prepare(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function in the thread that prepares requests."""
        return await self._model.prepare(function, *args)

    async def warm_up(self) -> None:
        """Generate a token, or embed one, after which the service is ready.

        Raises:
            EngineError: it could not.
        """
        await self._model.warm_up()
        explanation = await self._model.explain()
        self._exporter.show_kernels(explanation)
        self.kernels = _summary_of_decision(explanation)
        self._warm = True

    def shutdown(self) -> None:
        """Let go of the model."""
        self._model.shutdown()

    def kill(self) -> None:
        """End a worker that hangs, where it has a process of its own."""
        self._model.kill()

    def card(self) -> dict[str, Any]:
        """Return the model as OpenAI lists models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "opgraft",
            "task": "embed" if self._model.embeds else "generate",
            "max_model_len": self.max_model_len,
        }

    async def decisions(self) -> dict[str, Any]:
        """Return which platform was chosen, which kernel of which provider runs each op, and why."""
        explanation = await self._model.explain()
        decision = selected_platform().decision.to_dict()
        health = self.health()
        told = {
            "model": self.name,
            "platform": current_platform().name,
            "decision": decision,
            **explanation.to_dict(),
        }
        return told if "engines" not in health else {**told, "engines": health["engines"]}

    async def check_health(self) -> None:
        """Raise where the engine cannot go on.

        Raises:
            EngineError: it has stopped, or hangs.
        """
        self._model.end_hanging(self.settings.step_seconds)
        await self._model.check_health()
        if self.hangs:
            raise EngineError(
                f"a step has taken longer than {self.settings.step_seconds:g} seconds: a kernel seems to hang. Start "
                "a new server, or raise server.step_seconds"
            )

    @property
    def hangs(self) -> bool:
        """Tell whether a step has taken so long that it seems never to end."""
        return self._model.busy_seconds > self.settings.step_seconds

    async def check(self) -> None:
        """Raise where requests cannot be served.

        Raises:
            HTTPError: the model is not ready yet, or the server is about to end.
            EngineError: the engine has stopped.
        """
        await self.check_health()
        if self.draining:
            raise HTTPError(
                503, "the server is shutting down: send the request to another one", code="draining"
            )
        if not self._warm or "ready" not in self._states():
            raise HTTPError(
                503,
                "the model is not ready yet: try again",
                code="starting",
                headers={"retry-after": "1"},
            )

    def health(self) -> dict[str, Any]:
        """Return whether all engines are ready, and where there are several, the state of each."""
        states = self._states()
        if len(states) == 1:
            return {"status": "ready"}
        engines = [{"engine": number, "status": state} for number, state in enumerate(states)]
        return {"status": "ready" if set(states) == {"ready"} else "degraded", "engines": engines}

    def _states(self) -> list[str]:
        return self._model.states()

    def expect_model(self, name: str) -> None:
        """Refuse a request for another model.

        Raises:
            HTTPError: it asks for another one.
        """
        if name != self.name:
            raise HTTPError(
                404,
                f"the model {name[:80]!r} is not served here: ask for {self.name!r}",
                field="model",
                code="model_not_found",
            )

    def expect_characters(self, text: str, field: str) -> None:
        """Refuse a text that is too long to be tokenized: who tokenizes it keeps all others waiting.

        Raises:
            HTTPError: with the limit.
        """
        limit = self.settings.max_prompt_characters or _CHARACTERS * self.max_model_len
        if len(text) > limit:
            raise HTTPError(
                400,
                f"{field} has a text of {len(text)} characters, and this server takes {limit}, as "
                f"the model's maximum context length is {self.max_model_len} tokens: shorten it",
                field=field,
                code="context_length_exceeded",
            )

    async def answers(
        self, job: Job, slot: Slot
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Answer the prompts of a job, and yield the number of a prompt with its output whenever that has grown.

        Raises:
            HTTPError: a prompt failed, or the engine gave up on it.
            RequestError: a prompt cannot be taken.
            EngineError: the engine has stopped.
        """
        waiting = {
            (number, index) for number in range(len(job.prompts)) for index in range(job.params.n)
        }
        self.admission.take(slot, len(waiting), sum(map(len, job.prompts)))
        streams = [self._answer(job, number) for number in range(len(job.prompts))]
        async with aclosing(_merged(streams)) as news:
            async for number, output in news:
                if waiting:
                    waiting -= {
                        (number, answer.index) for answer in output.outputs if answer.token_ids
                    }
                    tokens = sum(
                        len(job.prompts[prompt]) for prompt, index in waiting if index == 0
                    )
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
            arrival=job.arrival,
        )


def _name_of(model: str) -> str:
    """Return the name of a model for clients: the last part of a path, any other name as it is."""
    return PurePath(model).name if Path(model).exists() else model


def _summary_of_decision(explanation: Explanation) -> str:
    counts = Counter(str(row.provider) for row in explanation.rows if row.runs)
    return printable(
        ", ".join(f"{count} of {provider}" for provider, count in counts.most_common())
    )


def _expect_no_error(output: RequestOutput, job: Job) -> None:
    for answer in output.outputs:
        if answer.refused:
            field = None if job.params.structured_output is None else job.grammar_field
            raise HTTPError(
                400, f"the answer ended: {answer.error}", field=field, code="invalid_value"
            )
        if answer.finish_reason == "error":
            raise HTTPError(
                500,
                "the request failed while it was computed: the log of the server has the cause",
                code="failed",
            ) from EngineError(answer.error)
        if answer.finish_reason == "abort":
            raise HTTPError(
                503,
                "the request was aborted, as the server ends: send it to another one",
                code="aborted",
            )


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield what streams yield, as it comes, with the number of the stream; one that raises ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
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
    except Exception as error:  # raised again by the reader
        await news.put((number, error))
    else:
        await news.put((number, None))
