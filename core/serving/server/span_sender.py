"""``SpanSender``: a thread that sends encoded spans to a receiver of OTLP over HTTP."""

from __future__ import annotations

import gzip
import math
import ssl
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opgraft.base.log import logger
from opgraft.base.text import described, printable, shortened
from opgraft.base.version import __version__
from opgraft.config.environment import OtlpExport
from opgraft.errors import ConfigError

_MOST_UNSENT = 1 << 24
"""Bytes of spans that wait for the receiver, at most."""

_MOST_AT_ONCE = 1 << 21
"""Bytes of a request, of several messages. Receivers take 4 MB or more."""

_MOST_ANSWER = 1 << 14
"""Bytes of an answer that are read."""

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
    several traces. What a receiver does not take in time is dropped, which is logged once. A
    receiver whose bytes come one by one may take longer.

    The exporter of OpenTelemetry's SDK takes no messages that are encoded already, and encodes
    spans of its own kind alone.

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
        self._opener = build_opener(HTTPSHandler(context=_context(export)), _NoRedirect)
        self._ready = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._has_ended = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="opgraft-otlp", daemon=True)
        self._thread.start()

    def add(self, message: bytes) -> None:
        """Send a message later. It is dropped if too much waits, or after the end."""
        with self._ready:
            if self._has_ended:
                _warn("the server ends")
                return
            if self._size + len(message) > _MOST_UNSENT:
                _warn("the receiver takes spans too slowly")
                return
            self._waiting.append(message)
            self._size += len(message)
            if len(self._waiting) == 1 or self._size >= _MOST_AT_ONCE:
                self._ready.notify()

    def shutdown(self, seconds: float) -> None:
        """Send what waits, and end the thread, unless the receiver takes longer."""
        self._closing.set()
        with self._ready:
            self._ready.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while messages := self._next():
            begin = time.thread_time()
            try:
                self._send_or_drop(b"".join(messages))
            # The thread goes on after whatever foreign code raises.
            except Exception as error:
                _warn(described(error))
            finally:
                self._on_cost(time.thread_time() - begin)

    def _next(self) -> list[bytes]:
        """Wait, and return the messages of a request; none at the end."""
        messages: list[bytes] = []
        size = 0
        with self._ready:
            # Without messages, a short delay would keep a processor busy.
            self._ready.wait_for(lambda: self._waiting or self._closing.is_set())
            self._ready.wait_for(self._is_due, self._export.delay)
            while self._waiting and (not size or size + len(self._waiting[0]) <= _MOST_AT_ONCE):
                messages.append(self._waiting.popleft())
                size += len(messages[-1])
            self._size -= size
            self._has_ended = not messages
        return messages

    def _is_due(self) -> bool:
        return self._closing.is_set() or self._size >= _MOST_AT_ONCE

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
            # At the end of the server, one more try is left.
            is_last = self._closing.is_set()
            # Settings allow URLs of HTTP alone.
            request = Request(self._url, body, headers)  # noqa: S310
            reason, asked = self._post(request, until)
            if not reason:
                return
            wanted = max(pause, asked)
            if is_last or time.monotonic() + wanted >= until:
                _warn(reason)
                return
            self._closing.wait(wanted)
            pause *= 2

    def _post(self, request: Request, until: float) -> tuple[str, float]:
        """Send a request.

        Returns:
            The reason why the receiver did not take the spans, empty if it did, and the seconds
            that it wants to pass before a further try, endless if there is to be none.
        """
        left = max(until - time.monotonic(), 0.1)
        try:
            with self._opener.open(request, timeout=left) as answer:
                _warn_of_refused(answer.read1(_MOST_ANSWER))
                return "", 0.0
        except HTTPError as error:
            with error:
                asked = _pause_of(error) if error.code in _RETRIED else math.inf
                return f"the receiver answered with {error.code}", asked
        except (OSError, HTTPException) as error:
            return described(error), 0.0


class _NoRedirect(HTTPRedirectHandler):
    """Takes a redirect for an error: urllib would ask without the spans, and show the headers."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _pause_of(error: HTTPError) -> float:
    """Return the seconds of ``Retry-After``. A date counts as no wish."""
    text = error.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def _warn_of_refused(answer: bytes) -> None:
    """Look for refused spans in an answer. Other receivers answer with any text."""
    try:
        part = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return
    if part.rejected_spans:
        _warn(f"the receiver refuses them: {printable(shortened(part.error_message))}")


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
            "OTEL_EXPORTER_OTLP_CLIENT_KEY, and at the same with TRACES_ behind OTLP_."
        ) from error
    return context


def _warn(reason: str) -> None:
    logger.warning_once("some spans are not sent: %s", reason)
