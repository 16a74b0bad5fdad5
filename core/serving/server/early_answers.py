"""``EarlyAnswers``: the address of a server, which answers from the first moment.

Importing torch and loading a model take seconds to minutes. Until then, a thread answers each
request with the status 503, and says what the server is waiting for.
"""

# Imported before torch and FastAPI, whose imports take longer than a second.

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from http import HTTPStatus
from types import TracebackType

from opgraft.base.text import described
from opgraft.base.timeline import Timeline
from opgraft.config import ServerConfig
from opgraft.errors import ConfigError, HTTPError
from opgraft.serving.server.error_bodies import error_body

_BACKLOG = 2048
"""Connections that may wait to be accepted, as many as uvicorn allows."""

_PART = 1 << 16
"""Bytes of a request that are read at once. A longer line is no request."""


class EarlyAnswers:
    """Listens at the address of a server, and answers until the server is ready.

    Args:
        settings: of the server, with all defaults.

    Attributes:
        listener: the socket, for the server that takes over.
        timeline: the phases of the start, of which the present one is told.

    Raises:
        ConfigError: the server cannot listen at the address.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self.listener = _listening(settings)
        self.timeline = Timeline("import torch")
        self._seconds = settings.head_seconds + settings.body_seconds
        self._clients: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        # A server of asyncio would close the listener, and lose a client that it has just accepted.
        self._loop.add_reader(self.listener, self._accept)
        # A daemon, so that a failed start ends the process.
        self._thread = threading.Thread(target=self._run, name="opgraft-early-answers", daemon=True)
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
        """Take no more clients. The socket goes on listening, and later clients wait there.

        Clients whose requests are still arriving get their answers from the thread.
        """
        if not self._ended.is_set():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()

    def error(self) -> HTTPError:
        """Return the answer of the present moment."""
        begin, name = self.timeline.phases[-1]
        seconds = time.monotonic() - begin
        message = f"the server is starting ({name}, for {seconds:.1f} s): try again"
        return HTTPError(503, message, code="starting", headers={"retry-after": "1"})

    async def _end(self) -> None:
        self._loop.remove_reader(self.listener)
        self._ended.set()

    def _run(self) -> None:
        self._loop.run_until_complete(self._answer_all())
        self._loop.close()

    async def _answer_all(self) -> None:
        """Answer clients until the end, and then those that were accepted before."""
        await self._ended.wait()
        while self._clients:
            await asyncio.wait(self._clients)

    def _accept(self) -> None:
        """Begin with a client, unless the client has left."""
        with suppress(OSError):
            client, _ = self.listener.accept()
            task = self._loop.create_task(self._serve(client))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    async def _serve(self, client: socket.socket) -> None:
        """Answer a client, unless the client leaves or its request takes too long."""
        # A line without an end is a ValueError.
        with suppress(OSError, ValueError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection(sock=client, limit=_PART)
            try:
                await asyncio.wait_for(self._answer(reader, writer), self._seconds)
            finally:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a request of any method on any path."""
        line = await reader.readline()
        if not line:
            return
        writer.write(self._written(line))
        writer.write_eof()
        # If a socket closes with unread data, its client may lose the answer.
        while await reader.read(_PART):
            pass

    def _written(self, line: bytes) -> bytes:
        """Return the answer to the request with this first line."""
        method, path, *_ = [*line.decode("latin-1").split(" "), ""]
        error = self.error()
        body = json.dumps(error_body(error, path))
        headers = {
            "content-type": "application/json",
            "content-length": len(body),
            "connection": "close",
            **error.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n"
        return (head if method == "HEAD" else head + body).encode()


def _listening(settings: ServerConfig) -> socket.socket:
    """Return a socket that listens."""
    host = settings.host
    port = settings.port
    with ExitStack() as opened:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = addresses[0]
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Two servers may bind one port before the first of them listens.
            listener.listen(_BACKLOG)
            # A client may leave before it is accepted, and accepting must not wait for another.
            listener.setblocking(False)
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {host}, port {port} ({described(error)}): set "
                "server.host and server.port to an address of this machine and a port that is "
                "free, or the port to 0"
            ) from error
        opened.pop_all()
    return listener
