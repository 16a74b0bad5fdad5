"""``Connection``: a connection of uvicorn with limits for clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

from opgraft.config import ServerConfig
from opgraft.errors import HTTPError
from opgraft.serving.server.error_bodies import error_body
from opgraft.serving.server.passing import log
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

_HEAD_BYTES = 1 << 16
"""The largest head of a request."""

_HEADERS = 200
"""The most headers of a request."""


class Connection(HttpToolsProtocol):
    """A connection with limits.

    The head of a request, and the rest of a refused body, have limits in bytes, headers and time. A
    client that stops reading is given up.

    Requests are answered one by one. If a second request comes during an answer, the connection
    closes after this answer. Otherwise the server could not see the client leave.

    Args:
        settings: the limits.
        *args, **kwargs: uvicorn's.
    """

    def __init__(self, settings: ServerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        # The size of the present head.
        self._bytes = 0
        self._headers = 0
        self._in_head = False
        self._deaf = False
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the head of a request, unless too many wait already."""
        super().connection_made(transport)
        limit = self._settings.max_connections
        if len(self.connections) > limit:
            message = f"{limit} connections are open, and no more are taken: try again later"
            self._refuse(HTTPError(503, message))
        else:
            self._expect_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and stop waiting."""
        _cancel(self._timer)
        _cancel(self._stalled)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, unless the connection takes no more requests."""
        if self._deaf:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            # The parser hands over a header only when the whole header has come.
            self._bytes += len(data)
            if self._too_large:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin with a request."""
        self._bytes = 0
        self._headers = 0
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        self._count(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count(len(name) + len(value), 1)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Answer the request, unless another answer is running."""
        if self._answering:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        _cancel(self._timer)
        self._in_head = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _UnchunkedAnswer(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the whole request has come."""
        if not self._deaf:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the rest of a refused request, or for another request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect_soon()

    def pause_writing(self) -> None:
        """Wait for the client to read on."""
        super().pause_writing()
        self._expect_reading()

    def _expect_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        seconds = self._settings.read_seconds
        self._stalled = self.loop.call_later(seconds, self._look_at_reader, unread)

    def _look_at_reader(self, unread: int) -> None:
        """Wait on for a client that has read something meanwhile. Give up any other client."""
        if self.transport.get_write_buffer_size() < unread:
            self._expect_reading()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """Go on."""
        _cancel(self._stalled)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP or a large head. During an answer, close the connection instead."""
        if self._answering:
            self.transport.close()
        elif self._too_large:
            limits = f"{_HEAD_BYTES} bytes or {_HEADERS} headers"
            self._refuse(HTTPError(431, f"the head of the request is larger than {limits}"))
        else:
            message = "this is no valid request of HTTP/1.1"
            self._refuse(HTTPError(400, message, code="invalid_http"))

    @property
    def _too_large(self) -> bool:
        return self._bytes > _HEAD_BYTES or self._headers > _HEADERS

    def _count(self, size: int, headers: int) -> None:
        self._bytes += size
        self._headers += headers
        if self._too_large:
            # The parser takes the error for an invalid request.
            raise ValueError("the head is too large")

    def _expect_soon(self) -> None:
        _cancel(self._timer)
        self._timer = self.loop.call_later(self._settings.head_seconds, self._give_up)

    def _give_up(self) -> None:
        if self._in_head and not self._answering:
            seconds = self._settings.head_seconds
            message = f"the head of the request did not come within {seconds:g} seconds"
            self._refuse(HTTPError(408, message))
        elif self.transport.get_write_buffer_size():
            # The client still reads an answer. ``_look_at_reader`` limits that time.
            self._expect_soon()
        else:
            self.transport.abort()

    def _refuse(self, error: HTTPError) -> None:
        """Send an error without the application, and close the connection."""
        body = json.dumps(error_body(error)).encode()
        name = uuid4().hex
        headers = {
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
            "x-request-id": name,
        }
        lines = "".join(f"{header}: {value}\r\n" for header, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + f"{lines}\r\n".encode() + body)
        self.transport.close()
        record = {"request_id": name, "status": error.status, "error": str(error)}
        log.info("%s", json.dumps(record), extra={"fields": record})


class _UnchunkedAnswer:
    """Sends an answer without chunks to a client of HTTP/1.0.

    A body of unknown length ends with the connection.

    Args:
        cycle: the request.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._has_length = b"content-length" in names
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            # Uvicorn compares each part with the rest of the length.
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
