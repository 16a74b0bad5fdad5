"""A receiver of OTLP over HTTP, which keeps the spans that it gets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.servers import until


@dataclass
class Span:
    """A span as it was received, with times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Receiver:
    """The spans so far."""

    url: str
    spans: list[Span] = field(default_factory=list)

    def trace(self, name: str, trace_id: str = "") -> tuple[Span, list[Span]]:
        """Wait for the first span of a trace, and return it with all spans of the trace."""

        def found() -> list[Span]:
            return [
                span
                for span in list(self.spans)
                if span.name == name and span.trace_id.startswith(trace_id)
            ]

        until(lambda: bool(found()))
        root = found()[0]
        return root, [span for span in list(self.spans) if span.trace_id == root.trace_id]


def covered(span: Span, parts: list[Span]) -> float:
    """Return the share of a span's time in which a part of it runs."""
    reached = span.begin
    seconds = 0
    for part in sorted(parts, key=lambda each: each.begin):
        seconds += max(0, min(part.end, span.end) - max(part.begin, reached))
        reached = max(reached, part.end)
    return seconds / (span.end - span.begin)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive spans at a free port within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            receiver.spans += spans_of(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        receiver = Receiver(f"http://127.0.0.1:{listener.server_port}")
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield receiver
        listener.shutdown()
        thread.join()


def spans_of(body: bytes) -> list[Span]:
    """Return the spans of a message of the protocol."""
    found = []
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                found.append(
                    Span(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.code,
                        _attributes(span.attributes),
                        resource,
                    )
                )
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
