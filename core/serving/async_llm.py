"""``AsyncLLM``: a model for many readers in event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

from opgraft.base.timeline import (
    QUEUE,
    RESPOND,
    Computation,
    Timeline,
    current_timeline,
    phase,
)
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.lora.adapter_file import open_adapter
from opgraft.engine.lora.held import ADAPTER_UNUSABLE
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import CheckpointError, EngineError, RequestError
from opgraft.serving.arguments import expect_params, placed, text_messages
from opgraft.serving.embedding_engine import VectorRequest
from opgraft.serving.engine_thread import AsyncNewsReader, Mailbox
from opgraft.serving.front_end import FrontEnd
from opgraft.serving.llm import Message
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import EmbeddingOutput, RequestMetrics, RequestOutput
from opgraft.serving.pools import called_in
from opgraft.serving.prompts import Prompt
from opgraft.serving.replicas import Replica
from opgraft.serving.step_reports import OnStep
from opgraft.serving.tokenizer import Tokenizer

_T = TypeVar("_T")
Pair: TypeAlias = tuple[str, str]
"""Two texts that an encoder reads together, such as a question and a document."""

_PREPARING = 2
"""Threads that prepare requests. One long template or prompt then does not hold up all others."""


class AsyncLLM(FrontEnd):
    """A language model or an encoder, with its engine in a thread of its own.

    Other threads tokenize prompts and compile grammars, so that neither steps nor event loops wait.
    Several event loops may use one ``AsyncLLM``. ``async with`` shuts the model down at the end.

    For example, ``async for output in llm.generate("Hello"): print(output.outputs[0].text)``.

    Args:
        model, opgraft_config, on_step, **settings: as for ``LLM``. ``on_step`` is called in the
            engine's thread.

    Raises:
        ConfigError: a setting is unknown or has a wrong value, or the cache is too small for one
            request.
        ModelError: no model is named, or its architecture is unknown.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        opgraft_config: OpgraftConfig | None = None,
        on_step: OnStep | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(model, opgraft_config=opgraft_config, on_step=on_step, **settings)
        self._preparing = ThreadPoolExecutor(_PREPARING, thread_name_prefix="opgraft-prepare")
        # A pool of its own: a compilation may take seconds, and prompts must not wait for it.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="opgraft-compile")
        self._pools += self._preparing, self._compiling
        self._mailbox: Mailbox | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
            InputError: the model has no tokenizer.
        """
        if self.embeds:
            return self.encoder.tokenizer
        return self.engine.inputs.expect_tokenizer()

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the vocabulary."""
        return self.encoder.vocab_size if self.embeds else self.engine.inputs.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""
        return self.encoder.max_model_len if self.embeds else self.engine.core.max_model_len

    async def warm_up(self) -> None:
        """Generate a token in each engine, or embed a token.

        Raises:
            RequestError: an engine fails, for example by damaged weights.
            EngineError: an engine has stopped.
        """
        if self.embeds:
            await self.embed([[0]])
            return
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        # Not through the router, which may choose one replica several times.
        for replica in self._replicas.each:
            name = uuid4().hex
            prepare = partial(self.engine.inputs.prepare, name, [0], params)
            async for output in self._answer(name, params, prepare, replica):
                failed = output.outputs[0].error
            if failed is not None:
                raise RequestError(f"the first token could not be generated: {failed}")

    async def prepare(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function, such as a tokenizer, in a thread that prepares requests.

        Raises:
            EngineError: the engine was shut down.
        """
        return await called_in(self._preparing, function, *args)

    async def compile(self, params: SamplingParams) -> None:
        """Compile the grammar of a structured output, unless it is known.

        ``generate`` and ``chat`` call this first.

        Raises:
            InputError: the grammar cannot be compiled, or not in time.
            ChildError: no process can be started to try the compilation.
            EngineError: the engine was shut down.
        """
        if params.structured_output is None:
            return
        grammars = self.engine.inputs.grammars
        if grammars.find(params) is None:
            await called_in(self._compiling, grammars.compile_safely, params)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        arrival: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt, and yield the answer so far whenever the answer has grown.

        Each output has the whole answer up to now, and does not change any more. A slow reader
        receives the newest output, and misses those between. The last output is ``finished``. A
        failed request ends with the ``finish_reason`` ``"error"``, an aborted one with ``"abort"``.

        Leaving the iterator, by ``break`` or by cancellation, aborts the request before the next
        step. If you keep a reference to the iterator, close it with ``aclose``.

        Args:
            prompt: text, or token ids; or ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``,
                also with ``"cache_salt"``.
            sampling_params: by default those of ``get_default_sampling_params``.
            request_id: unique among running requests; by default a new one.
            priority: lower numbers come first, under ``scheduler.policy=priority``.
            cache_salt: requests of different salts share nothing in the cache.
            lora_request: the adapter; ``None`` for the base model.
            arrival: moment of the arrival, in seconds of ``time.monotonic``; by default now.

        Raises:
            RequestError: the request cannot be served. Raised by the first step of the iterator.
            EngineError: the engine has ended.
        """
        name = request_id or uuid4().hex
        wanted = sampling_params
        if wanted is None:
            wanted = self.get_default_sampling_params()
        prepare = partial(
            self.engine.inputs.prepare,
            name,
            prompt,
            wanted,
            priority=priority,
            cache_salt=cache_salt,
            lora_request=lora_request,
            arrival=monotonic() if arrival is None else arrival,
        )
        return self._answer(name, wanted, prepare)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a chat by the chat template of the model. Yields outputs like ``generate``.

        Args:
            messages: ``{"role": "user", "content": "…"}``.
            sampling_params, request_id, priority, cache_salt, lora_request: as for ``generate``.
            tools: JSON schemas of functions that the model may call.

        Raises:
            RequestError: the model has no chat template, the template refuses the messages, or the
                request cannot be served.
            EngineError: the engine has ended.
        """
        name = request_id or uuid4().hex
        wanted = sampling_params
        if wanted is None:
            wanted = self.get_default_sampling_params()

        def prepare() -> OpenRequest:
            inputs = self.engine.inputs
            return inputs.prepare(
                name,
                inputs.chat_template.render(text_messages(messages), tools=tools),
                wanted,
                priority=priority,
                cache_salt=cache_salt,
                lora_request=lora_request,
                add_special_tokens=False,
            )

        return self._answer(name, wanted, prepare)

    async def _answer(
        self,
        request_id: str,
        params: SamplingParams,
        prepare: Callable[[], OpenRequest],
        only: Replica | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prepare a request in another thread, open it, and yield its outputs.

        Args:
            request_id: of the request.
            params: settings of the request.
            prepare: makes the request.
            only: the one replica that may take the request.
        """
        self._replicas.check()
        expect_params(params)
        await self.compile(params)
        prepared = await self.prepare(prepare)
        stream = AsyncNewsReader(request_id, self._mailbox_of(asyncio.get_running_loop()))
        finished = False
        metrics: RequestMetrics | None = None
        timeline = current_timeline()
        if timeline is not None:
            timeline.add(QUEUE)
        try:
            [opened] = self._replicas.open([(stream, prepared)], only)
            await asyncio.wrap_future(opened)
            while not finished:
                output = await stream.next()
                finished = output.finished
                metrics = output.metrics
                yield output
        finally:
            if timeline is not None and metrics is not None:
                _note_steps(timeline, metrics)
            # A reader that leaves early closes the iterator, and this is the only trace of that.
            if not finished:
                self._leave([stream])

    async def encode(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of texts for an encoder.

        Raises:
            ModelError: the model generates text.
            RequestError: a text cannot be embedded.
        """
        requests = await self.embedded(texts)
        return [request.ids for request in requests]

    async def embed(
        self, texts: Sequence[Prompt], *, truncate: bool = False
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts, in their order, like ``LLM.embed``.

        Texts of several calls share batches. If the call is cancelled, the texts leave the queue.

        Args:
            texts: each as text or token ids.
            truncate: cut texts that are too long for the model, instead of refusing them.

        Raises:
            ModelError: the model generates text.
            RequestError: a text cannot be embedded.
            CheckpointError, PluginError: a vector has NaN or infinity.
            EngineError: the engine has ended.
        """
        most = self.max_model_len if truncate else None
        return await self.computed(await self.embedded(texts, most=most))

    async def labelled(
        self, texts: Sequence[Prompt | Pair], *, most: int | None = None
    ) -> list[VectorRequest]:
        """Return requests for the probabilities of labels, to be passed to ``computed``.

        Args:
            texts: each as text, as token ids, or as a pair of texts in a tuple.
            most: as for ``embedded``. Of a pair, the second text is cut.

        Raises:
            ModelError: the model generates text, or has no labels.
            RequestError: a text cannot be taken.
        """
        encoder = self.encoder

        def prepare(text: Prompt | Pair, name: str) -> VectorRequest:
            first, second = text if isinstance(text, tuple) else (text, None)
            return encoder.prepare_labels(uuid4().hex, first, name, second=second, most=most)

        return await self._prepared_by(prepare, texts)

    async def computed(self, requests: Sequence[VectorRequest]) -> list[EmbeddingOutput]:
        """Return the vectors of prepared requests, in their order.

        Raises:
            CheckpointError, PluginError: a vector has NaN or infinity.
            EngineError: the engine has ended.
        """
        mailbox = self._mailbox_of(asyncio.get_running_loop())
        streams = [AsyncNewsReader(request.output.request_id, mailbox) for request in requests]
        waiting = dict(zip(streams, requests, strict=True))
        try:
            with phase("embed"):
                for opened in self._replicas.open(list(waiting.items())):
                    await asyncio.wrap_future(opened)
                for stream in streams:
                    await stream.next()
                    del waiting[stream]
        finally:
            # After a cancellation, texts that are still waiting would cost batches for nobody.
            self._leave(waiting)
        return self.encoder.results(requests)

    async def embedded(
        self, texts: Sequence[Prompt], *, most: int | None = None
    ) -> list[VectorRequest]:
        """Return requests for the embeddings of texts, to be passed to ``computed``.

        Args:
            texts: each as text or token ids.
            most: tokens of a longer text are cut off. None: a text that is too long is refused.

        Raises:
            ModelError: the model generates text.
            RequestError: a text cannot be embedded.
        """
        encoder = self.encoder

        def prepare(text: Prompt, name: str) -> VectorRequest:
            return encoder.prepare(uuid4().hex, text, name, most=most)

        return await self._prepared_by(prepare, texts)

    async def _prepared_by(
        self, prepare: Callable[[Any, str], VectorRequest], texts: Sequence[Any]
    ) -> list[VectorRequest]:
        """Prepare each text, with its name for errors, in a thread for preparations."""
        self._replicas.check()
        named = [(text, placed("text", place, len(texts))) for place, text in enumerate(texts)]
        return await self.prepare(lambda: [prepare(text, name) for text, name in named])

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter before a request names it.

        Raises:
            RequestError: the adapter cannot be used.
            EngineError: the engine has ended.
        """
        limits = self.opgraft_config.lora
        if limits.enabled and not self.embeds:
            await self.prepare(_read_ahead, lora_request, limits.max_lora_rank)
        try:
            await self._on_engines(lambda engine: engine.core.add_lora(lora_request))
        except RequestError as error:
            # Some engines may have it, and nobody would name it.
            if error.code == ADAPTER_UNUSABLE:
                await self.remove_lora(lora_request.lora_int_id)
            raise

    async def remove_lora(self, number: int) -> None:
        """Forget the adapter of a number. Requests that name it go on.

        Raises:
            EngineError: the engine has ended.
        """
        await self._on_engines(lambda engine: engine.core.remove_lora(number))

    async def _on_engines(self, function: Callable[[Any], None]) -> None:
        """Call a function of each engine that takes adapters, in the thread of the engine.

        Raises:
            RequestError: the model is an encoder.
            EngineError: the engine has ended.
        """
        if self.embeds:
            name = self.opgraft_config.model.name
            raise RequestError(f"{name} is an encoder, which takes no adapters", "lora_request")
        calls = map(asyncio.wrap_future, self._replicas.on_engines(function))
        # All calls end before an error is raised: engines must not differ in their adapters.
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _leave(self, streams: Iterable[AsyncNewsReader]) -> None:
        """Abort requests that nobody reads any more."""
        for stream in streams:
            # If the engine has ended, so has the request.
            with suppress(EngineError):
                self._replicas.close(stream)

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        # Only the latest loop is kept: most programs have one, and streams hold their mailbox.
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its iterator yields the answer so far, and ends.

        Raises:
            RequestError: no request of that id runs or waits.
            EngineError: the engine has ended.
        """
        await asyncio.wrap_future(self._replicas.abort(request_id))

    async def check_health(self) -> None:
        """Check that the engine can go on, or enough of several. Wake engines without workers.

        Raises:
            EngineError: a thread has ended, or an engine has stopped after an error.
        """
        self._replicas.check_health()

    def states(self) -> list[str]:
        """Return the state of each engine: ``starting``, ``ready``, ``restarting`` or ``lost``."""
        return self._replicas.states()

    @property
    def busy_seconds(self) -> float:
        """The seconds of the present step so far. They grow if the step hangs.

        Of several engines, the seconds of the youngest step. If one engine hangs, others go on.
        """
        return self._replicas.busy_seconds

    def end_hanging(self, seconds: float) -> None:
        """End the workers of engines with a step of more than ``seconds``, if others can go on."""
        self._replicas.end_hanging(seconds)

    def kill(self) -> None:
        """End the workers, if workers have processes of their own."""
        self._replicas.kill()

    async def explain(self) -> Explanation:
        """Return the kernel and provider of each op of the model, and the classes, with reasons.

        Raises:
            EngineError: the engine has ended.
        """
        return await asyncio.wrap_future(self._replicas.explain())

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        # The end waits for a running step, and the loop must go on meanwhile.
        await asyncio.to_thread(self.shutdown)


def _read_ahead(lora_request: LoRARequest, max_rank: int) -> None:
    """Read the files of an adapter, so that the workers find them in the memory of the system.

    Workers read between two steps, and a slow disk would hold up all answers.
    """
    # The workers tell what is wrong.
    with suppress(CheckpointError, OSError):
        open_adapter(lora_request.lora_path, max_rank)


def _note_steps(timeline: Timeline, metrics: RequestMetrics) -> None:
    """Note the time from the first step with a request to the last, if there was a token."""
    if metrics.admitted is None or metrics.last_token is None:
        return
    timeline.add_steps(Computation(metrics.admitted, metrics.last_token, metrics.replica))
    timeline.add(RESPOND)
