"""``LLM``: a model that answers many prompts at once, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import RLock
from typing import Any, TypeAlias

from opgraft.base.progress import progress_bar
from opgraft.base.text import html_table, printable
from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig, set_config
from opgraft.config.whole import config_from_fields, resolve
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import EngineStats
from opgraft.errors import ConfigError, ModelError, RequestError, close_matches
from opgraft.models.build import generates
from opgraft.models.files import opened_once
from opgraft.plugins.host import load_plugins
from opgraft.plugins.selection import current_platform
from opgraft.registry.state import host_state
from opgraft.serving.arguments import (
    listed_chats,
    listed_prompts,
    params_for,
    placed,
    priorities_for,
    text_messages,
)
from opgraft.serving.embedder import Embedder
from opgraft.serving.interrupts import interrupts_noted
from opgraft.serving.outputs import EmbeddingOutput, RequestOutput
from opgraft.serving.prompts import Prompt
from opgraft.serving.replicas import is_replicated
from opgraft.serving.replicated_engine import ReplicatedEngine
from opgraft.serving.step_reports import OnStep
from opgraft.serving.text_engine import TextEngine

Message: TypeAlias = Mapping[str, Any]

SHORT_NAMES: Mapping[str, str] = {
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "seed": "model.seed",
    "quantization": "quantization.method",
    "tensor_parallel_size": "parallel.tensor",
    "data_parallel_size": "parallel.data",
    "block_size": "cache.block_size",
    "kv_cache_dtype": "cache.dtype",
    "enable_prefix_caching": "cache.prefix_reuse",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
}
"""Keyword arguments of ``LLM``, by the names of vLLM, to the settings that they stand for."""


class Interrupted(KeyboardInterrupt):
    """An interrupt while prompts were answered.

    Attributes:
        outputs: of every prompt, in order; what had not ended has the ``finish_reason`` ``"abort"``.
    """

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        done = sum(
            all(answer.finish_reason != "abort" for answer in output.outputs) for output in outputs
        )
        super().__init__(
            f"{done} of {len(outputs)} prompts were answered; the exception's outputs has them all"
        )
        self.outputs = list(outputs)


class LLM:
    """A language model with an engine of its own.

    Prompts of one call are answered together. Calls from several threads are answered one after the other; for many
    readers at once there is ``AsyncLLM``.

    Args:
        model: a checkpoint's folder or file, the name of a packaged model, or a name such as ``org/name`` of a model
            in the local Hugging Face cache; ``model.name`` of the settings if not given.
        opgraft_config: settings in place of the process's.
        on_step: called after each step with its ``EngineStats``, a change since the last call, and the requests that
            have news; see ``PrometheusExporter``. An encoder calls it after each batch, without requests.
        **settings: single settings, which go before those: by the names in ``SHORT_NAMES``, or by dotted names as in
            ``**{"cache.memory_bytes": 1 << 30}``.

    Raises:
        ConfigError: a setting that there is not, or a value that it does not take; a cache too small for one request.
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
        self.opgraft_config = engine_config(model, opgraft_config, settings).resolved()
        self._engine: TextEngine | ReplicatedEngine | None = None
        self._embedder: Embedder | None = None
        with opened_once():
            if generates(self.opgraft_config):
                several = is_replicated(self.opgraft_config.parallel)
                self._engine = (ReplicatedEngine if several else TextEngine)(
                    self.opgraft_config, on_step
                )
            else:
                self._embedder = Embedder(self.opgraft_config, on_step)
        self._numbers = count()
        self._answering = RLock()

    @property
    def engine(self) -> TextEngine | ReplicatedEngine:
        """The engine of a model that generates; where ``parallel.data`` is above 1, all of them.

        Raises:
            ModelError: the model is an encoder.
        """
        if self._engine is None:
            name = self.opgraft_config.model.name
            raise ModelError(
                f"{name} is an encoder, which answers no prompt: LLM.embed gives the vectors of texts"
            )
        return self._engine

    @property
    def embeds(self) -> bool:
        """Tell whether the model is an encoder."""
        return self._embedder is not None

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
            prompts: one, or several: text, or token ids; or ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``,
                where ``"cache_salt"`` may stand too: prompts of different salts share nothing in the cache.
            sampling_params: for all, or one for each; ``SamplingParams()`` if not given.
            priority: for all, or one for each: lower ones come first. It needs ``scheduler.policy=priority``.
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
            messages: of one chat, or of several: ``{"role": "user", "content": "…"}``. The content may be a list of
                parts, ``{"type": "text", "text": "…"}``, which become lines of one text.
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
            return self.engine.chat_template.render(text_messages(chat), tools=tools)
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
            texts: one, or several: text, or token ids. The default prompt of the checkpoint, if it has one, is put
                before a text, and not before token ids.
            truncate: cut texts that are longer than the model takes, instead of refusing them. The checkpoint's
                ``truncation_side`` says at which end.
            progress: as for ``generate``.

        Raises:
            ModelError: the model is no encoder.
            RequestError: a text cannot be taken.
            CheckpointError: the model computes no numbers for a text.
        """
        if self._embedder is None:
            name = self.opgraft_config.model.name
            raise ModelError(
                f"{name} generates text, and has no embeddings of texts: give an encoder, such as minilm"
            )
        listed = listed_prompts(texts, "texts")
        with self._answering, progress_bar("prompts answered", len(listed), progress) as ended:
            return self._embedder.embed(listed, truncate=truncate, ended=ended)

    @property
    def chats(self) -> bool:
        """Tell whether the model has a chat template."""
        return self.engine.tokenizer is not None and bool(self.engine.tokenizer.chat_templates)

    def explain(self) -> Explanation:
        """Tell which kernel of which provider runs each op of the model, and which classes of whom are in use, and why.

        What some of them say of what they did is as of now: after requests were answered it tells more.
        """
        return self._embedder.explain() if self._embedder is not None else self.engine.explain()

    def stats(self) -> EngineStats:
        """Return what runs, and totals since the model was loaded; also from another thread, while prompts run.

        Of an encoder they count batches and texts; see ``EngineStats``.
        """
        return self._embedder.stats() if self._embedder is not None else self.engine.stats()

    def shutdown(self) -> None:
        """Let go of the model and its cache; what is asked for afterwards is refused. A ``with`` block ends with it."""
        if self._embedder is not None:
            self._embedder.shutdown()
        else:
            self.engine.shutdown()

    def __repr__(self) -> str:
        return f"<LLM {self.opgraft_config.model.name!r}: {self._kind()}>"

    def _repr_html_(self) -> str:
        """Return the model and its cache for a notebook."""
        name = printable(str(self.opgraft_config.model.name))
        return html_table([("model", "on", ""), (name, current_platform().name, self._kind())])

    def _kind(self) -> str:
        """Say in words what the model is for, or what its cache holds."""
        return "an encoder, see embed()" if self._engine is None else self._engine.capacity()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
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
        each = zip(
            prompts,
            params_for(params, len(prompts)),
            priorities_for(priority, len(prompts)),
            strict=True,
        )
        ids = [str(next(self._numbers)) for _ in prompts]
        outputs: dict[str, RequestOutput] = {}
        with self._answering, interrupts_noted() as interrupted:
            try:
                for index, (prompt, its_params, its_priority) in enumerate(each):
                    outputs[ids[index]] = self.engine.add(
                        ids[index],
                        prompt,
                        its_params,
                        priority=its_priority,
                        add_special_tokens=not chat,
                        name=placed("chat" if chat else "prompt", index, len(ids)),
                    )
                with progress_bar("prompts answered", len(prompts), progress) as ended:
                    while self.engine.has_work and not interrupted():
                        ended(sum(output.finished for output in self.engine.step()))
            finally:
                for request_id in ids:
                    with suppress(RequestError):  # it has finished, or was never added
                        self.engine.abort(request_id)
        if interrupted():
            raise Interrupted(list(outputs.values()))
        return list(outputs.values())


def engine_config(
    model: str | None, opgraft_config: OpgraftConfig | None, settings: Mapping[str, Any]
) -> OpgraftConfig:
    """Return the settings of an engine as ``LLM`` takes them.

    Raises:
        ConfigError: a setting that there is not, or a value that it does not take.
    """
    load_plugins()  # which may have settings to add
    named = {"model.name": model} if model is not None else {}
    arguments = config_from_fields({**_by_dotted_names(settings), **named})
    if opgraft_config is None:
        with set_config(arguments, origin="the arguments of LLM"):
            return host_state().settings().handed_down()
    whole = "the opgraft_config of LLM"
    layers = [(whole, opgraft_config), ("the arguments of LLM", arguments)]
    return resolve((), layers).handed_down(whole)


def _by_dotted_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, tuple[str, Any]] = {}
    for name, value in settings.items():
        dotted = SHORT_NAMES.get(name, _dotted(name))
        if dotted in found:
            raise ConfigError(
                f"{found[dotted][0]} is {found[dotted][1]!r:.80} and {name} {value!r:.80}, and both stand for "
                f"{dotted}: leave one out"
            )
        found[dotted] = name, value
    return {dotted: value for dotted, (_, value) in found.items()}


def _dotted(name: str) -> str:
    if name == "gpu_memory_utilization":
        raise ConfigError(
            "gpu_memory_utilization is vLLM's share of all memory, for weights and cache: set cache.memory_share, the "
            "cache's share of what is free when the model has been loaded, as in **{'cache.memory_share': 0.9}"
        )
    if "." not in name and name not in SHORT_NAMES:
        raise ConfigError(
            f"LLM has no argument {name!r}: {close_matches(name, SHORT_NAMES)} Every setting is taken by its dotted "
            "name, as in **{'cache.memory_bytes': 1 << 30}"
        )
    return name
