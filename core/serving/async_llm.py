"""``AsyncLLM``: a model that answers many readers in event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import EngineError, RequestError
from opgraft.serving.arguments import expect_params, placed, text_messages
from opgraft.serving.embedding_engine import EmbeddingRequest
from opgraft.serving.engine_thread import Mailbox, Stream
from opgraft.serving.front_end import FrontEnd
from opgraft.serving.llm import Message
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import EmbeddingOutput, RequestOutput
from opgraft.serving.pools import called_in
from opgraft.serving.prompts import Prompt
from opgraft.serving.replicas import Replica
from opgraft.serving.step_reports import OnStep
from opgraft.serving.tokenizer import Tokenizer

_T = TypeVar("_T")
_PREPARING = 2
"""Threads that prepare requests, so that one long template or prompt does not hold up all others."""


class AsyncLLM(FrontEnd):
    """A language model or an encoder whose engine runs in a thread of its own and sleeps while nothing is asked.

    Prompts are tokenized in threads beside it, and grammars compiled in another, so that neither
    steps nor event loops wait.
    It may be used from several event loops. ``async with`` shuts it down at the end.

    Args:
        model, opgraft_config, on_step, **settings: as for ``LLM``. ``on_step`` is called in the
            engine's thread.

    Raises:
        ConfigError: a setting that there is not, or a value that it does not take; a cache too
            small for one request.
        ModelError: no model is named, or none is registered for its architecture.
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
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="opgraft-compile")
        self._pools += self._preparing, self._compiling
        self._mailbox: Mailbox | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model.

        Raises:
            InputError: it has none.
        """
        return self.encoder.tokenizer if self.embeds else self.engine.inputs.expect_tokenizer()

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""
        return self.encoder.vocab_size if self.embeds else self.engine.inputs.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""
        return self.encoder.max_model_len if self.embeds else self.engine.core.max_model_len

    async def warm_up(self) -> None:
        """Generate a token in each engine, or embed one.

        Raises:
            RequestError: an engine could not, as with damaged weights.
            EngineError: an engine has stopped.
        """
        if self.embeds:
            await self.embed([[0]])
            return
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        for replica in self._replicas.each:
            name = uuid4().hex
            prepare = partial(self.engine.inputs.prepare, name, [0], params)
            async for output in self._answer(name, params, prepare, replica):
                failed = output.outputs[0].error
            if failed is not None:
                raise RequestError(f"the first token could not be generated: {failed}")

    async def prepare(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function in a thread that prepares requests, such as one that tokenizes a text.

        Raises:
            EngineError: the engine was shut down.
        """
        return await called_in(self._preparing, function, *args)

    async def compile(self, params: SamplingParams) -> None:
        """Compile the grammar of a structured output, unless that is done; ``generate`` and ``chat`` begin with it.

        Raises:
            InputError: it cannot be compiled, or not in time.
            ChildError: no process can be started to try it.
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
        arrival: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a prompt, and yield the answer so far whenever it has grown.

        Each output is cumulative: it has the whole answer up to now, and does not change any more.
        A reader that is slower than the engine gets the newest one, and misses those between. The
        last one is ``finished``. A request that fails while it is computed ends with the
        ``finish_reason`` ``"error"``, one that is aborted with ``"abort"``. Leaving the iterator,
        by ``break`` or by cancellation, aborts the request between two steps, before the next that
        has not begun; who keeps a reference to the iterator closes it with ``aclose``.

        Args:
            prompt: text, or token ids; or ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``,
                where ``"cache_salt"`` may stand too.
            sampling_params: ``SamplingParams()`` if not given.
            request_id: unique among those that run; made up if not given.
            priority: lower ones come first; it needs ``scheduler.policy=priority``.
            cache_salt: requests of different salts share nothing in the cache.
            arrival: when the request came, in seconds of ``time.monotonic``, for its times; now if
                not given.

        Raises:
            RequestError: the request cannot be taken; raised when the first output is asked for.
            EngineError: the engine has ended.
        """
        name = request_id or uuid4().hex
        wanted = SamplingParams() if sampling_params is None else sampling_params
        prepare = partial(
            self.engine.inputs.prepare,
            name,
            prompt,
            wanted,
            priority=priority,
            cache_salt=cache_salt,
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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a chat by the chat template of the model, and yield the answer as ``generate`` does.

        Args:
            messages: ``{"role": "user", "content": "…"}``.
            sampling_params, request_id, priority, cache_salt: as for ``generate``.
            tools: JSON schemas of functions that the model may call.

        Raises:
            RequestError: the model has no chat template, it refuses the messages, or the request
                cannot be taken.
            EngineError: the engine has ended.
        """
        name = request_id or uuid4().hex
        wanted = SamplingParams() if sampling_params is None else sampling_params

        def prepare() -> OpenRequest:
            inputs = self.engine.inputs
            return inputs.prepare(
                name,
                inputs.chat_template.render(text_messages(messages), tools=tools),
                wanted,
                priority=priority,
                cache_salt=cache_salt,
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
        self._replicas.check()
        expect_params(params)
        await self.compile(params)
        prepared = await self.prepare(prepare)
        stream = Stream(request_id, self._mailbox_of(asyncio.get_running_loop()))
        finished = False
        try:
            (opened,) = self._replicas.open([(stream, prepared)], only)
            await asyncio.wrap_future(opened)
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._leave([stream])

    async def encode(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of texts for an encoder.

        Raises:
            ModelError: the model generates text.
            RequestError: a text cannot be taken.
        """
        requests = await self._prepared(texts, truncate=False)
        return [request.ids for request in requests]

    async def embed(
        self, texts: Sequence[Prompt], *, truncate: bool = False
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts, in their order, as ``LLM.embed`` does.

        Texts of several calls share batches. If the call is cancelled, the texts leave the queue.

        Args:
            texts: each as text or token ids.
            truncate: cut texts that are longer than the model takes, instead of refusing them.

        Raises:
            ModelError: the model generates text.
            RequestError: a text cannot be taken.
            CheckpointError, PluginError: a vector has NaN or infinity.
            EngineError: the engine has ended.
        """
        requests = await self._prepared(texts, truncate)
        mailbox = self._mailbox_of(asyncio.get_running_loop())
        streams = [Stream(request.output.request_id, mailbox) for request in requests]
        waiting = dict(zip(streams, requests, strict=True))
        try:
            for opened in self._replicas.open(list(waiting.items())):
                await asyncio.wrap_future(opened)
            for stream in streams:
                await stream.next()
                del waiting[stream]
        finally:
            self._leave(waiting)
        return self.encoder.results(requests)

    async def _prepared(self, texts: Sequence[Prompt], truncate: bool) -> list[EmbeddingRequest]:
        encoder = self.encoder
        self._replicas.check()

        def prepare() -> list[EmbeddingRequest]:
            return [
                encoder.prepare(
                    uuid4().hex, text, placed("text", number, len(texts)), truncate=truncate
                )
                for number, text in enumerate(texts)
            ]

        return await self.prepare(prepare)

    def _leave(self, streams: Iterable[Stream]) -> None:
        """Have requests aborted that nobody reads any more."""
        for stream in streams:
            with suppress(EngineError):  # then the engine has ended, and so has the request
                self._replicas.close(stream)

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    async def abort(self, request_id: str) -> None:
        """Abort a request; its iterator ends with what it has so far.

        Raises:
            RequestError: none of that id runs or waits.
            EngineError: the engine has ended.
        """
        await asyncio.wrap_future(self._replicas.abort(request_id))

    async def check_health(self) -> None:
        """Raise where the engine cannot go on, or too few of several can; see to those whose workers are lost.

        Raises:
            EngineError: a thread has ended, or an engine has stopped after an error.
        """
        self._replicas.check_health()

    def states(self) -> list[str]:
        """Return the state of each engine: ``starting``, ``ready``, ``restarting`` or ``lost``."""
        return self._replicas.states()

    @property
    def busy_seconds(self) -> float:
        """The seconds that the step of this moment has taken: of one that hangs they grow.

        Of several engines, of that which has begun with a step last: where one hangs, the others go
        on.
        """
        return self._replicas.busy_seconds

    def end_hanging(self, seconds: float) -> None:
        """End the workers of an engine whose step takes longer than so many seconds, where there are other engines."""
        self._replicas.end_hanging(seconds)

    def kill(self) -> None:
        """End workers that do not answer, where they have processes of their own."""
        self._replicas.kill()

    async def explain(self) -> Explanation:
        """Return which kernel of which provider runs each op of the model, the classes in use, and the reasons.

        Raises:
            EngineError: the engine has ended.
        """
        return await asyncio.wrap_future(self._replicas.explain())

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)
