"""The gate for every request: host, key, body, time limit, end, and the line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address

from opgraft.base.timeline import current_timeline, recorded
from opgraft.errors import HTTPError
from opgraft.serving.server.admission import Bodies
from opgraft.serving.server.passing import Passing
from opgraft.serving.server.service import Flight, Service
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/", "/health", "/ping")
"""Paths without a key: the page, because it asks for the key, and the health."""


class Gate:
    """Middleware around the whole interface.

    Args:
        app: answers admitted requests.
        service: has the limits.
        admitted: paths with work for the model. Such requests may have to wait.
        api_keys: a client must send one of these. Without keys, every client may ask.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        admitted: Collection[str],
        api_keys: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._service = service
        self._admitted = admitted
        self._bodies = Bodies(service.settings.max_total_body_bytes)
        self._keys = [_digest(key.encode("utf-8", "surrogateescape")) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passing = Passing(scope, send)
        tracing = self._service.tracing
        timeline = None
        flight = Flight(asyncio.current_task())  # type: ignore[arg-type]
        self._service.flights.add(flight)
        try:
            self._expect_host(scope)
            passing.owner = self._owner(scope)
            # Strangers get no spans. Other paths do no work for the model, and monitors ask for
            # some of them all the time.
            if tracing is not None and scope["path"] in self._admitted:
                timeline = tracing.begin_request(scope)
            with recorded(timeline):
                await self._answer(passing, scope, receive, flight)
        except asyncio.CancelledError:
            if flight.reason is None:
                raise
            await passing.fail(flight.reason)
        except Exception as error:
            await passing.fail(error)
        finally:
            self._service.flights.discard(flight)
            self._service.admission.begun(passing.slot)
            passing.finish(self._service.http_metrics, self._admitted)
            if tracing is not None and timeline is not None:
                tracing.end_request(timeline, passing.record, passing.error_status)

    async def _answer(
        self, passing: Passing, scope: Scope, receive: Receive, flight: Flight
    ) -> None:
        """Answer a request of a known client by the application.

        Raises:
            HTTPError: the request is not admitted.
        """
        with self._bodies.held() as hold:
            body = await self._body(scope, receive, hold, flight)
            # Before any work on the body, so that a refusal is cheap.
            if scope["path"] in self._admitted:
                self._service.admission.take(passing.slot, 1, 0)
            timeline = current_timeline()
            if timeline is not None:
                timeline.add("http")
            await self._pass(passing, body, receive, flight)

    def _expect_host(self, scope: Scope) -> None:
        """Refuse a request under a foreign name.

        A foreign page can give its own name the address of this machine. A browser would let the
        page read the answers then. Keys, and servers for a network, need no such check.
        """
        settings = self._service.settings
        if self._keys or not is_local(settings.host):
            return
        name = _host_name(Headers(scope=scope).get("host", ""))
        if not name or is_local(name) or name in settings.allowed_hosts:
            return
        step = "ask for localhost, or list the name in server.allowed_hosts"
        message = f"this server is not called {name[:80]!r}: {step}"
        raise HTTPError(403, message, code="host_not_allowed")

    def _owner(self, scope: Scope) -> bytes:
        """Return the digest of the key of a request; empty if the path or server needs no key.

        Raises:
            HTTPError: no valid key was sent.
        """
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return b""
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Clients of Anthropic's interface send the second header.
        sent = [key if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        # latin-1 gives the sent bytes.
        digests = [_digest(each.strip().encode("latin-1")) for each in sent]
        # All keys, so that the time tells nothing.
        pairs = [(given, known) for given in digests for known in self._keys]
        matches = [known for given, known in pairs if hmac.compare_digest(given, known)]
        if not matches:
            message = "no valid API key was sent: send the header 'Authorization: Bearer KEY'"
            challenge = {"www-authenticate": "Bearer"}
            raise HTTPError(401, message, code="invalid_api_key", headers=challenge)
        return matches[0]

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
        """Answer a request, unless the client leaves or the time is up."""
        watching = asyncio.create_task(_watch(receive, flight))
        seconds = self._service.settings.request_seconds
        limit = nullcontext() if seconds is None else _ended(flight, seconds, _late(seconds))
        try:
            with limit:
                await self._app(passing.scope, _replayed(body, watching), passing.send)
        finally:
            watching.cancel()


@contextmanager
def _ended(flight: Flight, seconds: float, reason: HTTPError) -> Iterator[None]:
    """End a request, unless the block ends in time."""
    timer = asyncio.get_running_loop().call_later(seconds, flight.end, reason)
    try:
        yield
    finally:
        timer.cancel()


def _host_name(host: str) -> str:
    """Return the name in the header ``Host``, without the port."""
    # An IPv6 address, such as [::1]:8000.
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.rpartition(":")[0] or host


def is_local(name: str) -> bool:
    """Return True for an address or a name of this machine or network."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        # A stranger cannot own a name without a dot.
        return "." not in name or name.endswith(".localhost")


def _digest(key: bytes) -> bytes:
    """Return bytes of one length, so that the time of a comparison hides the length of a key."""
    return hashlib.sha256(key).digest()


async def _read_body(receive: Receive, limit: int, hold: Callable[[int], None]) -> bytes:
    """Read the body of a request.

    Raises:
        HTTPError: the body is too large, ``hold`` has no room, or the client has left.
    """
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _left()
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        hold(len(part))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, watching: asyncio.Task[None]) -> Receive:
    """Return a function that gives the application the read body, then the end of the client."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.shield(watching)
        return {"type": "http.disconnect"}

    return receive


async def _watch(receive: Receive, flight: Flight) -> None:
    """End the request when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.end(_left())


def _left() -> HTTPError:
    """Return the error for the log after the client has left. Nobody else reads it."""
    return HTTPError(499, "the client has left")


def _slow(seconds: float) -> HTTPError:
    message = f"the body did not come within {seconds:g} seconds"
    return HTTPError(408, message, headers={"connection": "close"})


def _late(seconds: float) -> HTTPError:
    message = f"the request took longer than the {seconds:g} seconds that it had"
    return HTTPError(504, message, code="timeout")


def _too_large(limit: int) -> HTTPError:
    message = f"the body is larger than {limit} bytes, which this server takes: send less"
    return HTTPError(413, message, code="body_too_large")
