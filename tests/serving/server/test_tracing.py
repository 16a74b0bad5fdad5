"""Requests and the start as spans of OpenTelemetry, at a receiver of its protocol."""

from __future__ import annotations

import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from support.servers import Server, serving

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opgraft.base.timeline import (
    MOST_PHASES,
    NETWORK,
    QUEUE,
    RESPOND,
    Computation,
    Phase,
    Timeline,
    phase,
    recorded,
)
from opgraft.config import ServerConfig
from opgraft.engine.stats import Counters, EngineStats
from opgraft.errors import ConfigError, InputError
from opgraft.serving.server import run
from opgraft.serving.server import tracing as tracing_module
from opgraft.serving.server.spans import (
    STEPS,
    SpansOfTrace,
    StepSpan,
    Trace,
    new_context,
    phases_of,
)
from opgraft.serving.server.tracing import SHARE, Budget, Tracing, url_of_traces
from support.otlp import Receiver, Span, covered, receiving

CLIENT = "00f067aa0ba902b7"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "words"}
CONVENTIONS = {
    value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")
}
SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}
TOKENS = 24
TEXT = "text of a client"
CHAT = {
    "messages": [{"role": "user", "content": "the cat " * 40}],
    "temperature": 0.5,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A receiver of spans."""
    with receiving() as running:
        yield running


@pytest.fixture(scope="module")
def traced(
    checkpoint: Path, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that asks for a key, and sends its spans to the receiver."""
    keys = tmp_path_factory.mktemp("traced") / "keys"
    keys.write_text("secret\n")
    options = ("--server.otlp_endpoint", receiver.url, "--api-key-file", str(keys))
    with serving(checkpoint, *options, variables=SOON) as running:
        running.key = "secret"
        yield running


def asked(
    server: Server, path: str, trace_id: str, sampled: str = "01", **body: Any
) -> httpx.Response:
    """Ask as a client with a trace of its own."""
    headers = {**server.headers, "traceparent": f"00-{trace_id}-{CLIENT}-{sampled}"}
    # Nothing reads this header.
    headers["baggage"] = TEXT
    given = {"model": server.model, **body}
    return server.request("POST", path, json=given, headers=headers)


def told(spans: list[Span], root: Span) -> str:
    """Return the spans as text, for a failing test."""
    rows = [
        f"{span.name}: {(span.begin - root.begin) / 1e6:.3f} to {(span.end - root.begin) / 1e6:.3f}"
        for span in sorted(spans, key=lambda span: span.begin)
    ]
    return "\n".join(rows)


@pytest.mark.parametrize("streams", [False, True])
def test_spans_of_a_request(traced: Server, receiver: Receiver, streams: bool) -> None:
    """The spans of a chat go on with the client's trace, and name the work of at least 99 % of its time."""
    trace_id = f"4bf92f3577b34da6a3ce929d0e0e473{int(streams)}"
    answer = asked(traced, "/v1/chat/completions", trace_id, **CHAT, stream=streams)
    assert answer.status_code == 200
    root, spans = receiver.trace("POST /v1/chat/completions", trace_id)
    assert (root.parent_id, root.kind, root.status) == (CLIENT, 2, 0)
    (model,) = [span for span in spans if span.name == f"chat {traced.model}"]
    assert model.parent_id == root.span_id
    work = [span for span in spans if span not in (root, model)]
    assert covered(root, work) >= 0.99, told(spans, root)
    assert all(root.begin <= span.begin <= span.end <= root.end for span in work)
    names = Counter(span.name for span in work)
    assert names["step"] == names["sample"] == names["detokenize"] == TOKENS, told(spans, root)
    once = {"receive", "template", "tokenize", "queue"}
    assert {name: names[name] for name in once} == dict.fromkeys(once, 1), told(spans, root)
    assert {"http", "prepare", "respond", "network"} <= names.keys(), told(spans, root)
    steps = {span.span_id for span in work if span.name == "step"}
    for span in work:
        parts_of_step = span.name in ("sample", "detokenize")
        above = steps if parts_of_step else {root.span_id, model.span_id}
        assert span.parent_id in above, span.name


def test_attributes_of_a_request(traced: Server, receiver: Receiver) -> None:
    """Attributes have the names of the conventions, and the values of the request and its answer."""
    trace_id = "5bf92f3577b34da6a3ce929d0e0e4736"
    answer = asked(traced, "/v1/chat/completions", trace_id, **CHAT, seed=7).json()
    root, spans = receiver.trace("POST /v1/chat/completions", trace_id)
    (model,) = [span for span in spans if "gen_ai.operation.name" in span.attributes]
    named = {name for name in model.attributes if name.startswith("gen_ai.")}
    assert named <= CONVENTIONS
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "opgraft",
        "gen_ai.request.model": traced.model,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": TOKENS,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": TOKENS,
    }
    assert expected.items() <= model.attributes.items()
    http = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert http.items() <= root.attributes.items()
    assert len(root.attributes["opgraft.decision.digest"]) == 16
    assert root.resource["service.name"] == "words"


