"""``LLM``: a model that answers many prompts at once, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import RLock
from typing import Any, TypeAlias

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.config.whole import config_from_fields, resolve
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import EngineStats
from opgraft.errors import ConfigError, ModelError, RequestError, close_matches
from opgraft.models.build import generates
from opgraft.models.files import opened_once
from opgraft.plugins.host import load_plugins
from opgraft.serving.embedder import Embedder
from opgraft.serving.interrupts import interrupts_noted
from opgraft.serving.outputs import EmbeddingOutput, RequestOutput
from opgraft.serving.progress import progress_bar
from opgraft.serving.prompts import Prompt
from opgraft.serving.step_reports import OnStep
from opgraft.serving.text_engine import TextEngine
from opgraft.state import host_state

Message: TypeAlias = Mapping[str, Any]

SHORT_NAMES: Mapping[str, str] = {
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "seed": "model.seed",
    "quantization": "quantization.method",
    "tensor_parallel_size": "parallel.tensor",
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
        done = sum(all(answer.finish_reason != "abort" for answer in output.outputs) for output in outputs)
        super().__init__(f"{done} of {len(outputs)} prompts were answered; the exception's outputs has them all")
        self.outputs = list(outputs)


class LLM:
    """A language model with an engine of its own.

    Prompts of one call are answered together. Calls from several threads are answered one after the other; for many
    readers at once there is ``AsyncLLM``.

    Args:
        model: a checkpoint's folder or file, or the name of a packaged model; ``model.name`` of the settings if not
            given.
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
        self._engine: TextEngine | None = None
        self._embedder: Embedder | None = None
        with opened_once():
            if generates(self.opgraft_config):
                self._engine = TextEngine(self.opgraft_config, on_step)
            else:
                self._embedder = Embedder(self.opgraft_config, on_step)
        self._numbers = count()
        self._answering = RLock()

    @property
    def engine(self) -> TextEngine:
        """The engine of a model that generates.

        Raises:
            ModelError: the model is an encoder.
        """
        if self._engine is None:
            name = self.opgraft_config.model.name
            raise ModelError(f"{name} is an encoder, which answers no prompt: LLM.embed gives the vectors of texts")
        return self._engine

    @property
    def embeds(self) -> bool:
        """Tell whether the model is an encoder."""
        return self._embedder is not None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once, and return the answers in the order of the prompts.

        A prompt that fails while others are computed has the ``finish_reason`` ``"error"``.

        Args:
            prompts: one, or several: text, or token ids.
            params: for all, or one for each; ``SamplingParams()`` if not given.
            progress: show a bar on stderr; by default where that is a terminal.

        Raises:
            RequestError: a prompt cannot be taken; then none is computed.
            Interrupted: after an interrupt; it has what was computed.
        """
        listed = _listed(prompts)
        return self._answer(listed, _one_each(params, len(listed)), progress, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer chats by the chat template of the model.

        Args:
            messages: of one chat, or of several: ``{"role": "user", "content": "…"}``.
            params: for all, or one for each chat.
            tools: JSON schemas of functions that the model may call.
            progress: as for ``generate``.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
            Interrupted: after an interrupt; it has what was computed.
        """
        chats: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.engine.chat_template.render(chat, tools=tools) for chat in chats]
        return self._answer(texts, _one_each(params, len(texts)), progress, add_special_tokens=False)

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, truncate: bool = False, progress: bool | None = None
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts, in their order, pooled and normalised as the checkpoint says.

        Args:
            texts: one, or several: text, or token ids.
            truncate: cut texts that are longer than the model takes, instead of refusing them.
            progress: as for ``generate``.

        Raises:
            ModelError: the model is no encoder.
            RequestError: a text cannot be taken.
            CheckpointError: the model computes no numbers for a text.
        """
        if self._embedder is None:
            name = self.opgraft_config.model.name
            raise ModelError(f"{name} generates text, and has no embeddings of texts: give an encoder, such as minilm")
        listed = _listed(texts)
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
        return self._embedder.explain() if self._embedder is not None else self.engine.core.explain()

    def stats(self) -> EngineStats:
        """Return what runs, and totals since the model was loaded; also from another thread, while prompts run.

        Of an encoder they count batches and texts; see ``EngineStats``.
        """
        return self._embedder.stats() if self._embedder is not None else self.engine.core.stats()

    def shutdown(self) -> None:
        """Let go of the model and its cache."""
        if self._embedder is not None:
            self._embedder.executor.shutdown()
        else:
            self.engine.shutdown()

    def _answer(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        progress: bool | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        ids = [str(next(self._numbers)) for _ in prompts]
        outputs: dict[str, RequestOutput] = {}
        with self._answering, interrupts_noted() as interrupted:
            try:
                for request_id, prompt, each in zip(ids, prompts, params, strict=True):
                    outputs[request_id] = self.engine.add(
                        request_id, prompt, each, add_special_tokens=add_special_tokens
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
    given = opgraft_config or host_state().settings().config
    named = {"model.name": model} if model is not None else {}
    arguments = config_from_fields({**_by_dotted_names(settings), **named})
    return resolve([("the settings", given), ("the arguments of LLM", arguments)]).config


def _by_dotted_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {SHORT_NAMES.get(name, _dotted(name)): value for name, value in settings.items()}


def _dotted(name: str) -> str:
    if "." not in name and name not in SHORT_NAMES:
        raise ConfigError(
            f"LLM has no argument {name!r}: {close_matches(name, SHORT_NAMES)} Every setting is taken by its dotted "
            "name, as in **{'cache.memory_bytes': 1 << 30}"
        )
    return name


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
    return [prompts] if one else prompts  # type: ignore[list-item,return-value]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if len(params) != prompts:
        raise RequestError(f"{prompts} prompts come with {len(params)} SamplingParams: give one for all, or one each")
    return params
