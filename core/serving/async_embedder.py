"""``AsyncEmbedder``: an encoder that embeds texts of many readers, in batches that they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.engine.executor import Executor
from opgraft.serving.arguments import placed
from opgraft.serving.embedder import Embedder
from opgraft.serving.outputs import EmbeddingOutput
from opgraft.serving.pools import called_in
from opgraft.serving.prompts import Prompt
from opgraft.serving.step_reports import OnStep
from opgraft.serving.tokenizer import Tokenizer

_T = TypeVar("_T")


@dataclass(eq=False)
class _Waiting:
    """A text of which somebody waits for the vector, unless the future is done."""

    name: str
    ids: list[int]
    vector: asyncio.Future[list[float]]


class AsyncEmbedder:
    """An encoder in a thread of its own, which computes a batch of texts of like length at a time.

    Each batch has the text that has waited longest. Texts that nobody waits for any more are in none. It is for one
    event loop.

    Args:
        opgraft_config, on_step: as for ``Embedder``. ``on_step`` is called in the thread that computes.

    Raises:
        ModelError: no model is named, or it cannot be made.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, opgraft_config: OpgraftConfig, on_step: OnStep | None = None) -> None:
        self.embedder = Embedder(opgraft_config, on_step)
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="opgraft-embed")
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="opgraft-prepare")
        self._busy_since: float | None = None
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    @property
    def executor(self) -> Executor:
        """The way to the workers."""
        return self.embedder.executor

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.embedder.tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""
        return self.embedder.vocab_size

    @property
    def max_model_len(self) -> int:
        """The longest text, in tokens."""
        return self.embedder.max_tokens

    def capacity(self) -> str:
        """Say in words that there is no cache."""
        return f"none, as it is an encoder; the longest text has {self.max_model_len:,} tokens"

    async def warm_up(self) -> None:
        """Embed a token."""
        await self.embed([[0]])

    async def prepare(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function in the thread that prepares requests, such as one that tokenizes a text.

        Raises:
            EngineError: the encoder was shut down.
        """
        return await called_in(self._preparing, function, *args)

    async def encode(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of texts.

        Raises:
            RequestError: a text cannot be taken.
        """
        return await self.prepare(
            lambda: [
                self.embedder.encode(text, placed("text", i, len(texts)))
                for i, text in enumerate(texts)
            ]
        )

    async def embed(self, texts: Sequence[list[int]]) -> list[EmbeddingOutput]:
        """Return the vectors of texts that ``encode`` has made token ids of, in their order.

        Who is cancelled costs no batch any more.

        Raises:
            CheckpointError, PluginError: a vector has NaN or infinity.
        """
        loop = asyncio.get_running_loop()
        names = (placed("text", i, len(texts)) for i in range(len(texts)))
        waiting = [
            _Waiting(name, ids, loop.create_future())
            for name, ids in zip(names, texts, strict=True)
        ]
        self._waiting += waiting
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            vectors = await asyncio.gather(*(text.vector for text in waiting))
        finally:
            for text in waiting:
                text.vector.cancel()
        return [EmbeddingOutput(str(i), None, ids, vectors[i]) for i, ids in enumerate(texts)]

    async def _work(self) -> None:
        """Embed what waits, batch by batch, until nothing does."""
        while batch := self._next():
            await self._embed(batch)

    def _next(self) -> list[_Waiting]:
        """Take the batch of the text that has waited longest; those of like length go with it."""
        waiting = [text for text in self._waiting if not text.vector.done()]
        batches = self.embedder.batches([len(text.ids) for text in waiting])
        chosen = set(next((batch for batch in batches if 0 in batch), ()))
        self._waiting = [text for index, text in enumerate(waiting) if index not in chosen]
        self.embedder.waiting = len(self._waiting)
        return [waiting[index] for index in sorted(chosen)]

    async def _embed(self, batch: Sequence[_Waiting]) -> None:
        self._busy_since = time.monotonic()
        try:
            vectors = await called_in(
                self._computing, self.embedder.vectors, [text.ids for text in batch]
            )
        except Exception as error:
            if len(batch) == 1:
                _settle(batch[0], error)
            else:
                for text in batch:  # one of them is at fault, and is to fail alone
                    await self._embed([text])
            return
        finally:
            self._busy_since = None
        for text, each in zip(batch, vectors, strict=True):
            if each.fault:
                _settle(text, self.embedder.refusal({text.name: each.fault}))
            else:
                _settle(text, each.vector)

    @property
    def busy_seconds(self) -> float:
        """The seconds that the batch of this moment has taken: of one that hangs they grow."""
        since = self._busy_since
        return (
            0.0
            if since is None
            else max(0.0, time.monotonic() - max(since, self.executor.ready_since))
        )

    def end_hanging(self, seconds: float) -> None:
        """Do nothing: there is no other engine that would go on."""

    def kill(self) -> None:
        """End workers that do not answer, where they have processes of their own."""
        self.executor.kill()

    async def explain(self) -> Explanation:
        """Tell which kernel of which provider runs each op of the model, and which classes are in use, and why."""
        return await called_in(self._computing, self.embedder.explain)

    async def check_health(self) -> None:
        """Raise where the encoder cannot go on; have a worker that has ended start again, where it may.

        Raises:
            EngineError: a worker has ended.
        """
        self.executor.check_health()
        if self.executor.can_restart and not self.executor.is_restarting:
            self._computing.submit(self.embedder.restart)

    def states(self) -> list[str]:
        """Return the state of the encoder alone: ``ready`` or ``restarting``."""
        return ["restarting" if self.executor.is_lost or self.executor.is_restarting else "ready"]

    def shutdown(self) -> None:
        """Let go of the model, after the current batch."""
        self._preparing.shutdown(wait=False)
        self._computing.shutdown()
        self.embedder.shutdown()


def _settle(text: _Waiting, found: list[float] | Exception) -> None:
    if text.vector.done():
        return
    if isinstance(found, Exception):
        text.vector.set_exception(found)
    else:
        text.vector.set_result(found)