def test_refused_and_unsampled(traced: Server, receiver: Receiver) -> None:
    """A refused request is a trace without a span of the model; an unsampled one and a stranger's are none."""
    unsampled = "6bf92f3577b34da6a3ce929d0e0e4736"
    strange = "6bf92f3577b34da6a3ce929d0e0e4737"
    refused = "7bf92f3577b34da6a3ce929d0e0e4736"
    asked(traced, "/v1/chat/completions", unsampled, "00", **CHAT)
    stranger = replace(traced, key="another")
    assert asked(stranger, "/v1/chat/completions", strange, **CHAT).status_code == 401
    assert asked(traced, "/v1/chat/completions", refused, messages=[]).status_code == 400
    root, spans = receiver.trace("POST /v1/chat/completions", refused)
    assert (root.status, root.attributes["error.type"]) == (0, "400")
    assert not any("gen_ai.operation.name" in span.attributes for span in spans)
    assert not any(span.trace_id in (unsampled, strange) for span in receiver.spans)


def test_client_that_leaves(traced: Server, receiver: Receiver) -> None:
    """A stream whose client leaves is no error of the server."""
    trace_id = "8bf92f3577b34da6a3ce929d0e0e4736"
    headers = {**traced.headers, "traceparent": f"00-{trace_id}-{CLIENT}-01"}
    body = {**CHAT, "model": traced.model, "stream": True, "max_tokens": 400}
    with httpx.stream(
        "POST", f"{traced.url}/v1/chat/completions", json=body, headers=headers
    ) as answer:
        next(answer.iter_lines())
    root, spans = receiver.trace("POST /v1/chat/completions", trace_id)
    assert {span.status for span in spans} == {0}
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["error.type"] == "499"


def test_values_that_no_attribute_takes(traced: Server, receiver: Receiver) -> None:
    """A seed beyond 64 bits, stop strings and baggage are not sent; the trace is."""
    trace_id = "9bf92f3577b34da6a3ce929d0e0e4736"
    answer = asked(traced, "/v1/chat/completions", trace_id, **CHAT, seed=1 << 63, stop=[TEXT])
    assert answer.status_code == 200
    _, spans = receiver.trace("POST /v1/chat/completions", trace_id)
    (model,) = [span for span in spans if "gen_ai.operation.name" in span.attributes]
    sampling = {name for name in model.attributes if name.startswith("gen_ai.request.")}
    assert "gen_ai.request.temperature" in sampling
    assert not sampling & {"gen_ai.request.seed", "gen_ai.request.stop_sequences"}
    log = "".join(traced.log)
    assert TEXT not in log
    assert "opentelemetry" not in log


def test_start(traced: Server, receiver: Receiver) -> None:
    """The start is a trace with the work of at least 99 % of its time, and the digest."""
    root, spans = receiver.trace("start")
    work = [span for span in spans if span is not root]
    assert covered(root, work) >= 0.99, told(spans, root)
    names = {"start workers", "load model", "allocate cache", "read tokenizer", "warm up"}
    assert names <= {span.name for span in work}, told(spans, root)
    assert len(root.attributes["opgraft.decision.digest"]) == 16


@pytest.mark.parametrize("detailed", [True, False])
def test_steps_without_detail(detailed: bool) -> None:
    """Each step has its spans, or one span stands for all of them, at the same time and without gaps."""
    ids = RandomIdGenerator()
    timeline = Trace("http", new_context(ids, ids.generate_trace_id()))
    begin = timeline.phases[0].begin
    moments = ((1.0, QUEUE), (2.5, NETWORK), (2.6, QUEUE), (4.1, QUEUE), (4.2, RESPOND))
    timeline.phases += [Phase(begin + at, name) for at, name in moments]
    timeline.add_steps(Computation(begin + 2.0, begin + 3.95, 0))
    steps = [StepSpan(begin + at, begin + at + 1, 0.2, 0.1, 2, 3, 0) for at in (2.0, 3.0)]
    spans = SpansOfTrace(timeline, begin + 5, steps, Resource(), ids)
    spans.make("POST", SpanMessage.SPAN_KIND_SERVER, {}, Status(), detailed)
    *_, root = spans.made
    start = root.start_time_unix_nano
    times = [
        (
            span.name,
            round((span.start_time_unix_nano - start) / 1e9, 3),
            round((span.end_time_unix_nano - start) / 1e9, 3),
        )
        for span in spans.made
    ]
    first = [("step", 2.0, 3.0), ("sample", 2.7, 2.9), ("detokenize", 2.9, 3.0)]
    second = [("step", 3.0, 4.0), ("sample", 3.7, 3.9), ("detokenize", 3.9, 4.0)]
    expected = [*first, *second] if detailed else [("steps", 2.0, 4.0)]
    before = [("http", 0.0, 1.0), ("queue", 1.0, 2.0)]
    assert times == [*before, *expected, ("respond", 4.0, 5.0), ("POST", 0.0, 5.0)]


