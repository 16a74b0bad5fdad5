"""The server process: uvicorn, signals and the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from opgraft.base.timeline import Timeline, phase, recorded
from opgraft.config import OpgraftConfig, ServerConfig
from opgraft.engine.workers.started_process import EARLY
from opgraft.errors import EngineError, HTTPError
from opgraft.models.extras import import_extra
from opgraft.serving.server import faults
from opgraft.serving.server.app import create_app
from opgraft.serving.server.connection import Connection
from opgraft.serving.server.early_answers import EarlyAnswers
from opgraft.serving.server.gate import is_local
from opgraft.serving.server.keys import read_keys
from opgraft.serving.server.passing import log
from opgraft.serving.server.service import Service
from opgraft.serving.server.signals import SIGNALS, end_by_signal

if TYPE_CHECKING:
    # Needs the extra otel.
    from opgraft.serving.server.tracing import Tracing

_ABORT_SECONDS = 5
"""Seconds for an aborted request to answer."""

_SWITCH_SECONDS = 5e-4
"""Seconds until the engine's thread hands over the interpreter. A write to a socket may wait."""

_FAILED_SECONDS = 1
"""Seconds in which a server still answers after the engine has stopped."""


class HTTPServer(uvicorn.Server):
    """A server with the usual signals.

    The first SIGTERM or SIGINT drains the server, the second ends the process. During the start,
    the first one does. The server ends by itself after the engine has stopped.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        early: EarlyAnswers,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._early = early
        self._ready = ready
        self._failed: EngineError | None = None
        self._failed_at = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals within the block."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain the server. At the second signal, or during the start, end the process."""
        if self.should_exit or not self.started:
            end_by_signal(sig)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take requests after the model has generated a token."""
        with phase("warm up"):
            await self._service.warm_up()
        # A collection over all imported and loaded objects would hold up every request.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._early.end()
        await super().startup(sockets)
        if self._service.tracing is not None:
            self._service.tracing.end_start()
        self._early.timeline.end()
        self._ready()
        log.info("ready")

    async def on_tick(self, counter: int) -> bool:
        """Return True to end. Uvicorn asks ten times a second."""
        try:
            await self._service.check_health()
        except EngineError as error:
            if self._failed is None:
                self._failed = error
                self._failed_at = time.monotonic()
                # No request can finish any more.
                self.config.timeout_graceful_shutdown = _FAILED_SECONDS
                # A hanging engine answers nobody. A stopped engine has ended its requests.
                if self._service.hangs:
                    self._end_flights(faults.as_http_error(error))
        if self._failed is not None and time.monotonic() > self._failed_at + _FAILED_SECONDS:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests. Let running requests finish, or abort them after their time."""
        seconds = self._service.settings.drain_seconds
        running = len(self._service.flights)
        log.info("shutting down: no new requests, %d that run have %g seconds", running, seconds)
        self._service.draining = True
        timer = asyncio.get_running_loop().call_later(seconds, self._abort)
        await super().shutdown(sockets)
        timer.cancel()
        log.info("ended")

    def _abort(self) -> None:
        message = "the request was aborted, as the server ends: send it to another one"
        self._end_flights(HTTPError(503, message, code="aborted"))

    def _end_flights(self, reason: HTTPError) -> None:
        for flight in list(self._service.flights):
            flight.end(reason)

    def expect_no_failure(self) -> None:
        """Check that the server did not end because of the engine.

        Raises:
            EngineError: the engine has stopped.
        """
        if self._failed is not None:
            raise self._failed


def serve(
    model: str,
    opgraft_config: OpgraftConfig,
    api_keys: Sequence[str],
    early: EarlyAnswers,
    ready: Callable[[Service, str], None],
) -> None:
    """Serve a model until a signal comes.

    Args:
        model: a checkpoint's folder or file, or the name of a packaged model.
        opgraft_config: every setting.
        api_keys: keys of clients, besides the keys in ``server.api_key_file``.
        early: listens already, and answers until the model is ready.
        ready: called with the service and the URL when the server takes requests.

    Raises:
        ConfigError: the file of keys is unusable.
        EngineError: the engine has stopped.
        ModelError: the model cannot be served.
        CheckpointError: the checkpoint cannot be read.
    """
    settings = opgraft_config.server
    keys = list(api_keys)
    if settings.api_key_file is not None:
        keys += read_keys(settings.api_key_file, "server.api_key_file")
    if not keys and not is_local(settings.host):
        log.warning(
            "server.host is %s and there is no key: whoever reaches this machine can use the "
            "model. Give --api-key or server.api_key_file, or put a proxy before it that asks who "
            "comes",
            settings.host,
        )
    with tracing_of(settings) as tracing:
        early.timeline = Timeline("prepare") if tracing is None else tracing.start
        with recorded(early.timeline):
            service = Service(model, opgraft_config, tracing)
            # An executor of a plugin may have started workers of its own.
            EARLY.discard()
            url = f"http://{_host_as_named(settings.host)}:{early.listener.getsockname()[1]}"
            # Uvicorn calls ``http`` like a class, and compares the seconds as numbers.
            config = uvicorn.Config(
                create_app(service, keys),
                http=partial(Connection, settings),  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                lifespan="off",
                timeout_keep_alive=settings.keep_alive_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=int(settings.drain_seconds) + _ABORT_SECONDS,
            )
            server = HTTPServer(config, service, early, lambda: ready(service, url))
            try:
                server.run([early.listener])
            finally:
                if service.hangs:
                    _exit_at_once(server, service)
                service.shutdown()
    server.expect_no_failure()


@contextlib.contextmanager
def tracing_of(settings: ServerConfig) -> Iterator[Tracing | None]:
    """Yield the ``Tracing`` of a server, or None without a receiver of spans.

    Raises:
        InputError: OpenTelemetry is not installed.
        ConfigError: spans cannot be sent to ``server.otlp_endpoint``.
    """
    if settings.otlp_endpoint is None:
        yield None
        return
    module = import_extra("opgraft.serving.server.tracing", "otel")
    tracing: Tracing = module.Tracing(settings.otlp_endpoint)
    try:
        yield tracing
    except BaseException as error:
        # Without effect after the end of the start.
        tracing.end_start(error)
        raise
    finally:
        tracing.shutdown()


def _exit_at_once(server: HTTPServer, service: Service) -> None:
    """End the process and the worker. Nothing can end a hanging thread or wait for one."""
    service.kill()
    try:
        server.expect_no_failure()
    except EngineError as error:
        log.critical("%s", error)
    logging.shutdown()
    os._exit(EngineError.exit_code)


def _host_as_named(host: str) -> str:
    # A URL has an IPv6 address in brackets.
    return f"[{host}]" if ":" in host else host
