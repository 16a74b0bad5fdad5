"""The thread that sends spans, at a receiver that answers as a test tells it."""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic, process_time, sleep

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opgraft.config.environment import OtlpExport, read_otlp
from opgraft.errors import ConfigError
from opgraft.serving.server import span_sender
from opgraft.serving.server.span_sender import SpanSender
from support.servers import until

SOON = OtlpExport(delay=0.01)
SENT = b"spans"


@dataclass
class Taken:
    """The requests that a receiver took, and the statuses of its next answers."""

    url: str
    statuses: list[int]
    methods: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def receiving(*statuses: int, answer: bytes = b"", **headers: str) -> Iterator[Taken]:
    """Answer with these statuses, then with 200; with headers if the status is another one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.methods.append(self.command)
            taken.headers.append({name.lower(): text for name, text in self.headers.items()})
            taken.bodies.append(self.rfile.read(int(self.headers.get("content-length", 0))))
            status = taken.statuses.pop(0) if taken.statuses else 200
            self.send_response(status)
            if status != 200:
                for name, text in headers.items():
                    self.send_header(name.replace("_", "-"), text)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        taken = Taken(f"http://127.0.0.1:{listener.server_port}/v1/traces", list(statuses))
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield taken
        finally:
            listener.shutdown()
            thread.join()


def ignore(seconds: float) -> None:
    del seconds


@pytest.mark.parametrize(
    ("compression", "expand"),
    [("none", bytes), ("gzip", gzip.decompress), ("deflate", zlib.decompress)],
)
def test_body_and_headers(compression: str, expand: Callable[[bytes], bytes]) -> None:
    """The messages of some time are one body, with the headers of the operator."""
    export = OtlpExport((("authorization", "Basic me"),), compression=compression, delay=60)
    costs: list[float] = []
    with receiving() as taken:
        sender = SpanSender(taken.url, export, costs.append)
        for _ in range(3):
            sender.add(SENT)
        sender.shutdown(10)
    assert [expand(body) for body in taken.bodies] == [3 * SENT]
    (headers,) = taken.headers
    assert headers["authorization"] == "Basic me"
    assert headers["content-type"] == "application/x-protobuf"
    assert headers.get("content-encoding", "none") == compression
    assert len(costs) == 1


def test_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent after the delay, and before if they are many."""
    monkeypatch.setattr(span_sender, "_MOST_AT_ONCE", 100)
    with receiving() as taken:
        soon = SpanSender(taken.url, SOON, ignore)
        soon.add(SENT)
        until(lambda: taken.bodies == [SENT])
        late = SpanSender(taken.url, replace(SOON, delay=600), ignore)
        late.add(bytes(100))
        until(lambda: len(taken.bodies) == 2)
        soon.shutdown(10)
        late.shutdown(10)


