"""``SpanSender``: a thread that sends encoded spans to a receiver of OTLP over HTTP."""

from __future__ import annotations

import gzip
import ssl
import threading
import time
import zlib
from collections.abc import Callable
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, Request, build_opener

from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.base.version import __version__
from opgraft.config.environment import OtlpExport
from opgraft.errors import ConfigError

_MOST_UNSENT = 1 << 24
"""Bytes of spans that wait for the receiver, at most."""

_MOST_AT_ONCE = 1 << 21
"""Bytes after which waiting spans are sent at once. Receivers take 4 MB or more."""

_RETRIED = (429, 502, 503, 504)
"""Statuses after which the protocol asks clients to try again."""

_FIRST_PAUSE = 1.0
"""Seconds before the first further try. Each pause is twice as long as the one before."""

_COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}


class SpanSender:
    """Sends spans in the background, those of some seconds together.

    Messages of the protocol that stand behind each other are one message: so are the spans of
    several traces. What a receiver does not take in time is dropped, which is logged once.

    Args:
        url: of the receiver.
        export: OpenTelemetry's variables for an exporter.
        on_cost: takes the seconds of a processor for each batch.

    Raises:
        ConfigError: a certificate cannot be read.
    """

    def __init__(self, url: str, export: OtlpExport, on_cost: Callable[[float], None]) -> None:
        self._url = url
        self._export = export
        self._on_cost = on_cost
        self._opener = build_opener(HTTPSHandler(context=_context(export)))
        self._ready = threading.Condition()
        self._waiting: list[bytes] = []
        self._size = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opgraft-otlp", daemon=True)
        self._thread.start()

    def add(self, message: bytes) -> None:
        """Send a message later. It is dropped if too much waits."""
        with self._ready:
            if self._size + len(message) > _MOST_UNSENT:
                _warn("the receiver takes spans too slowly")
                return
            self._waiting.append(message)
            self._size += len(message)
            if self._size >= _MOST_AT_ONCE:
                self._ready.notify()

    def shutdown(self, seconds: float) -> None:
        """Send what waits, and end the thread, unless the receiver takes longer."""
        self._closing.set()
        with self._ready:
            self._ready.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._ready:
                self._ready.wait_for(self._is_due, self._export.delay)
            self._send()
        self._send()

    def _is_due(self) -> bool:
        return self._closing.is_set() or self._size >= _MOST_AT_ONCE

    def _send(self) -> None:
        """Send all that waits, and count the time."""
        with self._ready:
            messages = self._waiting
            self._waiting = []
            self._size = 0
        if not messages:
            return
        begin = time.thread_time()
        try:
            self._send_or_drop(b"".join(messages))
        # The thread goes on after whatever foreign code raises.
        except Exception as error:
            _warn(described(error))
        finally:
            self._on_cost(time.thread_time() - begin)

    def _send_or_drop(self, body: bytes) -> None:
        compression = self._export.compression
        headers = {
            "content-type": "application/x-protobuf",
            "user-agent": f"opgraft/{__version__}",
            **dict(self._export.headers),
        }
        if compression in _COMPRESSIONS:
            body = _COMPRESSIONS[compression](body)
            headers["content-encoding"] = compression
        until = time.monotonic() + self._export.timeout
        pause = _FIRST_PAUSE
        while True:
            # Settings allow URLs of HTTP alone.
            request = Request(self._url, body, headers)  # noqa: S310
            reason, may_retry = self._post(request, until)
            if not reason:
                return
            is_late = time.monotonic() + pause >= until
            if not may_retry or is_late or self._closing.wait(pause):
                _warn(reason)
                return
            pause *= 2

    def _post(self, request: Request, until: float) -> tuple[str, bool]:
        """Return why the receiver did not take the spans, empty if it did, and whether to retry."""
        left = max(until - time.monotonic(), 0.1)
        try:
            with self._opener.open(request, timeout=left):
                return "", False
        except HTTPError as error:
            with error:
                return f"the receiver answered with {error.code}", error.code in _RETRIED
        except (OSError, HTTPException) as error:
            return described(error), True


def _context(export: OtlpExport) -> ssl.SSLContext:
    """Return the settings of TLS.

    Raises:
        ConfigError: a certificate cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=export.certificate)
        if export.client_certificate is not None:
            context.load_cert_chain(export.client_certificate, export.client_key)
    except OSError as error:
        raise ConfigError(
            f"the certificates for spans cannot be read: {described(error)}. Look at "
            "OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and "
            "OTEL_EXPORTER_OTLP_CLIENT_KEY."
        ) from error
    return context


def _warn(reason: str) -> None:
    logger.warning_once("some spans are not sent: %s", reason)
