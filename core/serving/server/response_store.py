"""``ResponseStore``: kept responses, for ``previous_response_id``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from opgraft.errors import HTTPError
from opgraft.serving.server.bodies import MOST_CONTAINERS, containers

_T = TypeVar("_T")


class _StoredResponse(NamedTuple):
    """A response and the chat up to its end, as JSON: Python's objects take 100 times the memory.

    Attributes:
        owner: the digest of the key whose clients may ask for it.
        response: as the client has got it.
        messages: in the form of chats, without instructions.
    """

    owner: bytes
    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """The latest responses, in memory. A thread of the object reads and writes them in turn.

    Args:
        limit: bytes of all responses and chats together. The client with the most bytes loses its
            oldest ones first.
        longest: bytes of the longest chat that goes on.
    """

    def __init__(self, limit: int, longest: int) -> None:
        self._limit = limit
        self._longest = longest
        self._kept: dict[str, _StoredResponse] = {}
        self._bytes: dict[bytes, int] = {}
        self._thread = ThreadPoolExecutor(1, "opgraft-responses")

    def keep(
        self, owner: bytes, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
    ) -> Future[None]:
        """Keep a response, unless it is larger than the limit. Nobody need wait for the end."""
        return self._thread.submit(self._keep, owner, response, messages)

    def _keep(self, owner: bytes, response: Any, messages: Any) -> None:
        kept = _StoredResponse(owner, _written(response), _written(messages))
        if kept.size > self._limit:
            return
        self._kept[response["id"]] = kept
        self._count(owner, kept.size)
        while sum(self._bytes.values()) > self._limit:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(name for name, each in self._kept.items() if each.owner == largest)
            self._count(largest, -self._kept.pop(oldest).size)

    def _count(self, owner: bytes, more: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + more
        if not self._bytes[owner]:
            del self._bytes[owner]

    async def messages(self, owner: bytes, name: str) -> list[dict[str, Any]]:
        """Return the chat up to the end of a response.

        Raises:
            HTTPError: the response is not kept for the owner, or the chat is too long to go on.
        """
        return await self._beside(self._messages, owner, name)

    def _messages(self, owner: bytes, name: str) -> list[dict[str, Any]]:
        field = "previous_response_id"
        advice = "send its input and output as items of input"
        kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            message = (
                f"{field} is {name[:80]!r}, and this server does not keep such a response: {advice}"
            )
            raise HTTPError(400, message, field=field, code="previous_response_not_found")
        if len(kept.messages) > self._longest or containers(kept.messages) > MOST_CONTAINERS:
            message = (
                f"the conversation up to {name[:80]!r} is larger than a body may be: {advice}, "
                "without the oldest ones"
            )
            raise HTTPError(400, message, field=field, code="limit_exceeded")
        messages: list[dict[str, Any]] = json.loads(kept.messages)
        return messages

    async def response(self, owner: bytes, name: str) -> bytes:
        """Return a response by its id, as JSON.

        Raises:
            HTTPError: the response is not kept for the owner.
        """
        return (await self._beside(self._expect, owner, name)).response

    async def drop(self, owner: bytes, name: str) -> None:
        """Forget a response.

        Raises:
            HTTPError: the response is not kept for the owner.
        """
        await self._beside(self._drop, owner, name)

    def _drop(self, owner: bytes, name: str) -> None:
        self._count(owner, -self._expect(owner, name).size)
        del self._kept[name]

    def _expect(self, owner: bytes, name: str) -> _StoredResponse:
        kept = self._kept.get(name)
        if kept is not None and kept.owner == owner:
            return kept
        message = (
            f"the response {name[:80]!r} is not kept here: the server keeps the latest ones that "
            "were asked for without store: false"
        )
        raise HTTPError(404, message, field="response_id", code="response_not_found")

    async def _beside(self, work: Callable[[bytes, str], _T], owner: bytes, name: str) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, owner, name)


def _written(value: Any) -> bytes:
    # "replace", because a client's text may have half of a surrogate pair.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
