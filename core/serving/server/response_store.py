"""``ResponseStore``: kept responses, for ``previous_response_id``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from opgraft.errors import HTTPError


class KeptResponse(NamedTuple):
    """A response, and the chat up to its end.

    Attributes:
        response: as the client has got it.
        messages: in the form of chats, without instructions.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """The latest responses, in memory. Any thread may use the object.

    Args:
        limit: bytes of all responses and chats together. The oldest ones go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # As text: Python's objects may take 100 times its memory.
        self._kept: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = Lock()

    def keep(self, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
        """Keep a response, unless it is larger than the limit."""
        # "replace", because an answer may have half of a surrogate pair.
        text = json.dumps([response, messages], ensure_ascii=False).encode("utf-8", "replace")
        if len(text) > self._limit:
            return
        with self._lock:
            self._kept[response["id"]] = text
            self._bytes += len(text)
            while self._bytes > self._limit:
                oldest = next(iter(self._kept))
                self._bytes -= len(self._kept.pop(oldest))

    def find(self, name: str) -> KeptResponse | None:
        """Return a response by its id, or None."""
        text = self._kept.get(name)
        return None if text is None else KeptResponse(*json.loads(text))

    def expect(self, name: str) -> KeptResponse:
        """Return a response by its id.

        Raises:
            HTTPError: the response is not kept.
        """
        found = self.find(name)
        if found is not None:
            return found
        message = (
            f"the response {name[:80]!r} is not kept here: ask for it sooner, with store: true"
        )
        raise HTTPError(404, message, field="response_id", code="response_not_found")

    def drop(self, name: str) -> None:
        """Forget a response, if it is kept."""
        with self._lock:
            self._bytes -= len(self._kept.pop(name, b""))
