"""``LLM``: a model that answers many prompts at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Lock, get_ident
from typing import Any, TypeAlias

from opgraft.base.progress import progress_bar
from opgraft.base.text import html_table, printable
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import EngineError, RequestError
from opgraft.plugins.selection import current_platform
from opgraft.serving.arguments import (
    listed_chats,
    listed_prompts,
    params_for,
    placed,
    priorities_for,
    text_messages,
)
from opgraft.serving.engine_thread import News, QueuedReader
from opgraft.serving.front_end import END_SECONDS, FrontEnd
from opgraft.serving.interrupts import Interrupts
from opgraft.serving.open_request import OpenRequest
from opgraft.serving.outputs import EmbeddingOutput, RequestOutput
from opgraft.serving.prompts import Prompt
from opgraft.serving.step_reports import OnStep

Message: TypeAlias = Mapping[str, Any]

_PATIENCE = 0.5
"""Seconds in which a step may end after a second interrupt; then workers with processes of their own are ended."""


class Interrupted(KeyboardInterrupt):
    """An interrupt while prompts were answered.

    Attributes:
        outputs: of every prompt, in order; what had not ended has the ``finish_reason``
            ``"abort"``.
    """

    def __init__(self, requests: Sequence[OpenRequest]) -> None:
        done = sum(request.is_answered for request in requests)
        super().__init__(
            f"{done} of {len(requests)} prompts were answered; the exception's outputs has them all"
        )
        self.outputs = [request.output for request in requests]


class LLM(FrontEnd):
    """A language model with an engine of its own, in a thread of its own.

    Prompts of one call are answered together. Calls from several threads are answered one after the
    other; for many readers at once there is ``AsyncLLM``.

    Args:
        model: a checkpoint's folder or file, the name of a packaged model, or a name such as
            ``org/name`` of a model in the local Hugging Face cache; ``model.name`` of the settings
            if not given.
        opgraft_config: settings in place of the process's.
        on_step: called after each step with its ``EngineStats``, a change since the last call, and
            the requests that have news; see ``PrometheusExporter``. An encoder calls it after each
            batch, without requests. The thread of the engine makes the calls.
        **settings: single settings, which go before those: by the names in ``SHORT_NAMES``, by
            dotted names as in ``**{"cache.memory_bytes": 1 << 30}``, or ``enforce_eager=True`` for
            level 0 and a mapping as ``compilation_config``.

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
        self._numbers = count()
        self._answering = Lock()
        self._answering_thread: int | None = None
        self._readers: list[QueuedReader] = []
        self._leaving: list[Future[None]] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once, and return the answers in the order of the prompts.

        A prompt that fails while others are computed has the ``finish_reason`` ``"error"``.

        Args:
            prompts: one, or several: text, or token ids; or ``{"prompt": text}`` or
                ``{"prompt_token_ids": [...]}``, where ``"cache_salt"`` may stand too: prompts of
                different salts share nothing in the cache.
            sampling_params: for all, or one for each; ``SamplingParams()`` if not given.
            priority: for all, or one for each: lower ones come first. It needs
                ``scheduler.policy=priority``.
            progress: show a bar on stderr; by default where that is a terminal.

        Raises:
            RequestError: a prompt cannot be taken; then none is computed.
            EngineError: the engine has stopped, or was shut down.
            Interrupted: after an interrupt; it has what was computed.
        """
        listed = listed_prompts(prompts)
        return self._answer(listed, sampling_params, priority, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer chats by the chat template of the model.

        Args:
            messages: of one chat, or of several: ``{"role": "user", "content": "…"}``. The content
                may be a list of parts, ``{"type": "text", "text": "…"}``, which become lines of one
                text.
            sampling_params: for all, or one for each chat.
            tools: JSON schemas of functions that the model may call.
            priority, progress: as for ``generate``.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
            EngineError: the engine has stopped, or was shut down.
            Interrupted: after an interrupt; it has what was computed.
        """
        chats = listed_chats(messages)
        texts = [
            self._rendered(chat, tools, placed("chat", i, len(chats)))
            for i, chat in enumerate(chats)
        ]
        return self._answer(texts, sampling_params, priority, progress, chat=True)

    def _rendered(
        self, chat: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, name: str
    ) -> str:
        try:
            return self.engine.inputs.chat_template.render(text_messages(chat), tools=tools)
        except RequestError as error:
            raise RequestError(f"{name}: {error.message}", error.field, code=error.code) from error

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts, in their order, pooled and normalised as the checkpoint says.

        Args:
            texts: one, or several: text, or token ids. The default prompt of the checkpoint, if it
                has one, is put before a text, and not before token ids.
            truncate: cut texts that are longer than the model takes, instead of refusing them. The
                checkpoint's ``truncation_side`` says at which end.
            progress: as for ``generate``.

        Raises:
            ModelError: the model is no encoder.
            RequestError: a text cannot be taken.
            CheckpointError: the model computes no numbers for a text.
        """
        encoder = self.encoder
        listed = listed_prompts(texts, "texts")
        with encoder.counters.timed("text"):
            requests = [
                encoder.prepare(
                    str(next(self._numbers)),
                    text,
                    placed("text", number, len(listed)),
                    truncate=truncate,
                )
                for number, text in enumerate(listed)
            ]
        by_id = {request.output.request_id: request for request in requests}

        def expect_vector(output: RequestOutput) -> None:
            error = by_id[output.request_id].error
            if error is not None:
                raise error

        self._answer_all(requests, progress, expect_vector)
        return encoder.results(requests)

    @property
    def chats(self) -> bool:
        """True if the model has a chat template."""
        tokenizer = self.engine.inputs.tokenizer
        return tokenizer is not None and bool(tokenizer.chat_templates)

    def explain(self) -> Explanation:
        """Return which kernel of which provider runs each op of the model, the classes in use, and the reasons.

        Some parts tell about their work so far: after requests were answered there is more.

        Raises:
            EngineError: the engine has ended.
        """
        return self._replicas.explain().result()

    def __repr__(self) -> str:
        return f"<LLM {self.opgraft_config.model.name!r}: {self._kind()}>"

    def _repr_html_(self) -> str:
        """Return the model and its cache for a notebook."""
        name = printable(str(self.opgraft_config.model.name))
        return html_table([("model", "on", ""), (name, current_platform().name, self._kind())])

    def _kind(self) -> str:
        """Return in words what the model is for, or how much the cache holds."""
        return "an encoder, see embed()" if self.embeds else self.capacity()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and issubclass(error, KeyboardInterrupt):
            # A step may hang, and who interrupts is not to wait for it.
            self._end(END_SECONDS)
        else:
            self.shutdown()

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        progress: bool | None,
        *,
        chat: bool = False,
    ) -> list[RequestOutput]:
        engine = self.engine
        each_params = params_for(params, len(prompts))
        priorities = priorities_for(priority, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            prepared = engine.inputs.prepare(
                str(next(self._numbers)),
                prompt,
                each_params[index],
                priority=priorities[index],
                add_special_tokens=not chat,
                name=placed("chat" if chat else "prompt", index, len(prompts)),
            )
            requests.append(prepared)
        self._answer_all(requests, progress)
        return [request.output for request in requests]

    def _answer_all(
        self,
        requests: Sequence[OpenRequest],
        progress: bool | None,
        check: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        """Compute prepared requests together, and call ``check`` with the output of each."""
        interrupts = Interrupts()
        with (
            interrupts.awaited(),
            progress_bar("prompts answered", len(requests), progress) as ended,
            closing(self.answers(requests, interrupts=interrupts)) as news,
        ):
            for output in news:
                ended(1)
                if check is not None:
                    check(output)
        if interrupts.noted:  # after the last answer
            raise Interrupted(requests)

    def answers(
        self,
        requests: Sequence[OpenRequest],
        *,
        grows: bool = False,
        interrupts: Interrupts | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Compute prepared requests together, and yield the output of each once the request has ended.

        After an interrupt, and if the iterator is closed, requests that have not ended are aborted.
        Until the iterator has ended or is closed, calls of other threads wait. Interrupts are noted
        while the iterator waits for news, and not in the code that reads from it.

        Args:
            requests: made by ``engine.inputs.prepare`` or ``encoder.prepare``, with ids that are
                new.
            grows: yield each output whenever there is more of the answer.
            interrupts: notes interrupts for a caller that has them noted while it reads, too.

        Raises:
            RequestError: a request can never be served, and none is computed; this thread reads
                other answers of the model; or a thread of an engine asks, as in ``on_step``.
            EngineError: the engine has stopped, was shut down, or belongs to a process that forked
                this one.
            Interrupted: after an interrupt and the end of the step.
            KeyboardInterrupt: after a second interrupt, which does not wait for the end of the
                step.
        """
        interrupts = Interrupts() if interrupts is None else interrupts
        queue: SimpleQueue[News | None] = SimpleQueue()
        interrupts.wake = partial(queue.put, None)
        self._expect_free()
        with self._answering:
            self._answering_thread = get_ident()
            try:
                with interrupts.awaited():
                    self._begin(requests, queue, grows)
                left = len(requests)
                while left and not interrupts.noted:
                    with interrupts.awaited():
                        news = queue.get()
                    if news is None:  # an interrupt was noted
                        continue
                    if isinstance(news, BaseException):
                        raise news
                    output = news()
                    left -= output.finished
                    yield output
                    self._answering_thread = get_ident()
                self._leave_and_wait()
            except KeyboardInterrupt:
                if not self._leave_and_wait(_PATIENCE):
                    self._replicas.kill("an interrupt came in the middle of a step")
                raise
            except BaseException:
                self._leave_and_wait()
                raise
            finally:
                self._answering_thread = None
        if interrupts.noted:
            raise Interrupted(requests)

    def _begin(
        self, requests: Sequence[OpenRequest], queue: SimpleQueue[News | None], grows: bool
    ) -> None:
        """Have the engines begin with requests, and put the news into a queue."""
        self._leave()  # requests of a call that a second interrupt has cut short
        self._readers = [
            QueuedReader(request.output.request_id, queue, grows) for request in requests
        ]
        for opened in self._replicas.open(list(zip(self._readers, requests, strict=True))):
            opened.result()

    def _expect_free(self) -> None:
        """Refuse to wait for what can never come.

        Raises:
            RequestError: this thread has to go on, so that requests are computed or read.
            EngineError: the engine belongs to another process.
        """
        self._replicas.expect_own_process()
        if self._replicas.current() is not None:
            raise RequestError(
                "the thread of the engine asks for answers, which this thread is to compute: have another thread ask, "
                "as on_step is called by the engine's"
            )
        if self._answering.locked() and self._answering_thread == get_ident():
            raise RequestError(
                "this thread has an iterator of answers of this model that has not ended: read the iterator to its "
                "end, or close it, before the next call; AsyncLLM answers several calls side by side"
            )

    def _leave_and_wait(self, seconds: float | None = None) -> bool:
        """Have requests aborted that nobody reads any more, wait for that, and return True once they are gone."""
        leaving = self._leave()
        if self._replicas.current() is not None:
            return True  # the engine's thread has collected an iterator, and cannot wait for itself
        return not wait(leaving, seconds).not_done

    def _leave(self) -> list[Future[None]]:
        """Have requests aborted that nobody reads any more, and return the aborts that are not done."""
        for reader in self._readers:
            if reader.ended:
                continue
            with suppress(EngineError):  # then the engine has ended, and so have the requests
                closing = self._replicas.close(reader)
                if closing is not None:
                    self._leaving.append(closing)
        self._readers = []
        self._leaving = [closing for closing in self._leaving if not closing.done()]
        return self._leaving
