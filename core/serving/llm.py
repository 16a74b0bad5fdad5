"""``LLM``: a model for many prompts at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Lock, get_ident
from typing import Any, TypeAlias

from opgraft.base.progress import Shown, progress_bar
from opgraft.base.text import html_table, printable
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.sampling_params import SamplingParams
from opgraft.errors import EngineError, RequestError
from opgraft.plugins.selection import current_platform
from opgraft.serving.arguments import (
    listed_chats,
    listed_prompts,
    loras_for,
    params_for,
    placed,
    priorities_for,
    shown_bar,
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

_CUT = ", or have LLM.embed cut it with truncate=True"
_PATIENCE = 0.5
"""The longest wait for a step after a second interrupt. Then processes of workers are ended."""


class Interrupted(KeyboardInterrupt):
    """An interrupt while prompts were answered.

    Attributes:
        outputs: of every prompt, in order. Unfinished ones have the ``finish_reason`` ``"abort"``.
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
    other. For many readers at once, use ``AsyncLLM``.

    For example, ``LLM("smollm2").generate(["Hello", "Good"])`` returns two outputs.

    Args:
        model: folder or file of a checkpoint, the name of a packaged model, or a name such as
            ``org/name`` of a model in the local Hugging Face cache. By default ``model.name`` of
            the settings.
        opgraft_config: settings in place of the process's.
        runner: vLLM's word for the kind of model: "generate", "pooling" for an encoder, or "auto".
            The kind is that of the checkpoint. Another one is refused.
        on_step: called after each step with its ``EngineStats``, as a change since the last call,
            and the requests with news; see ``PrometheusExporter``. An encoder makes a call after
            each batch, without requests. Calls come from the thread of the engine.
        **settings: single settings, before all others: by the names in ``SHORT_NAMES``, by dotted
            names as in ``**{"cache.memory_bytes": 1 << 30}``, or ``enforce_eager=True`` for level 0
            and a mapping as ``compilation_config``.

    Raises:
        ConfigError: a setting is unknown or has a wrong value, or the cache is too small for one
            request.
        ModelError: no model is named, its architecture is unknown, or it is not for ``runner``.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        opgraft_config: OpgraftConfig | None = None,
        on_step: OnStep | None = None,
        runner: str = "auto",
        **settings: Any,
    ) -> None:
        super().__init__(
            model, opgraft_config=opgraft_config, on_step=on_step, runner=runner, **settings
        )
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
        priority: int | Sequence[int] | None = 0,
        progress: bool | None = None,
        use_tqdm: Shown = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once, and return the answers in the order of the prompts.

        A prompt that fails while others are computed has the ``finish_reason`` ``"error"``.

        Args:
            prompts: one, or several: text, or token ids; or ``{"prompt": text}`` or
                ``{"prompt_token_ids": [...]}``, also with ``"cache_salt"``. Prompts of different
                salts share nothing in the cache.
            sampling_params: for all, or one for each; by default those of
                ``get_default_sampling_params``.
            priority: for all, or one for each. Lower numbers come first, under
                ``scheduler.policy=priority``.
            progress: show a bar on stderr; by default if stderr is a terminal.
            use_tqdm: vLLM's name for ``progress``; also a class such as ``tqdm.tqdm``, to show that
                bar.
            lora_request: the adapter for all, or for each prompt an adapter or ``None``.

        Raises:
            RequestError: a prompt cannot be served; then none is computed.
            EngineError: the engine has stopped, or was shut down.
            Interrupted: after an interrupt, with the outputs so far.
        """
        listed = listed_prompts(prompts)
        bar = shown_bar(progress, use_tqdm)
        return self._answer(listed, sampling_params, priority, bar, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Shown = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = 0,
        progress: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer chats by the chat template of the model, or the library of ``model.chat_format``.

        Args:
            messages: of one chat, or of several: ``{"role": "user", "content": "…"}``. The content
                may be a list of parts, ``{"type": "text", "text": "…"}``; they become lines of one
                text.
            sampling_params: for all, or one for each chat.
            tools: JSON schemas of functions that the model may call.
            chat_template: source of a template in place of the model's own.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: end the prompt with the last message, for the model to go on
                with. There is no beginning of an answer then.
            chat_template_kwargs: further values for the template, such as ``enable_thinking``, or
                for the library, such as ``reasoning_effort``.
            priority, progress, use_tqdm, lora_request: as for ``generate``.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
            EngineError: the engine has stopped, or was shut down.
            Interrupted: after an interrupt, with the outputs so far.
        """
        bar = shown_bar(progress, use_tqdm)
        render = partial(
            self.engine.inputs.render_chat,
            tools=tools,
            source=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            values=chat_template_kwargs,
        )
        chats = listed_chats(messages)
        prompts = []
        for index, chat in enumerate(chats):
            name = placed("chat", index, len(chats))
            prompts.append(self._rendered(chat, render, name))
        return self._answer(prompts, sampling_params, priority, bar, lora_request, chat=True)

    def _rendered(
        self, chat: Sequence[Message], render: Callable[..., Prompt], name: str
    ) -> Prompt:
        try:
            return render(text_messages(chat))
        except RequestError as error:
            raise RequestError(f"{name}: {error.message}", error.field, code=error.code) from error

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        progress: bool | None = None,
        use_tqdm: Shown = None,
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts, in their order.

        The checkpoint names the pooling and the normalisation.

        Args:
            texts: one, or several: text, or token ids. A default prompt of the checkpoint is put
                before texts, and not before token ids.
            truncate: cut texts that are too long for the model, instead of refusing them. The
                checkpoint's ``truncation_side`` names the end to cut.
            progress, use_tqdm: as for ``generate``.

        Raises:
            ModelError: the model is no encoder.
            RequestError: a text cannot be embedded.
            CheckpointError: the model computes no numbers for a text.
        """
        encoder = self.encoder
        bar = shown_bar(progress, use_tqdm)
        listed = listed_prompts(texts, "texts")
        most = encoder.max_model_len if truncate else None
        with encoder.counters.timed("text"):
            requests = []
            for index, text in enumerate(listed):
                name = placed("text", index, len(listed))
                number = str(next(self._numbers))
                requests.append(encoder.prepare(number, text, name, most=most, advice=_CUT))
        by_id = {request.output.request_id: request for request in requests}

        def expect_vector(output: RequestOutput) -> None:
            error = by_id[output.request_id].error
            # At the first error, the texts that are left are not computed in vain.
            if error is not None:
                raise error

        self._answer_all(requests, bar, expect_vector)
        return encoder.results(requests)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model, with the interface of transformers.

        It gives the same token ids as the engine. Changes of it do not reach the engine.

        Raises:
            InputError: the model has no tokenizer, or transformers is not installed.
        """
        if self.embeds:
            return self.encoder.tokenizer.of_transformers
        return self.engine.inputs.expect_tokenizer().of_transformers

    @property
    def chats(self) -> bool:
        """True if the model has a chat template, or a library writes its chats."""
        return self.engine.inputs.chats

    def explain(self) -> Explanation:
        """Return the kernel and provider of each op of the model, and the classes, with reasons.

        Some parts remark on their work so far, so there is more to see after answered requests.

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
        """Return words for an encoder, or for the size of the cache."""
        return "an encoder, see embed()" if self.embeds else self.capacity()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and issubclass(error, KeyboardInterrupt):
            # A step may hang, and an interrupt must not wait for the end.
            self._end(END_SECONDS)
        else:
            self.shutdown()

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        bar: Shown,
        loras: LoRARequest | Sequence[LoRARequest | None] | None,
        *,
        chat: bool = False,
    ) -> list[RequestOutput]:
        engine = self.engine
        each_params = params_for(params, len(prompts), self.get_default_sampling_params())
        priorities = priorities_for(priority, len(prompts))
        adapters = loras_for(loras, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            prepared = engine.inputs.prepare(
                str(next(self._numbers)),
                prompt,
                each_params[index],
                priority=priorities[index],
                lora_request=adapters[index],
                add_special_tokens=not chat,
                name=placed("chat" if chat else "prompt", index, len(prompts)),
            )
            requests.append(prepared)
        self._answer_all(requests, bar)
        return [request.output for request in requests]

    def _answer_all(
        self,
        requests: Sequence[OpenRequest],
        bar: Shown,
        check: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        """Compute prepared requests together, and call ``check`` with the output of each."""
        interrupts = Interrupts()
        with (
            interrupts.awaited(),
            progress_bar("prompts answered", len(requests), bar) as ended,
            closing(self.answers(requests, interrupts=interrupts)) as news,
        ):
            for output in news:
                ended(1)
                if check is not None:
                    check(output)
        # An interrupt may come after the last answer.
        if interrupts.noted:
            raise Interrupted(requests)

    def answers(
        self,
        requests: Sequence[OpenRequest],
        *,
        grows: bool = False,
        interrupts: Interrupts | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Compute prepared requests together, and yield the output of each request at its end.

        After an interrupt, and if the iterator is closed, open requests are aborted. Until the
        iterator has ended or is closed, calls of other threads wait. Interrupts are noted while the
        iterator waits for news, and not in the code of the reader.

        Args:
            requests: from ``engine.inputs.prepare`` or ``encoder.prepare``, with new ids.
            grows: also yield outputs whenever an answer has grown.
            interrupts: notes interrupts, also for a caller in whose own code they are noted.

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
        # Before the lock, which would never be free.
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
                    # None wakes this thread after an interrupt.
                    if news is None:
                        continue
                    if isinstance(news, BaseException):
                        raise news
                    output = news()
                    left -= output.finished
                    yield output
                    # Another thread may have gone on with the iterator.
                    self._answering_thread = get_ident()
                self._leave_and_wait()
            except KeyboardInterrupt:
                # A step that hangs would keep the program from ending.
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
        """Let the engines begin with requests, and put the news into a queue."""
        # A second interrupt may have cut short the call before.
        self._leave()
        self._readers = []
        for request in requests:
            self._readers.append(QueuedReader(request.output.request_id, queue, grows))
        asked = list(zip(self._readers, requests, strict=True))
        for opened in self._replicas.open(asked):
            opened.result()

    def _expect_free(self) -> None:
        """Refuse to wait for answers that can never come.

        Raises:
            RequestError: this thread itself must go on, to compute or read other requests.
            EngineError: the engine belongs to another process.
        """
        self._replicas.expect_own_process()
        if self._replicas.current() is not None:
            raise RequestError(
                "the thread of the engine asks for answers, which this thread is to compute: have "
                "another thread ask, as on_step is called by the engine's"
            )
        if self._answering.locked() and self._answering_thread == get_ident():
            raise RequestError(
                "this thread has an iterator of answers of this model that has not ended: read the "
                "iterator to its end, or close it, before the next call; AsyncLLM answers several "
                "calls side by side"
            )

    def _leave_and_wait(self, seconds: float | None = None) -> bool:
        """Abort requests that nobody reads any more, and wait. Return True if they are gone."""
        leaving = self._leave()
        # The engine's thread has collected an iterator as garbage, and cannot wait for itself.
        if self._replicas.current() is not None:
            return True
        return not wait(leaving, seconds).not_done

    def _leave(self) -> list[Future[None]]:
        """Abort requests that nobody reads any more, and return the unfinished aborts."""
        for reader in self._readers:
            if reader.ended:
                continue
            # If the engine has ended, so have the requests.
            with suppress(EngineError):
                closing = self._replicas.close(reader)
                if closing is not None:
                    self._leaving.append(closing)
        self._readers = []
        self._leaving = [closing for closing in self._leaving if not closing.done()]
        return self._leaving