def test_slow_client() -> None:
    """If the client still takes a part after the last step, that time is the network's."""
    ids = RandomIdGenerator()
    timeline = Trace("http", new_context(ids, ids.generate_trace_id()))
    begin = timeline.phases[0].begin
    moments = ((1.0, QUEUE), (2.5, NETWORK), (5.0, QUEUE), (6.0, NETWORK), (6.5, RESPOND))
    timeline.phases += [Phase(begin + at, name) for at, name in moments]
    timeline.add_steps(Computation(begin + 2.0, begin + 3.0, 0))
    phases = [(round(at - begin, 3), name) for at, name in phases_of(timeline, [])]
    first = [(0.0, "http"), (1.0, QUEUE), (2.0, STEPS)]
    assert phases == [*first, (3.0, NETWORK), (5.0, RESPOND), (6.0, NETWORK), (6.5, RESPOND)]


def stats(replica: int) -> EngineStats:
    """Return the news of a step."""
    counters = Counters(steps=1, prompt_tokens=2, decode_tokens=1)
    return EngineStats(
        running=1, waiting=0, blocks_used=1, num_blocks=2, counters=counters, replica=replica
    )


def ended_request(tracing: Tracing, timeline: Trace, receiver: Receiver) -> list[Span]:
    """End a request, and return its spans."""
    record = {"method": "POST", "path": "/", "status": 200, "request_id": "1"}
    tracing.end_request(timeline, record, None)
    tracing.shutdown()
    trace_id = f"{timeline.context.trace_id:032x}"
    return receiver.trace("POST /", trace_id)[1]


def test_steps_of_several_replicas(receiver: Receiver) -> None:
    """The steps of a request with two prompts are those of both engines, of each as long as it computed."""
    tracing = Tracing(receiver.url)
    timeline = tracing.begin_request(SCOPE)
    assert timeline is not None
    for replica, steps in ((0, 2), (1, 3)):
        begin = monotonic()
        for _ in range(steps):
            tracing.observe(stats(replica), ())
        timeline.add_steps(Computation(begin, monotonic(), replica))
        tracing.observe(stats(replica), ())
    found = ended_request(tracing, timeline, receiver)
    replicas = [span.attributes["opgraft.step.replica"] for span in found if span.name == "step"]
    # The step under way at the last token counts, too.
    assert Counter(replicas) == {0: 3, 1: 4}


def test_spans_of_a_long_answer(receiver: Receiver) -> None:
    """Beyond some number of steps, one span stands for all of them, so that no burst of spans holds up tokens."""
    tracing = Tracing(receiver.url)
    timeline = tracing.begin_request(SCOPE)
    assert timeline is not None
    begin = monotonic()
    for _ in range(1001):
        tracing.observe(stats(0), ())
    timeline.add_steps(Computation(begin, monotonic(), 0))
    found = ended_request(tracing, timeline, receiver)
    [steps] = [span for span in found if span.name.startswith("step")]
    assert (steps.name, steps.attributes["opgraft.steps.count"]) == ("steps", 1001)


def test_steps_without_requests(receiver: Receiver) -> None:
    """Without a request under way, only the last step is remembered, as the next one begins at its end."""
    tracing = Tracing(receiver.url)
    tracing.end_start()
    begin = monotonic()
    for _ in range(100):
        tracing.observe(stats(0), ())
    timeline = tracing.begin_request(SCOPE)
    assert timeline is not None
    timeline.add_steps(Computation(begin, monotonic(), 0))
    found = ended_request(tracing, timeline, receiver)
    assert [span.name for span in found].count("step") == 1


def test_failed_start(receiver: Receiver) -> None:
    """The trace of a start that fails is an error with the reason."""
    kept: list[Tracing | None] = []

    def start() -> None:
        with run.tracing_of(ServerConfig(otlp_endpoint=receiver.url)) as tracing:
            kept.append(tracing)
            raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        start()
    [tracing] = kept
    assert tracing is not None
    root, _ = receiver.trace("start", f"{tracing.start.context.trace_id:032x}")
    assert root.status == 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 500 Failed\r\ncontent-length: 0\r\n\r\n"])
