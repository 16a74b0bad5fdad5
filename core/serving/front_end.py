"""``FrontEnd``: the common base of ``LLM`` and ``AsyncLLM``, a model with engines in threads."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.engine.sampling_params import SamplingParams
from opgraft.engine.stats import EngineStats
from opgraft.engine.workers.executor import Executor
from opgraft.errors import ConfigError, ModelError, close_matches
from opgraft.models.build import generates
from opgraft.serving.embedding_engine import EmbeddingEngine
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.replicas import Replicas
from opgraft.serving.request_engine import RequestEngine
from opgraft.serving.step_reports import OnStep
from opgraft.serving.template_file import checked_template
from opgraft.serving.text_engine import TextEngine

_RUNNERS = ("auto", "generate", "pooling")

END_SECONDS = 2.0
"""The longest wait for the end of a running step.

It applies when the model is garbage, after an interrupt, and at the end of the process.
"""


class FrontEnd:
    """A model, and the engines that share the requests.

    Args:
        model, opgraft_config, on_step, runner, **settings: as for ``LLM``.

    Raises:
        ConfigError: ``runner`` is no kind of model.
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
        if runner not in _RUNNERS:
            raise ConfigError(f"runner is {runner!r:.80}: {close_matches(str(runner), _RUNNERS)}")
        self.opgraft_config = engine_config(model, opgraft_config, settings).resolved()
        template = checked_template(self.opgraft_config.model.chat_template)
        self._expect_kind(runner)
        self._replicas = Replicas(self.opgraft_config, on_step, template)
        self._first: RequestEngine = self._replicas.first
        self._pools: list[ThreadPoolExecutor] = []
        # Not a method of this object, which the finalizer would keep alive.
        self._finalizer = weakref.finalize(
            self, _shutdown, self._replicas, self._pools, END_SECONDS
        )

    def _expect_kind(self, runner: str) -> None:
        """Refuse a model of another kind, before its weights are loaded.

        Raises:
            ModelError: the model is an encoder, and ``runner`` names a decoder, or the reverse.
        """
        if runner == "auto":
            return
        kind = "generate" if generates(self.opgraft_config) else "pooling"
        if runner != kind:
            raise ModelError(
                f"runner is {runner!r}, and {self.opgraft_config.model.name} is a model for "
                f"{kind!r}: leave runner out, or give another model"
            )

    @property
    def engine(self) -> TextEngine:
        """The engine of a generating model, or the first of several engines.

        The engine has a thread of its own. Other threads may call methods that change nothing.

        Raises:
            ModelError: the model is an encoder.
        """
        if isinstance(self._first, TextEngine):
            return self._first
        raise ModelError(
            f"{self.opgraft_config.model.name} is an encoder, which answers no prompt: LLM.embed "
            "gives the vectors of texts"
        )

    @property
    def encoder(self) -> EmbeddingEngine:
        """The engine of an encoder.

        Raises:
            ModelError: the model generates text.
        """
        if isinstance(self._first, EmbeddingEngine):
            return self._first
        raise ModelError(
            f"{self.opgraft_config.model.name} generates text, and has no embeddings of texts: "
            "give an encoder, such as minilm"
        )

    @property
    def embeds(self) -> bool:
        """True if the model is an encoder."""
        return isinstance(self._first, EmbeddingEngine)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling of requests without settings of their own.

        The checkpoint's ``generation_config.json`` has the values, unless the setting
        ``model.generation_config`` leaves them out.

        Raises:
            ModelError: the model is an encoder.
        """
        return SamplingParams(**self.engine.inputs.sampling_defaults)

    @property
    def replicas(self) -> Replicas:
        """The engines that share the requests: one, or ``parallel.data`` of them."""
        return self._replicas

    @property
    def executor(self) -> Executor:
        """The executor of the engine, or of the first of several engines."""
        return self._first.executor

    def capacity(self) -> str:
        """Return the sizes of the cache as a sentence."""
        return self._replicas.capacity()

    def stats(self) -> EngineStats:
        """Return the numbers of requests and tokens, as totals since the model was loaded.

        Any thread may call this, also while requests run. For an encoder, batches and texts are
        counted; see ``EngineStats``.
        """
        return self._replicas.stats()

    def shutdown(self) -> None:
        """Abort all requests, and release the model and the cache after the current step.

        Later requests are refused. The end of a ``with`` block calls this.
        """
        self._end()

    def _end(self, patience: float | None = None) -> None:
        """Shut down, and wait for a running step, for ``patience`` seconds at most."""
        # The end of the process would shut down again otherwise.
        self._finalizer.detach()
        _shutdown(self._replicas, self._pools, patience)


def _shutdown(
    replicas: Replicas, pools: list[ThreadPoolExecutor], patience: float | None = None
) -> None:
    # The engines and threads are in the process that forked this one.
    if replicas.is_inherited:
        return
    for pool in pools:
        pool.shutdown(wait=False)
    replicas.shutdown(patience)
