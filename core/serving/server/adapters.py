"""``ServedAdapters``: the LoRA adapters that clients choose by the field ``model``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from opgraft.engine.lora.request import LoRARequest
from opgraft.errors import EngineError, HTTPError
from opgraft.serving.async_llm import AsyncLLM


class ServedAdapters:
    """The adapters of a server by name.

    Args:
        model: the base model.
        taken: names of the base model.
    """

    def __init__(self, model: AsyncLLM, taken: Sequence[str]) -> None:
        self._model = model
        self._taken = taken
        self._numbers = count(1)
        self._by_name: dict[str, LoRARequest] = {}
        # One change at a time: a name must not be taken twice while files are read.
        self._changing = asyncio.Lock()
        # An adapter without a name stays until its last request has ended: a request reaches the
        # engine some time after it has found its adapter.
        self._requests: Counter[int] = Counter()
        self._unnamed: set[int] = set()
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the adapters, in the order of their loading."""
        return list(self._by_name)

    def find(self, name: str | None) -> LoRARequest | None:
        """Return the adapter of a name; ``None`` if there is none."""
        return None if name is None else self._by_name.get(name)

    @contextmanager
    def used(self, adapter: LoRARequest | None) -> Iterator[None]:
        """Within the block, a request uses an adapter, so that the adapter stays."""
        if adapter is None:
            yield
            return
        number = adapter.lora_int_id
        self._requests[number] += 1
        try:
            yield
        finally:
            self._requests[number] -= 1
            if not self._requests[number]:
                del self._requests[number]
                if number in self._unnamed:
                    # The loop keeps no reference to a task.
                    task = asyncio.get_running_loop().create_task(self._remove(number))
                    self._removals.add(task)
                    task.add_done_callback(self._removals.discard)

    async def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load an adapter for requests that name it.

        Args:
            name: for clients.
            path: of the adapter, as of ``LoRARequest``.
            replaces: an adapter of the name may be there, and is replaced.

        Raises:
            HTTPError: the name is taken.
            RequestError: the adapter cannot be used.
            EngineError: the engine has stopped.
        """
        async with self._changing:
            former = self._by_name.get(name)
            is_taken = former is not None and not replaces
            if is_taken or name in self._taken:
                raise _taken(name)
            wanted = LoRARequest(name, next(self._numbers), path)
            await self._model.add_lora(wanted)
            self._by_name[name] = wanted
            if former is not None:
                await self._leave(former)

    async def unload(self, name: str) -> None:
        """Forget an adapter. Requests that name it already go on.

        Raises:
            HTTPError: there is no adapter of the name.
        """
        async with self._changing:
            former = self._by_name.pop(name, None)
            if former is None:
                raise _unknown(name)
            await self._leave(former)

    async def _leave(self, former: LoRARequest) -> None:
        """Remove an adapter that no name leads to any more, now or after its last request."""
        self._unnamed.add(former.lora_int_id)
        if not self._requests[former.lora_int_id]:
            await self._remove(former.lora_int_id)

    async def _remove(self, number: int) -> None:
        self._unnamed.discard(number)
        # If the engine has ended, so have its adapters.
        with suppress(EngineError):
            await self._model.remove_lora(number)


def _taken(name: str) -> HTTPError:
    return HTTPError(
        400,
        f"the name {name[:80]!r} is taken: unload the adapter first, or choose another name",
        field="lora_name",
        code="name_taken",
    )


def _unknown(name: str) -> HTTPError:
    return HTTPError(
        404,
        f"no adapter is called {name[:80]!r}: see /v1/models",
        field="lora_name",
        code="adapter_not_found",
    )