def test_receiver_that_fails(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """A receiver that hangs or fails holds up no request, and the end not beyond its limit."""
    monkeypatch.setattr(tracing_module, "_END_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tracing = Tracing(f"http://127.0.0.1:{listener.getsockname()[1]}")
        timeline = tracing.begin_request(SCOPE)
        assert timeline is not None
        record = {"method": "POST", "path": "/", "status": 200, "request_id": "1"}
        begun = monotonic()
        tracing.end_request(timeline, record, None)
        assert monotonic() - begun < 0.5

        def serve() -> None:
            while True:
                # The listener is closed at the end.
                with suppress(OSError):
                    connection, _ = listener.accept()
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                    held.append(connection)
                    continue
                return

        held: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            tracing.shutdown()
            seconds = monotonic() - begun
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
        assert seconds < 5
        assert held
        for connection in held:
            connection.close()


def test_end_of_the_budget(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests beyond the budget get no spans, which is told once."""
    monkeypatch.setattr(tracing_module, "SHARE", 0.0)
    tracing = Tracing(receiver.url)
    seen = len(receiver.spans)
    record = {"method": "POST", "path": "/", "status": 200, "request_id": "1"}
    for _ in range(2):
        timeline = tracing.begin_request(SCOPE)
        assert timeline is not None
        tracing.end_request(timeline, record, None)
    tracing.shutdown()
    assert len(receiver.spans) == seen
    assert caplog.text.count("OTEL_TRACES_SAMPLER_ARG=0.1") == 1


def test_notes_after_the_end() -> None:
    """A timeline that has ended stays as it is, whatever late threads note."""
    timeline = Timeline("http")
    timeline.end()
    with recorded(timeline), phase(NETWORK):
        pass
    timeline.add_steps(Computation(1.0, 2.0, 0))
    timeline.tell({"late": 1})
    assert (len(timeline.phases), timeline.computed, timeline.attributes) == (1, [], {})


def test_many_parts() -> None:
    """A long stream keeps a bounded number of phases, and stays in the phase outside of them."""
    timeline = Timeline("http")
    with recorded(timeline):
        for _ in range(MOST_PHASES):
            with phase(NETWORK):
                pass
    assert len(timeline.phases) <= MOST_PHASES + 1
    assert timeline.name == "http"


def test_faults_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A fault of tracing is logged, and raises nothing at the start, at a step or at a request."""
    tracing = Tracing("http://127.0.0.1:9")
    nothing: Any = None
    tracing.start.add_steps(nothing)
    tracing.end_start()
    assert "AttributeError: 'NoneType'" in caplog.text
    tracing.observe(nothing, ())
    assert tracing.begin_request(nothing) is None
    assert caplog.text.count("tracing failed") == 3
    tracing.shutdown()


@pytest.mark.parametrize(
    ("status", "error_status", "expected"),
    [
        (200, None, None),
        (200, 400, "400"),
        (200, 499, "499"),
        (200, 500, "500"),
        (503, None, "503"),
    ],
)
def test_errors_of_streams(
    receiver: Receiver, status: int, error_status: int | None, expected: str | None
) -> None:
    """The span of a request is an error only if the server failed, also after the begin of a stream."""
    tracing = Tracing(receiver.url)
    ids = RandomIdGenerator()
    trace_id = ids.generate_trace_id()
    record = {"method": "POST", "path": "/", "status": status, "request_id": "1", "error": "no"}
    tracing.end_request(Trace("http", new_context(ids, trace_id)), record, error_status)
    tracing.shutdown()
    root, _ = receiver.trace("POST /", f"{trace_id:032x}")
    assert root.attributes.get("error.type") == expected
    is_error = expected is not None and int(expected) >= 500
    assert root.status == (2 if is_error else 0)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("localhost:4318", "is no URL of HTTP"),
        ("", "is no URL of HTTP"),
        ("grpc://localhost:4317", "is no URL of HTTP"),
        ("http://localhost:many", "is no URL of HTTP"),
        ("http://me:secret@localhost:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_wrong_endpoints(endpoint: str, words: str) -> None:
    """An endpoint that spans cannot be sent to is refused at the start, without its password."""
    with pytest.raises(ConfigError, match=words) as raised:
        Tracing(endpoint)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("ending", ["", "/", "/v1/traces", "/v1/traces/"])
def test_path_of_the_endpoint(ending: str) -> None:
    """The path of OTLP is added to an endpoint, unless it is there."""
    assert url_of_traces(f"http://collector:4318{ending}") == "http://collector:4318/v1/traces"


def test_budget() -> None:
    """Spans that have cost the share of a processor leave room for no more, until time has passed."""
    budget = Budget()
    assert budget.spans() > 1000
    budget.spend(SHARE * 60, 100)
    assert budget.spans() <= 0


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry, the setting is refused with the extra to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "opgraft.serving.server.tracing")
    settings = ServerConfig(otlp_endpoint="http://localhost:4318")
    with pytest.raises(InputError, match=r"opgraft\[otel\]"), run.tracing_of(settings):
        pytest.fail("the library was imported")
