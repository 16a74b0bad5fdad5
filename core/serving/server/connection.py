"""``Connection``: uvicorn's connection with limits for clients that send too much, too slowly or what is no HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

from opgraft.config import ServerConfig
from opgraft.errors import HTTPError
from opgraft.serving.server import faults
from opgraft.serving.server.passing import log
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

_HEAD_BYTES = 1 << 16
_HEADERS = 200


class Connection(HttpToolsProtocol):
    """A connection.

    The head of a request has limits in bytes, headers and time, as the rest of a body has that was refused. A client
    that reads no more is given up. Requests are answered one by one: with one that comes while another is answered, the
    connection closes after that answer, as otherwise nobody would see that its client leaves.

    Args:
        settings: the limits.
        *args, **kwargs: uvicorn's.
    """

    def __init__(self, settings: ServerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._bytes, self._headers = 0, 0  # of the head that comes
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
            self._refuse(
                HTTPError(
                    503, f"{limit} connections are open, and no more are taken: try again later"
                )
            )
        else:
            self._expect_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and stop waiting."""
        _cancel(self._timer)
        _cancel(self._stalled)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come, unless the connection takes no more requests."""
        if self._deaf:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            # The parser keeps a header to itself until it has come to its end.
            self._bytes += len(data)
            if self._too_large:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin with a request."""
        self._bytes, self._headers, self._in_head = 0, 0, True
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
        """Have the request answered, if no other is."""
        if self._answering:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        _cancel(self._timer)
        self._in_head = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Take note that the request has come as a whole."""
        if not self._deaf:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the rest of the request, if its body was refused, or for another."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect_soon()

    def pause_writing(self) -> None:
        """Wait for the client to read on."""
        super().pause_writing()
        self._expect_reading()

    def _expect_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(
            self._settings.read_seconds, self._look_at_reader, unread
        )

    def _look_at_reader(self, unread: int) -> None:
        """Go on waiting for a client that has read since, and give up one that has not."""
        if self.transport.get_write_buffer_size() < unread:
            self._expect_reading()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """Go on."""
        _cancel(self._stalled)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too much of it; where an answer goes on, the connection is closed instead."""
        if self._answering:
            self.transport.close()
        elif self._too_large:
            self._refuse(
                HTTPError(
                    431,
                    f"the head of the request is larger than {_HEAD_BYTES} bytes or {_HEADERS} headers",
                )
            )
        else:
            self._refuse(
                HTTPError(400, "this is no valid request of HTTP/1.1", code="invalid_http")
            )

    @property
    def _too_large(self) -> bool:
        return self._bytes > _HEAD_BYTES or self._headers > _HEADERS

    def _count(self, size: int, headers: int) -> None:
        self._bytes += size
        self._headers += headers
        if self._too_large:
            raise ValueError("the head is too large")  # the parser makes an invalid request of it

    def _expect_soon(self) -> None:
        _cancel(self._timer)
        self._timer = self.loop.call_later(self._settings.head_seconds, self._give_up)

    def _give_up(self) -> None:
        if self._in_head and not self._answering:
            seconds = self._settings.head_seconds
            self._refuse(
                HTTPError(408, f"the head of the request did not come within {seconds:g} seconds")
            )
        elif (
            self.transport.get_write_buffer_size()
        ):  # of an answer that is still read, which has a limit of its own
            self._expect_soon()
        else:
            self.transport.abort()

    def _refuse(self, error: HTTPError) -> None:
        """Answer what never came as far as the application, and close."""
        body = json.dumps(faults.content(error)).encode()
        name = uuid4().hex
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        self.transport.write(
            STATUS_LINE[error.status] + f"{head}x-request-id: {name}\r\n\r\n".encode() + body
        )
        self.transport.close()
        record = {"request_id": name, "status": error.status, "error": str(error)}
        log.info("%s", json.dumps(record), extra={"fields": record})


class _Unchunked:
    """Sends an answer to a client of HTTP/1.0, which knows no chunks.

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
