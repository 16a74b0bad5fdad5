"""``AsyncEmbedder``: an encoder that embeds texts of many readers, all that wait at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from opgraft.binding.explaining import Explanation
from opgraft.config import OpgraftConfig
from opgraft.serving.embedder import Embedder
from opgraft.serving.outputs import EmbeddingOutput
from opgraft.serving.prompts import Prompt

_T = TypeVar("_T")


@dataclass(eq=False)
class _Waiting:
    """Texts of one reader."""

    texts: Sequence[list[int]]
    future: asyncio.Future[list[EmbeddingOutput]]


class AsyncEmbedder:
    """An encoder in a thread of its own. Texts that come while it computes are batched by length in the next call.

    It is for one event loop.

    Args:
        opgraft_config: as for ``Embedder``.

    Raises:
        ModelError: no model is named, or it cannot be made.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, opgraft_config: OpgraftConfig) -> None:
        self.embedder = Embedder(opgraft_config)
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="opgraft-embed")
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="opgraft-prepare")
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def prepare(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function in the thread that prepares requests, such as one that tokenizes a text."""
        return await _called(self._preparing, function, *args)

    async def encode(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of texts.

        Raises:
            RequestError: a text cannot be taken.
        """
        return await self.prepare(lambda: [self.embedder.encode(text, index) for index, text in enumerate(texts)])

    async def embed(self, texts: Sequence[list[int]]) -> list[EmbeddingOutput]:
        """Return the vectors of texts that ``encode`` has made token ids of, in their order.

        Raises:
            RequestError: a vector has numbers that are none.
        """
        waiting = _Waiting(texts, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.future

    async def _work(self) -> None:
        """Embed what waits until nothing does; what has been cancelled meanwhile is left out."""
        while self._waiting:
            batch = [waiting for waiting in self._waiting if not waiting.future.done()]
            self._waiting.clear()
            try:
                await self._embed(batch)
            except Exception:  # one of them is at fault, and is to fail alone
                for waiting in batch:
                    await self._embed_alone(waiting)

    async def _embed(self, batch: Sequence[_Waiting]) -> None:
        texts = [text for waiting in batch for text in waiting.texts]
        found = iter(await _called(self._computing, self._computed, texts))
        for waiting in batch:
            outputs = [next(found) for _ in waiting.texts]
            if not waiting.future.done():
                waiting.future.set_result(outputs)

    async def _embed_alone(self, waiting: _Waiting) -> None:
        try:
            await self._embed([waiting])
        except Exception as error:
            if not waiting.future.done():
                waiting.future.set_exception(error)

    def _computed(self, texts: Sequence[list[int]]) -> list[EmbeddingOutput]:
        return self.embedder.embed(texts, truncate=False)

    async def explain(self) -> Explanation:
        """Tell which kernel of which provider runs each op of the model, and which classes are in use, and why."""
        return await _called(self._computing, self.embedder.explain)

    async def check_health(self) -> None:
        """Raise where the encoder cannot go on.

        Raises:
            EngineError: a worker has ended.
        """
        self.embedder.executor.check_health()

    def shutdown(self) -> None:
        """Let go of the model, after the current batch."""
        self._preparing.shutdown(wait=False)
        self._computing.shutdown()
        self.embedder.executor.shutdown()


async def _called(pool: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
    call = partial(contextvars.copy_context().run, function, *args)
    return await asyncio.get_running_loop().run_in_executor(pool, call)