def test_further_tries(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A receiver that is busy is asked again, and one that refuses is not."""
    monkeypatch.setattr(span_sender, "_FIRST_PAUSE", 0.01)
    with receiving(503, 429, 200, 400) as taken:
        sender = SpanSender(taken.url, SOON, ignore)
        sender.add(SENT)
        until(lambda: len(taken.bodies) == 3)
        assert "not sent" not in caplog.text
        sender.add(b"refused")
        until(lambda: "the receiver answered with 400" in caplog.text)
        sender.shutdown(10)
    assert taken.bodies == [SENT, SENT, SENT, b"refused"]


def test_a_busy_receiver_names_the_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next try comes after the seconds of Retry-After, and none comes if they are too many."""
    monkeypatch.setattr(span_sender, "_FIRST_PAUSE", 0.01)
    with receiving(503, retry_after="1") as taken:
        sender = SpanSender(taken.url, SOON, ignore)
        sender.add(SENT)
        until(lambda: len(taken.bodies) == 1)
        begun = monotonic()
        until(lambda: len(taken.bodies) == 2)
        assert monotonic() - begun > 0.8
        sender.shutdown(10)
    assert "not sent" not in caplog.text
    with receiving(429, retry_after="3600") as taken:
        sender = SpanSender(taken.url, SOON, ignore)
        sender.add(SENT)
        until(lambda: "the receiver answered with 429" in caplog.text)
        sender.shutdown(10)
    assert taken.bodies == [SENT]


def test_a_receiver_that_refuses_some_spans(caplog: pytest.LogCaptureFixture) -> None:
    """An answer with the status 200 may refuse spans. Another text in an answer refuses none."""
    with receiving(answer=b"<html>thanks") as taken:
        sender = SpanSender(taken.url, SOON, ignore)
        sender.add(SENT)
        sender.shutdown(10)
    assert "not sent" not in caplog.text
    part = ExportTracePartialSuccess(rejected_spans=3, error_message="too\nold")
    answer = ExportTraceServiceResponse(partial_success=part).SerializeToString()
    with receiving(answer=answer) as taken:
        sender = SpanSender(taken.url, SOON, ignore)
        sender.add(SENT)
        sender.shutdown(10)
    assert taken.bodies == [SENT]
    assert "some spans are not sent: the receiver refuses them: too\\nold" in caplog.text


def test_a_redirect_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """No other host gets the headers, and the log tells that the spans are lost."""
    export = replace(SOON, headers=(("authorization", "Bearer key"),))
    with receiving() as other, receiving(302, location=other.url) as taken:
        sender = SpanSender(taken.url, export, ignore)
        sender.add(SENT)
        sender.shutdown(10)
    assert taken.methods == ["POST"]
    assert other.methods == []
    assert "the receiver answered with 302" in caplog.text


def test_a_short_delay_takes_no_time() -> None:
    """A sender without messages sleeps, also if the delay is 0, and still sends at once."""
    with receiving() as taken:
        sender = SpanSender(taken.url, replace(SOON, delay=0.0), ignore)
        begun = process_time()
        sleep(0.5)
        assert process_time() - begun < 0.1
        sender.add(SENT)
        until(lambda: taken.bodies == [SENT])
        sender.shutdown(10)


def test_a_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits after a busy time goes in several requests, as a receiver takes some MB at once."""
    monkeypatch.setattr(span_sender, "_MOST_AT_ONCE", 100)
    messages = [bytes([number]) * 40 for number in range(5)] + [bytes(150)]
    with receiving() as taken:
        sender = SpanSender(taken.url, replace(SOON, delay=600), ignore)
        with sender._ready:
            for message in messages:
                sender.add(message)
        sender.shutdown(10)
    assert b"".join(taken.bodies) == b"".join(messages)
    assert list(map(len, taken.bodies)) == [80, 80, 40, 150]


def test_the_end_during_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    """A batch that waits for a further try is tried once more. Later spans are lost with a word."""
    with receiving(503) as taken:
        sender = SpanSender(taken.url, SOON, ignore)
        sender.add(SENT)
        until(lambda: len(taken.bodies) == 1)
        sender.add(b"later")
        sender.shutdown(10)
        assert taken.bodies == [SENT, SENT, b"later"]
        assert "not sent" not in caplog.text
        sender.add(SENT)
    assert "some spans are not sent: the server ends" in caplog.text


def test_a_receiver_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """Spans for nobody are dropped at the end of the time, and the end waits for no further try."""
    with receiving() as taken:
        pass
    sender = SpanSender(taken.url, replace(SOON, timeout=0.5), ignore)
    sender.add(SENT)
    until(lambda: "not sent: " in caplog.text)
    patient = SpanSender(taken.url, replace(SOON, timeout=600), ignore)
    patient.add(SENT)
    begun = monotonic()
    patient.shutdown(10)
    sender.shutdown(10)
    assert monotonic() - begun < 5


def test_too_many_spans(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What waits is bounded. The first spans are kept, and the log tells once."""
    monkeypatch.setattr(span_sender, "_MOST_UNSENT", 10)
    with receiving() as taken:
        sender = SpanSender(taken.url, replace(SOON, delay=600), ignore)
        for _ in range(5):
            sender.add(SENT)
        sender.shutdown(10)
    assert taken.bodies == [2 * SENT]
    assert caplog.text.count("too slowly") == 1


def test_variables() -> None:
    """OpenTelemetry's variables are read, those for spans first."""
    export = read_otlp(
        {
            "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Basic%20me, X-Team = a=b",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3",
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "4.5",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
            "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE": "/me.pem",
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": "/me.key",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
    )
    headers = (("authorization", "Basic me"), ("x-team", "a=b"))
    assert export == OtlpExport(headers, 4.5, "gzip", "/ca.pem", "/me.pem", "/me.key", 0.1)
    assert read_otlp({}) == OtlpExport()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "set one of none, gzip, deflate"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "is no duration"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan", "is no duration"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1", "is no duration"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret", "is no list such as"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=secret", "is no list such as"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key=Basic%20abc%0Asecret", "in the value of key"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key=secret%00a", "in the value of key"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key=secret%E2%82%AC", "in the value of key"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "secret", "^OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon", "^OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zip", "^OTEL_EXPORTER_OTLP_TRACES_COMPR"),
    ],
)
def test_wrong_variables(name: str, value: str, words: str) -> None:
    """A value that is not allowed is refused, and headers stay secret."""
    with pytest.raises(ConfigError, match=words) as raised:
        read_otlp({name: value})
    assert "secret" not in str(raised.value)


def test_missing_certificates(tmp_path: Path) -> None:
    """A certificate that cannot be read is refused at the start."""
    export = replace(SOON, certificate=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
        SpanSender("https://localhost/v1/traces", export, ignore)
