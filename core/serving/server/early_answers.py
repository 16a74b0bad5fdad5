"""``EarlyAnswers``: the address of a server, which answers from the first moment.

Importing torch and loading a model take seconds to minutes. Until then, a thread answers each
request with the status 503, and says what the server is waiting for.
"""

# Imported before torch and FastAPI, whose imports take longer than a second.

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any

from opgraft.base.text import described
from opgraft.base.timeline import Timeline
from opgraft.config import ServerConfig
from opgraft.errors import ConfigError, HTTPError
from opgraft.serving.server.error_bodies import error_body

_PATIENCE = 5.0
"""Seconds for a client to send a request."""

_MOST_READ = 1 << 20
"""Bytes of a body that are read. A client may see no answer while its body is unread."""

_LOOK_SECONDS = 0.01
"""Seconds until the thread notices the end."""


class EarlyAnswers:
    """Listens at the address of a server, and answers until the server is ready.

    Args:
        settings: of the server.

    Attributes:
        listener: the socket, for the server that takes over.
        timeline: the phases of the start, of which the present one is told.

    Raises:
        ConfigError: the server cannot listen at the address.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self.listener = _bound(settings)
        self.timeline = Timeline("import torch")
        self._server = _Server(self)
        # A daemon, so that a failed start ends the process.
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_LOOK_SECONDS,),
            name="opgraft-early-answers",
            daemon=True,
        )
        self._thread.start()

    def __enter__(self) -> EarlyAnswers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self.listener.close()

    def end(self) -> None:
        """Take no more requests. The socket goes on listening, and later requests wait there."""
        self._server.shutdown()
        self._thread.join()

    def error(self) -> HTTPError:
        """Return the answer of the present moment."""
        begin, name = self.timeline.phases[-1]
        seconds = time.monotonic() - begin
        message = f"the server is starting ({name}, for {seconds:.1f} s): try again"
        return HTTPError(503, message, code="starting", headers={"retry-after": "1"})


class _Server(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, early: EarlyAnswers) -> None:
        super().__init__(early.listener.getsockname(), _Handler, bind_and_activate=False)
        self.early = early
        # The class has made a socket of its own.
        self.socket.close()
        self.socket = early.listener
        # A client may leave before it is accepted, and accepting must not wait for the next one.
        self.socket.setblocking(False)
        self.server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that leave. The class would write a traceback.
        pass


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE
    server: _Server

    def answer(self) -> None:
        """Answer any request."""
        length = self.headers.get("content-length", "0")
        if length.isdigit():
            self.rfile.read(min(int(length[:20]), _MOST_READ))
        error = self.server.early.error()
        body = json.dumps(error_body(error, self.path)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers,
        }
        self.send_response_only(error.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # The class calls a method with the name of the request's method.
    do_DELETE = do_GET = do_HEAD = do_OPTIONS = do_PATCH = do_POST = do_PUT = answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # of the class
        """Write nothing: polls would fill the log."""


def _bound(settings: ServerConfig) -> socket.socket:
    """Return a bound socket."""
    host = settings.host
    port = settings.port
    with ExitStack() as opened:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = addresses[0]
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {host}, port {port} ({described(error)}): set "
                "server.host and server.port to an address of this machine and a port that is "
                "free, or the port to 0"
            ) from error
        opened.pop_all()
    return listener
