"""Read the bodies of requests as JSON, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from opgraft.errors import HTTPError
from opgraft.serving.server.passing import log
from opgraft.serving.server.protocol import unknown_fields

MOST_CONTAINERS = 1 << 15
"""Most lists and objects of a body. In Python they take 100 times the memory of the text."""

IGNORED = "x-ignored-fields"
"""The header with the names of unknown fields of a request."""

_MOST_CHARACTERS = 1 << 10
"""Most characters of the header ``IGNORED``."""

_LARGE_BYTES = 1 << 16
"""Bytes of a body that would hold up the event loop."""

# One thread, because a parser keeps the interpreter, and two would be no faster.
_PARSING = ThreadPoolExecutor(1, "opgraft-json")


class BodyRoute(APIRoute):
    """A route with a bounded body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def handle_within_bounds(request: Request) -> Response:
            bounded = _BoundedRequest(request.scope, request.receive)
            await bounded.expect_fewcontainers()
            refused = request.app.state.service.settings.unknown_fields == "refuse"
            with unknown_fields(refused) as unknown:
                response = await handle(bounded)
            if unknown.names:
                ignored = _names_in_header(unknown.names)
                log.debug("request %s: ignored %s", request.state.passing.id, ignored)
                response.headers[IGNORED] = ignored
            return response

        return handle_within_bounds


def _names_in_header(names: Iterable[str]) -> str:
    """Return names in the form of one header; ``...`` stands for further names."""
    room = _MOST_CHARACTERS
    told: list[str] = []
    for name in map(_ascii, names):
        room -= len(name) + len(", ")
        if room < 0:
            return ", ".join([*told, "..."])
        told.append(name)
    return ", ".join(told)


def _ascii(name: str) -> str:
    """Return a name in characters that a header may have."""
    return re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name)


class _BoundedRequest(Request):
    """A request. A thread works on a large body, so that the event loop goes on."""

    async def expect_fewcontainers(self) -> None:
        """Check that the body has few lists and objects.

        Raises:
            HTTPError: there are too many.
        """
        found = await self._beside(containers, await self.body())
        if found > MOST_CONTAINERS:
            limit = f"this server takes {MOST_CONTAINERS}"
            message = f"the body has {found} lists and objects, and {limit}: send less at a time"
            raise HTTPError(400, message, code="limit_exceeded")

    async def json(self) -> Any:
        """Return the body as plain data."""
        return await self._beside(json.loads, await self.body())

    async def _beside(self, work: Callable[[bytes], Any], body: bytes) -> Any:
        if len(body) < _LARGE_BYTES:
            return work(body)
        return await asyncio.get_running_loop().run_in_executor(_PARSING, work, body)


def containers(body: bytes) -> int:
    """Return the number of lists and objects of JSON, or a larger number below the limit."""
    found = body.count(b"[") + body.count(b"{")
    if found <= MOST_CONTAINERS:
        return found
    # Brackets within texts do not count. Every second part between quotes is a text.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")
