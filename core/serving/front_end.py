"""``FrontEnd``: what ``LLM`` and ``AsyncLLM`` share, a model whose engines run in threads of their own."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opgraft.config import OpgraftConfig
from opgraft.engine.stats import EngineStats
from opgraft.engine.workers.executor import Executor
from opgraft.errors import ModelError
from opgraft.serving.embedding_engine import EmbeddingEngine
from opgraft.serving.engine_settings import engine_config
from opgraft.serving.replicas import Replicas
from opgraft.serving.request_engine import RequestEngine
from opgraft.serving.step_reports import OnStep
from opgraft.serving.text_engine import TextEngine

END_SECONDS = 2.0
"""The longest wait for a step that runs: when nobody has the model any more, after an interrupt, or at the end."""


class FrontEnd:
    """A model, and the engines that share the requests.

    Args:
        model, opgraft_config, on_step, **settings: as for ``LLM``.
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
        self._replicas = Replicas(self.opgraft_config, on_step)
        self._first: RequestEngine = self._replicas.first
        self._pools: list[ThreadPoolExecutor] = []
        self._finalizer = weakref.finalize(
            self, _shutdown, self._replicas, self._pools, END_SECONDS
        )

    @property
    def engine(self) -> TextEngine:
        """The engine of a model that generates, or the first of several.

        Other threads than the engine's own may call what changes nothing.

        Raises:
            ModelError: the model is an encoder.
        """
        if isinstance(self._first, TextEngine):
            return self._first
        raise ModelError(
            f"{self.opgraft_config.model.name} is an encoder, which answers no prompt: LLM.embed gives the vectors of "
            "texts"
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
            f"{self.opgraft_config.model.name} generates text, and has no embeddings of texts: give an encoder, such "
            "as minilm"
        )

    @property
    def embeds(self) -> bool:
        """True if the model is an encoder."""
        return isinstance(self._first, EmbeddingEngine)

    @property
    def replicas(self) -> Replicas:
        """The engines that share the requests: one, or as many as ``parallel.data`` says."""
        return self._replicas

    @property
    def executor(self) -> Executor:
        """The way to the workers, or to those of the first of several engines."""
        return self._first.executor

    def capacity(self) -> str:
        """Return in words how much the cache holds."""
        return self._replicas.capacity()

    def stats(self) -> EngineStats:
        """Return what runs, and totals since the model was loaded; from any thread, also while requests run.

        For an encoder they count batches and texts; see ``EngineStats``.
        """
        return self._replicas.stats()

    def shutdown(self) -> None:
        """Abort what runs and let go of the model and the cache, after the current step.

        Later requests are refused. A ``with`` block ends with it.
        """
        self._end()

    def _end(self, patience: float | None = None) -> None:
        """Shut down, and wait for a step that runs, for so many seconds at most."""
        self._finalizer.detach()
        _shutdown(self._replicas, self._pools, patience)


def _shutdown(
    replicas: Replicas, pools: list[ThreadPoolExecutor], patience: float | None = None
) -> None:
    if replicas.is_inherited:  # the engines and threads are in the process that forked this one
        return
    for pool in pools:
        pool.shutdown(wait=False)
    replicas.shutdown(patience)
