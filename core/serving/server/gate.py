"""The gate that every request passes: its id, its key, its body, its end, and its line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address

from opgraft.errors import HTTPError
from opgraft.serving.server.admission import ADMITTED_PATHS, Bodies
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.service import Flight, Service
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/", "/health")
"""Answered without a key: the page, which asks for one, and whether the server is ready."""


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
        passing = Passing(scope, send)
        flight = Flight(asyncio.current_task())  # type: ignore[arg-type]
        self._service.flights.add(flight)
        try:
            self._expect_host(scope)
            self._expect_key(scope)
            with self._bodies.held() as hold:
                body = await self._body(scope, receive, hold, flight)
                # Before any work on the body: who is refused costs little.
                if scope["path"] in ADMITTED_PATHS:
                    self._service.admission.take(passing.slot, 1, 0)
                await self._pass(passing, body, receive, flight)
        except asyncio.CancelledError:
            if flight.reason is None:
                raise
            await passing.fail(flight.reason)
        except Exception as error:
            await passing.fail(error)
        finally:
            self._service.flights.discard(flight)
            self._service.admission.begun(passing.slot)
            passing.finish(self._service.http_metrics)

    def _expect_host(self, scope: Scope) -> None:
        """Refuse what a page of a stranger asks by a name of its own that leads here, which a browser lets it read."""
        settings = self._service.settings
        name = _host_name(Headers(scope=scope).get("host", ""))
        if (
            self._keys
            or not name
            or not is_local(settings.host)
            or is_local(name)
            or name in settings.allowed_hosts
        ):
            return
        raise HTTPError(
            403,
            f"this server is not called {name[:80]!r}: ask for localhost, or list the name in server.allowed_hosts",
            code="host_not_allowed",
        )

    def _expect_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # the bytes as they were sent
        # All, so that time tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise HTTPError(
                401,
                "no valid API key was sent: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(
        self, scope: Scope, receive: Receive, hold: Callable[[int], None], flight: Flight
    ) -> bytes:
        settings = self._service.settings
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdigit() and int(length[:20]) > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)
        with _ended(flight, settings.body_seconds, _slow(settings.body_seconds)):
            return await _read_body(receive, settings.max_body_bytes, hold)

    async def _pass(self, passing: Passing, body: bytes, receive: Receive, flight: Flight) -> None:
        """Have a request answered, unless its client leaves or its time is up."""
        watching = asyncio.create_task(_watch(receive, flight))
        seconds = self._service.settings.request_seconds
        try:
            with nullcontext() if seconds is None else _ended(flight, seconds, _late(seconds)):
                await self._app(passing.scope, _replayed(body, watching), passing.send)
        finally:
            watching.cancel()


@contextmanager
def _ended(flight: Flight, seconds: float, reason: HTTPError) -> Iterator[None]:
    """End a request, unless the block ends within its time."""
    timer = asyncio.get_running_loop().call_later(seconds, flight.end, reason)
    try:
        yield
    finally:
        timer.cancel()


def _host_name(host: str) -> str:
    """Return the name in the header ``Host``, without its port."""
    return host.partition("]")[0][1:] if host.startswith("[") else host.rpartition(":")[0] or host


def is_local(name: str) -> bool:
    """Tell whether an address or a name is of this machine or network: names without a dot are no stranger's."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return "." not in name or name.endswith(".localhost")


def _digest(key: bytes) -> bytes:
    """Return bytes of one length, so that the time of a comparison does not tell that of a key."""
    return hashlib.sha256(key).digest()


async def _read_body(receive: Receive, limit: int, hold: Callable[[int], None]) -> bytes:
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


def _left() -> HTTPError:
    """Return the error of a request whose client has left, as logs know it: nobody reads it."""
    return HTTPError(499, "the client has left")


def _slow(seconds: float) -> HTTPError:
    return HTTPError(
        408, f"the body did not come within {seconds:g} seconds", headers={"connection": "close"}
    )


def _late(seconds: float) -> HTTPError:
    return HTTPError(
        504, f"the request took longer than the {seconds:g} seconds that it had", code="timeout"
    )


def _too_large(limit: int) -> HTTPError:
    return HTTPError(
        413,
        f"the body is larger than {limit} bytes, which this server takes: send less",
        code="body_too_large",
    )
