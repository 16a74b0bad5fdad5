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
from time import monotonic

import pytest
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
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def receiving(*statuses: int) -> Iterator[Taken]:
    """Answer with these statuses, then with 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.headers.append({name.lower(): text for name, text in self.headers.items()})
            taken.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(taken.statuses.pop(0) if taken.statuses else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        taken = Taken(f"http://127.0.0.1:{listener.server_port}/v1/traces", list(statuses))
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield taken
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
