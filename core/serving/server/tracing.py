"""``Tracing``: requests, and the start of the server, as spans of OpenTelemetry.

A request is a span of HTTP, a span of the model within, and a span for each phase of the work. A
step of the engine is a phase, with spans for sampling and the detokenizer. The phases follow each
other without gaps.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opgraft.base.log import logger
from opgraft.base.text import described, printable, shortened
from opgraft.base.timeline import Computation
from opgraft.base.version import __version__
from opgraft.binding.sharing import decisions
from opgraft.config.environment import read_otlp
from opgraft.engine.stats import EngineStats
from opgraft.errors import ConfigError
from opgraft.serving.outputs import RequestOutput
from opgraft.serving.server.span_sender import SpanSender
from opgraft.serving.server.spans import (
    RECEIVE,
    SPANS_OF_STEP,
    SpansOfTrace,
    StepSpan,
    Trace,
    attributes_of,
    new_context,
)
from starlette.datastructures import Headers
from starlette.types import Scope

SHARE = 0.01
"""The share of one processor's time for making and sending spans."""

_SAVED_SECONDS = 60.0
"""Seconds whose unused share may be spent later."""

_FIRST_COST = 1e-5
"""Seconds of a processor for a span, before any was made."""

_MOST_STEPS = 1 << 15
"""Steps of an engine that are remembered, for requests that have not ended."""

_MOST_DETAILED = 1000
"""Steps of a request that get spans. To make them takes some hundredths of a second at once."""

_MOST_WAITING = 256
"""Ended requests that wait for their spans, at most."""

_END_SECONDS = 5.0
"""Seconds to send the last spans."""

_PATH = "/v1/traces"
_end_of = attrgetter("end")


@contextmanager
def _harmless() -> Iterator[None]:
    """Log an error of the decorated function once. Requests and metrics go on."""
    try:
        yield
    # Tracing calls foreign code, and an answer is worth more than spans.
    except Exception as error:
        logger.warning_once("spans are missing, as tracing failed: %s", described(error))


class Budget:
    """The processor's time for spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = SHARE * _SAVED_SECONDS
        self._seen = time.monotonic()
        self._seconds = _FIRST_COST
        self._spans = 1

    def spend(self, seconds: float, made: int) -> None:
        """Count a processor's time, and the spans that were made in it."""
        with self._lock:
            self._seconds += seconds
            self._spans += made
            self._left -= seconds

    def spans(self) -> int:
        """Return the number of spans that may be made now, by the cost of a span so far."""
        with self._lock:
            now = time.monotonic()
            earned = SHARE * (now - self._seen)
            self._seen = now
            most = SHARE * _SAVED_SECONDS
            self._left = min(self._left + earned, most)
            seconds_of_span = self._seconds / self._spans
            return int(self._left / seconds_of_span)


