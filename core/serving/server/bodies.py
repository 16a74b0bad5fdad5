"""Bodies of requests as JSON, read within bounds of time and memory."""

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
"""Lists and objects of a body, at most. Python takes 100 times the memory of such text, and time to collect it."""

IGNORED = "x-ignored-fields"
"""The header with the names of unknown fields of a request."""

_MOST_CHARACTERS = 1 << 10
"""Characters of that header, at most."""
_LARGE_BYTES = 1 << 16
# One alone, as none of them lets go of the interpreter while it parses.
_PARSING = ThreadPoolExecutor(1, "opgraft-json")


class BodyRoute(APIRoute):
    """A route that reads its body within bounds."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def handle_within_bounds(request: Request) -> Response:
            bounded = _BoundedRequest(request.scope, request.receive)
            await bounded.expect_few_containers()
            refused = request.app.state.service.settings.unknown_fields == "refuse"
            with unknown_fields(refused) as unknown:
                response = await handle(bounded)
            if unknown.names:
                ignored = _named(unknown.names)
                log.debug("request %s: ignored %s", request.state.passing.id, ignored)
                response.headers[IGNORED] = ignored
            return response

        return handle_within_bounds


def _named(names: Iterable[str]) -> str:
    """Return names as one header can have them; ``...`` stands for further names."""
    room, told = _MOST_CHARACTERS, list[str]()
    for name in map(_ascii, names):
        room -= len(name) + len(", ")
        if room < 0:
            return ", ".join([*told, "..."])
        told.append(name)
    return ", ".join(told)


def _ascii(name: str) -> str:
    """Return a name as a header can have it."""
    return re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name)


class _BoundedRequest(Request):
    """A request whose body, where it is large, is worked on beside the event loop."""

    async def expect_few_containers(self) -> None:
        """Refuse a body of too many lists and objects.

        Raises:
            HTTPError: with the limit.
        """
        found = await self._beside(_containers, await self.body())
        if found > MOST_CONTAINERS:
            raise HTTPError(
                400,
                f"the body has {found} lists and objects, and this server takes {MOST_CONTAINERS}: send less at a time",
                code="limit_exceeded",
            )

    async def json(self) -> Any:
        """Return what the body says."""
        return await self._beside(json.loads, await self.body())

    async def _beside(self, work: Callable[[bytes], Any], body: bytes) -> Any:
        if len(body) < _LARGE_BYTES:
            return work(body)
        return await asyncio.get_running_loop().run_in_executor(_PARSING, work, body)


def _containers(body: bytes) -> int:
    """Count the lists and objects of JSON, as far as there may be too many: brackets of texts are none."""
    found = body.count(b"[") + body.count(b"{")
    if found <= MOST_CONTAINERS:
        return found
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")
