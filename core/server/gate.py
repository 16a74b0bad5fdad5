"""The gate that every request passes: its id, its key, its body, its end, and its line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from opgraft.errors import HTTPError
from opgraft.server import faults
from opgraft.server.admission import Bodies
from opgraft.server.service import Flight, Service, log
from opgraft.server.streams import error_event
from opgraft.text import described
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/", "/health")
"""Answered without a key: the page, which asks for one, and whether the server is ready."""

_POLLED_PATHS = ("/health", "/metrics")
"""Asked every few seconds by who watches the server: where they are answered, that is logged as DEBUG."""


class Gate:
    """Middleware around the whole interface.

    Args:
        app: that answers what passes.
        service: whose limits hold.
        api_keys: of which clients must send one, where there are any.
    """

    def __init__(self, app: ASGIApp, service: Service, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._service = service
        self._bodies = Bodies(service.settings.max_total_body_bytes)
        self._keys = [_digest(key.encode("utf-8", "surrogateescape")) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passing = _Passing(scope, send)
        try:
            self._expect_key(scope)
            with self._bodies.held() as hold:
                body = await self._body(scope, receive, hold)
                await self._pass(passing, body, receive)
        except Exception as error:
            await passing.fail(error)
        finally:
            passing.finish()

    def _expect_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # the bytes as they were sent
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all, so that time tells nothing
        if scheme.lower() != "bearer" or not any(matches):
            raise HTTPError(
                401,
                "no valid API key was sent: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, receive: Receive, hold: Callable[[int], None]) -> bytes:
        settings = self._service.settings
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length[:20]) > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)
        try:
            return await asyncio.wait_for(_read(receive, settings.max_body_bytes, hold), settings.body_seconds)
        except asyncio.TimeoutError:
            raise HTTPError(
                408, f"the body did not come within {settings.body_seconds:g} seconds", headers={"connection": "close"}
            ) from None

    async def _pass(self, passing: _Passing, body: bytes, receive: Receive) -> None:
        """Have a request answered, unless its client leaves or its time is up."""
        flight = Flight(asyncio.current_task())  # type: ignore[arg-type]
        watching = asyncio.create_task(_watch(receive, flight))
        seconds = self._service.settings.request_seconds
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, flight.end, _late(seconds))
        self._service.flights.add(flight)
        try:
            await self._app(passing.scope, _replayed(body, watching), passing.send)
        except asyncio.CancelledError:
            if flight.reason is None:
                raise
            raise flight.reason from None
        finally:
            self._service.flights.discard(flight)
            watching.cancel()
            if timer is not None:
                timer.cancel()


class _Passing:
    """A request on its way through the gate: what is sent, and what the log will say."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = uuid4().hex
        self.record: dict[str, Any] = {"request_id": self.id, "method": scope["method"], "path": scope["path"]}
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # uvicorn leaves the body out
        state = {**scope.get("state", {}), "request_id": self.id, "record": self.record}
        self.scope = {**scope, "method": method, "state": state}
        self._send = send
        self._streams = False
        self._started = time.perf_counter()

    async def send(self, message: Message) -> None:
        """Send a part of the answer, whose head gets the request's id."""
        if message["type"] == "http.response.start":
            self.record["status"] = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            self._streams = any(value.startswith(b"text/event-stream") for _, value in headers)
            message = {**message, "headers": headers}
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer with an error; where the answer has begun as a stream, it is the last event."""
        answer = faults.as_http_error(error)
        if answer.status == 500:
            log.error("request %s failed: %s", self.id, described(error), exc_info=error)
        self.record["error"] = str(answer)
        if "status" not in self.record:
            await faults.response(answer)(self.scope, _nothing, self.send)
        elif self._streams:
            await self._send({"type": "http.response.body", "body": error_event(answer), "more_body": False})

    def finish(self) -> None:
        """Write the line of the request."""
        self.record["seconds"] = round(time.perf_counter() - self._started, 6)
        polled = self.record["path"] in _POLLED_PATHS and self.record.get("status") == 200
        log.log(logging.DEBUG if polled else logging.INFO, "%s", json.dumps(self.record))


def _digest(key: bytes) -> bytes:
    """Return bytes of one length, so that the time of a comparison does not tell that of a key."""
    return hashlib.sha256(key).digest()


async def _read(receive: Receive, limit: int, hold: Callable[[int], None]) -> bytes:
    """Read the body of a request.

    Raises:
        HTTPError: it is larger than the limit, ``hold`` has no room for it, or its client has left.
    """
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _left()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        hold(len(parts[-1]))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, watching: asyncio.Task[None]) -> Receive:
    """Return what gives an application the body that was read, and later tells it that the client has left."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.shield(watching)
        return {"type": "http.disconnect"}

    return receive


async def _watch(receive: Receive, flight: Flight) -> None:
    """Wait until the client leaves, and end its request."""
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.end(_left())


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _left() -> HTTPError:
    """Return the error of a request whose client has left, as logs know it: nobody reads it."""
    return HTTPError(499, "the client has left")


def _late(seconds: float) -> HTTPError:
    return HTTPError(504, f"the request took longer than the {seconds:g} seconds that it had", code="timeout")


def _too_large(limit: int) -> HTTPError:
    return HTTPError(
        413, f"the body is larger than {limit} bytes, which this server takes: send less", code="body_too_large"
    )