class Tracing:
    """Makes the spans of requests and of the start, and sends them to a receiver.

    OpenTelemetry's own variables choose the service's name, the sampler and the export. Spans are
    made after the end of a request, in a thread of their own. Making and sending them is to take
    the share ``SHARE`` of a processor's time. Beyond that, the steps of a request become one span,
    and beyond that, requests get no spans. The notes during a request are not counted.

    A fault of tracing is logged once, and fails no request.

    Args:
        endpoint: the receiver's URL.

    Attributes:
        start: the timeline of the start, which has begun.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, endpoint: str) -> None:
        own = Resource({"service.name": "opgraft", "service.version": __version__})
        # OpenTelemetry reads its own variables, which operators know from other programs. Here,
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come second, and win.
        resource = own.merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        told = attributes_of(provider.resource.attributes)
        self._resource = resource_pb2.Resource(attributes=told)
        self._sampler = provider.sampler
        self._ids = provider.id_generator
        self._budget = Budget()
        url = url_of_traces(endpoint)
        self._sender = SpanSender(url, read_otlp(), lambda cost: self._budget.spend(cost, 0))
        # asyncio's own threads are for the work of requests.
        self._thread = ThreadPoolExecutor(1, "opgraft-spans")
        self._free = threading.Semaphore(_MOST_WAITING)
        self._steps: dict[int, list[StepSpan]] = {}
        self.start = Trace("prepare", new_context(self._ids, self._ids.generate_trace_id()))
        # Traces whose spans may need the remembered steps.
        self._open: set[Trace] = {self.start}
        self._digest = decisions().digest

    @_harmless()
    def observe(self, stats: EngineStats, outputs: Sequence[RequestOutput]) -> None:
        """Remember a step. The engine's thread calls this after each one."""
        counted = stats.counters
        # An abort between two steps.
        if not counted.steps:
            return
        now = time.monotonic()
        steps = self._steps.setdefault(stats.replica, [])
        # The begin of the very first step is not known. Spans begin with the request then.
        begin = steps[-1].end if steps else 0.0
        seconds = counted.seconds
        step = StepSpan(
            begin,
            now,
            seconds["sample"],
            seconds["text"],
            stats.running,
            counted.prompt_tokens + counted.decode_tokens,
            stats.replica,
        )
        # New lists, because another thread may read the former one.
        if not self._open:
            self._steps[stats.replica] = [step]
        elif len(steps) > 2 * _MOST_STEPS:
            self._steps[stats.replica] = [*steps[_MOST_STEPS:], step]
        else:
            steps.append(step)

    @_harmless()
    def begin_request(self, scope: Scope) -> Trace | None:
        """Begin the trace of a request, or go on with the client's.

        Returns:
            The timeline for the request; None if the sampler chooses no trace, or after a fault.
        """
        # Baggage is not read: nothing here uses it, and its parser logs text of clients.
        given = TraceContextTextMapPropagator().extract(Headers(scope=scope))
        parent = trace.get_current_span(given).get_span_context()
        trace_id = parent.trace_id
        if not parent.is_valid:
            trace_id = self._ids.generate_trace_id()
        name = f"{scope['method']} {scope['path']}"
        sampled = self._sampler.should_sample(given, trace_id, name, SpanKind.SERVER)
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        context = new_context(self._ids, trace_id, sampled.trace_state)
        begun = Trace(RECEIVE, context, parent if parent.is_valid else None)
        self._open.add(begun)
        return begun

    def end_start(self, error: BaseException | None = None) -> None:
        """End the trace of the start, and make the spans. Later calls do nothing.

        Args:
            error: that the start failed with.
        """
        if self.start.ended:
            return
        status = Status() if error is None else _failed(described(error))
        end = self.start.end()
        self._make(self.start, end, "start", Span.SPAN_KIND_INTERNAL, {}, status)
        self._open.discard(self.start)

    @_harmless()
    def end_request(
        self, timeline: Trace, record: Mapping[str, Any], error_status: int | None
    ) -> None:
        """End the trace of a request. Another thread makes the spans, unless too many wait.

        Args:
            timeline: of the request.
            record: the line of the request in the log.
            error_status: of the error that the request ended with, also in mid-stream.
        """
        end = timeline.end()
        if not self._free.acquire(blocking=False):
            self._open.discard(timeline)
            _warn_of_missing_spans()
            return
        # A stream that fails has the status 200 already.
        status = error_status or record["status"]
        self._thread.submit(
            self._make_and_free,
            timeline,
            end,
            f"{record['method']} {record['path']}",
            Span.SPAN_KIND_SERVER,
            _of_http(record, status),
            _status(record, status),
        )

    def _make_and_free(self, timeline: Trace, *arguments: Any) -> None:
        try:
            self._make(timeline, *arguments)
        finally:
            self._open.discard(timeline)
            self._free.release()

    def shutdown(self) -> None:
        """Send the last spans, unless the receiver does not answer in time."""
        until = time.monotonic() + _END_SECONDS
        # The spans of a long answer may take some time.
        making = threading.Thread(target=self._thread.shutdown, daemon=True)
        making.start()
        making.join(_END_SECONDS)
        self._sender.shutdown(max(until - time.monotonic(), 0.0))

    @_harmless()
    def _make(
        self,
        timeline: Trace,
        end: float,
        name: str,
        kind: Span.SpanKind.ValueType,
        attributes: Mapping[str, Any],
        status: Status,
    ) -> None:
        """Make the spans of a trace, as many as the budget has room for."""
        begun = time.thread_time()
        steps = self._steps_of(timeline)
        spans = SpansOfTrace(timeline, end, steps, self._resource, self._ids)
        left = self._budget.spans() - len(spans.phases)
        if left < 0:
            _warn_of_missing_spans()
            return
        told = {**attributes, "opgraft.decision.digest": self._digest}
        detailed = len(steps) <= min(_MOST_DETAILED, left // SPANS_OF_STEP)
        spans.make(name, kind, told, status, detailed)
        self._sender.add(spans.request.SerializeToString())
        self._budget.spend(time.thread_time() - begun, len(spans.made))

    def _steps_of(self, timeline: Trace) -> Sequence[StepSpan]:
        """Return the steps of each engine from the first one with the request to the last."""
        spans: dict[int, list[Computation]] = {}
        for each in timeline.computed:
            spans.setdefault(each.replica, []).append(each)
        found: list[StepSpan] = []
        for replica, computed in spans.items():
            begin = min(each.begin for each in computed)
            end = max(each.end for each in computed)
            steps = self._steps.get(replica, [])
            first = bisect_right(steps, begin, key=_end_of)
            last = bisect_left(steps, end, key=_end_of)
            found += steps[first : last + 1]
        return found


def _warn_of_missing_spans() -> None:
    logger.warning_once(
        "some requests get no spans, because all together would take more than %g %% of a "
        "processor: set OTEL_TRACES_SAMPLER=parentbased_traceidratio and "
        "OTEL_TRACES_SAMPLER_ARG=0.1, for example, to trace fewer requests",
        100 * SHARE,
    )


def url_of_traces(endpoint: str) -> str:
    """Return the URL for spans of a receiver.

    Raises:
        ConfigError: the endpoint is no URL of HTTP, or has the name of a user.
    """
    try:
        parts = urlsplit(endpoint)
        named = parts.hostname
        # Raises ValueError for a wrong port.
        parts.port  # noqa: B018
    except ValueError:
        named = None
    # Clients may see the settings. The message leaves a possible password out.
    if "@" in endpoint:
        raise ConfigError(
            "server.otlp_endpoint has the name of a user: leave it out, and set "
            "OTEL_EXPORTER_OTLP_HEADERS, such as authorization=Basic%20..."
        )
    if named is None or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"server.otlp_endpoint is {endpoint!r:.80}, and is no URL of HTTP: give one like "
            "http://localhost:4318"
        )
    return endpoint.rstrip("/").removesuffix(_PATH).rstrip("/") + _PATH


def _of_http(record: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return the attributes of a request by the conventions for HTTP.

    Args:
        record: the line of the request in the log.
        status: of the error, if the request ended with one in mid-stream.
    """
    told = {
        "http.request.method": record["method"],
        "http.response.status_code": record["status"],
        "http.route": record["path"],
        "url.path": record["path"],
        "client.address": record.get("client"),
        "error.type": str(status) if status >= 400 else None,
        "opgraft.request_id": record["request_id"],
    }
    return {name: value for name, value in told.items() if value is not None}


def _status(record: Mapping[str, Any], status: int) -> Status:
    """Return the status of a span. Errors of clients are no errors of the server."""
    return Status() if status < 500 else _failed(record.get("error") or "")


def _failed(reason: str) -> Status:
    message = printable(shortened(reason))
    return Status(code=Status.STATUS_CODE_ERROR, message=message)
