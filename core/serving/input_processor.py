"""``InputProcessor``: makes requests of the engine from prompts and settings of sampling."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.engine.lora.request import LoRARequest
from opgraft.engine.request import Request
from opgraft.engine.sampling import Grammar, bad_word_tokens
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.workers.executor import Executor
from opgraft.errors import EngineError, InputError, RequestError, VocabularyError
from opgraft.models.config import read_config
from opgraft.models.files import Weights, open_weights
from opgraft.serving.arguments import expect_params
from opgraft.serving.chat_format import ChatFormat
from opgraft.serving.chat_template import ChatTemplate
from opgraft.serving.detokenizer import Detokenizer
from opgraft.serving.grammars import Grammars
from opgraft.serving.library_formats import library_format
from opgraft.serving.open_request import Answer, OpenRequest
from opgraft.serving.outputs import CompletionOutput, RequestMetrics, RequestOutput
from opgraft.serving.prompts import Prompt, tokenized, unsalted
from opgraft.serving.sampling_defaults import sampling_defaults
from opgraft.serving.stop_tokens import stop_tokens, suppressed_tokens
from opgraft.serving.template_file import checked_template, with_template
from opgraft.serving.tokenizer import Tokenizer, find_tokenizer


class InputProcessor:
    """The tokenizer of a model, its chat template and its grammars. Any thread may use this.

    Args:
        opgraft_config: resolved.
        max_model_len: tokens of prompt and output together, at most.
        template: the template in the file of ``model.chat_template``. By default, the file is read
            and checked.

    Attributes:
        eos: tokens that end an output.
        tokenizer: ``None`` if the model has no tokenizer.
        vocab_size: number of logits of the model.
        sampling_defaults: fields of ``SamplingParams`` that the checkpoint recommends.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the file of ``model.chat_template`` is no template, or the library or vocabulary
            of ``model.chat_format`` is missing.
    """

    def __init__(
        self, opgraft_config: OpgraftConfig, max_model_len: int, template: str | None = None
    ) -> None:
        self.opgraft_config = opgraft_config
        self.max_model_len = max_model_len
        weights = open_weights(str(opgraft_config.model.name))
        self._unread: VocabularyError | None = None
        self._template = template
        self.tokenizer = self._find_tokenizer(weights)
        folder = weights.path if weights.path.is_dir() else weights.path.parent
        self._library_format = library_format(opgraft_config.model, folder, self.tokenizer)
        config = read_config(weights, plain=True)
        self.vocab_size = int(config.get_text_config().vocab_size)
        takes_defaults = opgraft_config.model.generation_config == "auto"
        self.sampling_defaults = sampling_defaults(weights) if takes_defaults else {}
        self._suppressed = suppressed_tokens(weights, self.vocab_size)
        self.eos = stop_tokens(self.tokenizer, config, weights, self.vocab_size)
        if self._library_format is not None:
            self.eos |= self._library_format.ends
        self._lock = threading.Lock()
        # Weak, so that the workers of an engine that is gone are not kept.
        self._executors: weakref.WeakSet[Executor] = weakref.WeakSet()

    def _find_tokenizer(self, weights: Weights) -> Tokenizer | None:
        """Open the tokenizer, or return None.

        The error of an unreadable vocabulary is raised later, by prompts of text.
        """
        try:
            found = find_tokenizer(weights)
        except VocabularyError as error:
            self._unread = error
            return None
        if found is None:
            return None
        file = self.opgraft_config.model.chat_template
        source = self._template
        if source is None:
            source = checked_template(file)
        return with_template(found, file, source)

    def share_with(self, executor: Executor) -> None:
        """Share the grammars compiled from now on with the workers of an executor."""
        with self._lock:
            self._executors.add(executor)

    def _share(self, grammar: Grammar) -> None:
        with self._lock:
            executors = list(self._executors)
        for executor in executors:
            # The engine itself notices lost workers.
            with suppress(EngineError):
                executor.share(grammar)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the model."""
        return ChatTemplate(self.expect_tokenizer())

    @property
    def chat_format(self) -> ChatFormat:
        """The form of chats: of a library for the model's family, else of the chat template."""
        return self._library_format or self.chat_template

    @property
    def writes_tokens(self) -> bool:
        """True if a library makes token ids of chats, without a text in between."""
        return self._library_format is not None

    @property
    def chats(self) -> bool:
        """True if the form of chats is known."""
        if self._library_format is not None:
            return True
        return self.tokenizer is not None and bool(self.tokenizer.chat_templates)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, source: str | None = None, **options: Any
    ) -> str | list[int]:
        """Return the prompt of a chat: text, or token ids.

        Args:
            messages: of the chat.
            source: a chat template in place of the model's form.
            **options: as for ``ChatFormat.render``.

        Raises:
            RequestError: the messages cannot be written, or the form of chats is not known.
        """
        if source is not None:
            return self.chat_template.render(messages, source=source, **options)
        return self.chat_format.render(messages, **options)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of structured outputs."""
        return Grammars(self.expect_tokenizer(), self.vocab_size, self.eos, self._share)

    def expect_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            InputError: the model has no tokenizer, or an unreadable one.
        """
        if self._unread is not None:
            raise InputError(str(self._unread)) from self._unread
        if self.tokenizer is None:
            raise InputError(
                "the model has no tokenizer: give prompts as token ids, or put tokenizer.json "
                "beside its weights"
            )
        return self.tokenizer

    def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        name: str = "the prompt",
        keep_last: int | None = None,
        wanted: int = 1,
    ) -> tuple[str | None, list[int]]:
        """Return the text of a prompt (None for a prompt of token ids), and the token ids.

        With ``keep_last`` there are at most as many token ids, the last ones. ``wanted`` is the
        number of tokens that the answer may have, for the advice about a long prompt.

        Raises:
            RequestError: the prompt is empty, too long, or of a wrong type.
            InputError: the prompt is text, and the model has no tokenizer.
        """
        tokenizer = self.expect_tokenizer() if isinstance(prompt, str) else self.tokenizer
        return tokenized(
            prompt,
            tokenizer,  # type: ignore[arg-type]  # token ids need none
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            add_special_tokens=add_special_tokens,
            name=name,
            keep_last=keep_last,
            wanted=wanted,
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
        lora_request: LoRARequest | None = None,
        arrival: float | None = None,
        name: str = "",
    ) -> OpenRequest:
        """Check a request and make it ready for ``submit``.

        Args:
            request_id: unique among open requests.
            prompt: text or token ids.
            params: sampling settings.
            priority: lower numbers come first, under the policy "priority".
            cache_salt: requests of different salts share nothing in the cache.
            add_special_tokens: begin and end the text as usual; False for the text of a chat.
            lora_request: the adapter; ``None`` for the base model.
            arrival: seconds of ``time.monotonic``; by default now.
            name: of the prompt, for errors; by default after the request.

        Raises:
            RequestError: the prompt cannot be taken, an argument has the wrong type or contradicts
                the prompt, or a setting names a token beyond the vocabulary.
            InputError: the model has no tokenizer for text, stop strings or bad words, or cannot
                give the structured output.
        """
        expect_params(params)
        self._expect_in_vocabulary(params)
        self.expect_priority(priority)
        metrics = RequestMetrics(_arrival(arrival), max_tokens=params.max_tokens)
        name = name or f"the prompt of request {request_id!r}"
        prompt, salt = unsalted(prompt, name, cache_salt)
        text, ids = self.encode(prompt, add_special_tokens=add_special_tokens, name=name)
        grammar = None if params.structured_output is None else self.grammars.of(params)
        request = Request(
            request_id,
            ids,
            params,
            eos=self.eos,
            priority=priority,
            cache_salt=salt,
            bad_words=self._bad_words(params),
            grammar=grammar,
            lora=lora_request,
        )
        outputs: list[CompletionOutput] = []
        growing = {}
        # The engine knows one request for each of the n answers.
        for index, each in enumerate(request.split()):
            answer = Answer.of(index, each, self._detokenizer(each))
            outputs.append(answer.output)
            growing[each.request_id] = answer
        output = RequestOutput(request_id, text, ids, outputs, metrics=metrics)
        return OpenRequest(output, growing)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of tokens that never occur in the answer."""
        if not params.bad_words:
            return self._suppressed
        words = bad_word_tokens(params.bad_words, self.expect_tokenizer())
        return (*self._suppressed, *words)

    def _expect_in_vocabulary(self, params: SamplingParams) -> None:
        # The params have refused negative ids, and do not know the vocabulary.
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            highest = max(getattr(params, name) or (), default=0)
            if highest >= self.vocab_size:
                raise RequestError(
                    f"{name} has the token id {highest!s:.20}, and the vocabulary has "
                    f"{self.vocab_size}: use 0 to {self.vocab_size - 1}",
                    name,
                )

    def expect_priority(self, priority: int) -> None:
        """Refuse a priority, unless the scheduler follows priorities.

        Raises:
            RequestError: the priority is not 0, and the order is that of arrival.
        """
        policy = self.opgraft_config.scheduler.policy
        if policy != "priority" and priority != 0:
            raise RequestError(
                f"priority is {priority!r:.40}, and scheduler.policy is {policy}, by which it has "
                "no effect: leave it out, or set scheduler.policy to priority",
                "priority",
                code="unsupported_value",
            )

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        """Return the text of a request; None without a tokenizer."""
        params = request.params
        # Stop strings need a text, so that a request with some fails below.
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


def _arrival(given: float | None) -> float:
    if given is None:
        return time.monotonic()
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise RequestError(
            f"arrival is {given!r:.80}: give seconds of time.monotonic(), or None for now",
            "arrival",
        )
    return given
