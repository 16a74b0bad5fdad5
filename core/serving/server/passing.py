"""A request on its way through the server, and its line in the log."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any
from uuid import uuid4

from opgraft.base.log import init_logger
from opgraft.base.text import described
from opgraft.base.timeline import NETWORK, phase
from opgraft.engine.lora.held import ADAPTER_UNUSABLE
from opgraft.errors import HTTPError, OpgraftError
from opgraft.serving.server import faults
from opgraft.serving.server.admission import Slot
from opgraft.serving.server.error_bodies import MESSAGES_PATH, error_body
from opgraft.serving.server.http_metrics import HTTPMetrics
from opgraft.serving.server.streams import event
from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

log = init_logger("opgraft.serving.server")
"""One line for each request: INFO, or ERROR if the server failed."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:/=+-]{1,128}")
"""The form of a client's own request id for the log."""

_POLLED_PATHS = ("/health", "/load", "/metrics", "/ping")
"""Monitors ask for these every few seconds. A good answer is logged as DEBUG."""


class Passing:
    """A request on its way through the gate, with the answer and the line in the log.

    Attributes:
        id: of the request, for clients and for the log.
        record: the fields of the line in the log.
        scope: of ASGI, with this object as ``passing`` in the state.
        slot: the share of the request in the waiting work.
        owner: the digest of the client's key; empty on a server without keys.
        started: the time of arrival, by ``time.monotonic``.
        names: parts of names in chats → parts in the client's interface, for errors.
        error_event: returns an error as the last event of a stream, if the interface has a form of
            its own.
        error_status: of the error that the request ended with, also after the begin of a stream.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = uuid4().hex
        self.record: dict[str, Any] = {
            "request_id": self.id,
            "method": scope["method"],
            "path": scope["path"],
        }
        if scope.get("client"):
            self.record["client"] = scope["client"][0]
        given = Headers(scope=scope).get("x-request-id", "")
        if _REQUEST_ID.fullmatch(given):
            self.record["client_request_id"] = given
        # Uvicorn leaves the body of an answer to HEAD out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        state = {**scope.get("state", {}), "passing": self}
        self.scope = {**scope, "method": method, "state": state}
        self.slot = Slot()
        self.owner = b""
        self.started = time.monotonic()
        self.names: Mapping[str, str] = {}
        self.error_event: Callable[[HTTPError], bytes] | None = None
        self.error_status: int | None = None
        self._send = send
        self._streams = False
        self._failure: BaseException | None = None

    async def send(self, message: Message) -> None:
        """Send a part of the answer. The head gets the id of the request."""
        if message["type"] == "http.response.start":
            self.record["status"] = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            # Anthropic's clients read this name.
            if self.record["path"].startswith(MESSAGES_PATH):
                headers.append((b"request-id", self.id.encode()))
            self._streams = any(value.startswith(b"text/event-stream") for _, value in headers)
            message = {**message, "headers": headers}
        with phase(NETWORK):
            await self._send(message)

    def note(self, error: Exception) -> HTTPError:
        """Note an error for the log, and return the error for the client."""
        answer = faults.renamed(faults.as_http_error(error), self.names)
        self.record["error"] = str(answer)
        self.error_status = answer.status
        # A fault of the server: the log needs the cause.
        if answer.status == 500 or answer.code == ADAPTER_UNUSABLE:
            self._failure = error.__cause__ or error
            self.record["cause"] = described(self._failure)
        return answer

    async def fail(self, error: Exception) -> None:
        """Answer with an error. After the begin of a stream, the error is the last event."""
        answer = self.note(error)
        if "status" not in self.record:
            response = faults.response(answer, self.record["path"])
            await response(self.scope, _nothing, self.send)
        elif self._streams:
            body = self._as_event(answer)
            with phase(NETWORK):
                await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _as_event(self, error: HTTPError) -> bytes:
        if self.error_event is not None:
            return self.error_event(error)
        path = self.record["path"]
        name = "error" if path.startswith(MESSAGES_PATH) else ""
        return event(error_body(error, path), name)

    def finish(self, metrics: HTTPMetrics, admitted: Collection[str]) -> None:
        """Write the line of the request, and count the answer.

        Args:
            metrics: count the answer.
            admitted: paths that are counted by name, even if the request reached no route.
        """
        # 499: the client has left before an answer.
        status = self.record.setdefault("status", 499)
        path = self.record["path"]
        # Strangers may ask for any path, and each new one would be a new series.
        counted = path if path in admitted else getattr(self.scope.get("route"), "path", "other")
        metrics.count(self.record["method"], counted, status)
        seconds = time.monotonic() - self.started
        self.record["seconds"] = round(seconds, 6)
        unexpected = self._failure
        # The message of such an error says enough, without a traceback.
        if isinstance(unexpected, OpgraftError):
            unexpected = None
        level = logging.INFO
        if self._failure is not None:
            level = logging.ERROR
        elif path in _POLLED_PATHS and status == 200:
            level = logging.DEBUG
        line = json.dumps(self.record)
        log.log(level, "%s", line, extra={"fields": self.record}, exc_info=unexpected)
        # This object and the scope would hold each other.
        del self.scope["state"]["passing"]


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
