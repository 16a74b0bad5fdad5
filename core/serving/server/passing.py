"""A request on its way through the server, and its line in the log."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any
from uuid import uuid4

from opgraft.base.text import described
from opgraft.errors import HTTPError, OpgraftError
from opgraft.logger import init_logger
from opgraft.serving.server import faults
from opgraft.serving.server.admission import Slot
from opgraft.serving.server.http_metrics import HTTPMetrics
from opgraft.serving.server.streams import event
from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

log = init_logger("opgraft.serving.server")
"""One line for each request, of the level INFO, or ERROR where the server failed."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:/=+-]{1,128}")
"""A client's or a proxy's own name of a request that is taken into the log."""

_POLLED_PATHS = ("/health", "/metrics")
"""Asked every few seconds by who watches the server: where they are answered, that is logged as DEBUG."""


class Passing:
    """A request on its way through the gate: what is sent, and what the log will say.

    Attributes:
        id: of the request, for clients and for the log.
        record: the fields of its line in the log.
        scope: with this object as ``passing`` in its state.
        slot: what the request adds to those that wait.
        started: when it came, by ``time.monotonic``.
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
        # Uvicorn leaves the body out.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        self.scope = {
            **scope,
            "method": method,
            "state": {**scope.get("state", {}), "passing": self},
        }
        self.slot = Slot()
        self.started = time.monotonic()
        self._send = send
        self._streams = False
        self._failure: BaseException | None = None

    async def send(self, message: Message) -> None:
        """Send a part of the answer, whose head gets the request's id."""
        if message["type"] == "http.response.start":
            self.record["status"] = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            self._streams = any(value.startswith(b"text/event-stream") for _, value in headers)
            message = {**message, "headers": headers}
        await self._send(message)

    def note(self, error: Exception) -> HTTPError:
        """Take an error down for the log, with a cause of the server's own; return what the client gets."""
        answer = faults.as_http_error(error)
        self.record["error"] = str(answer)
        if answer.status == 500:
            self._failure = error.__cause__ or error
            self.record["cause"] = described(self._failure)
        return answer

    async def fail(self, error: Exception) -> None:
        """Answer with an error; where the answer has begun as a stream, it is the last event."""
        answer = self.note(error)
        if "status" not in self.record:
            await faults.response(answer)(self.scope, _nothing, self.send)
        elif self._streams:
            await self._send(
                {
                    "type": "http.response.body",
                    "body": event(faults.content(answer)),
                    "more_body": False,
                }
            )

    def finish(self, metrics: HTTPMetrics) -> None:
        """Write the line of the request, and count its answer; 499 is that of a client who left before one."""
        status = self.record.setdefault("status", 499)
        method, path = self.record["method"], self.record["path"]
        metrics.count(method, path, self.scope.get("route"), status)
        seconds = time.monotonic() - self.started
        self.record["seconds"] = round(seconds, 6)
        unexpected = self._failure
        if isinstance(unexpected, OpgraftError):
            unexpected = None
        level = logging.INFO
        if self._failure is not None:
            level = logging.ERROR
        elif path in _POLLED_PATHS and status == 200:
            level = logging.DEBUG
        line = json.dumps(self.record)
        log.log(level, "%s", line, extra={"fields": self.record}, exc_info=unexpected)
        del self.scope["state"]["passing"]  # which would be a cycle


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
