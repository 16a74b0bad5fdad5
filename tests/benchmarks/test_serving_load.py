"""The load generator of the server's benchmark: prompts, arrivals, requests and figures."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from benchmarks.test_engine import BENCHMARKS

pytest.importorskip("aiohttp")
numpy = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of the benchmarks find each other in their folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def prompts() -> ModuleType:
    import serving_prompts

    return serving_prompts


@pytest.fixture
def reports() -> ModuleType:
    import serving_report

    return serving_report


def test_random_prompts_repeat_with_their_seed(prompts: ModuleType) -> None:
    """A seed gives the same prompts each time; no two prompts begin alike."""
    made = prompts.random_prompts(50, 20, seed=1)
    assert made == prompts.random_prompts(50, 20, seed=1)
    assert made != prompts.random_prompts(50, 20, seed=2)
    assert {len(str(prompt.content).split()) for prompt in made} == {20}
    assert len({str(prompt.content)[:40] for prompt in made}) == 50


def test_constant_arrivals_are_evenly_spaced(prompts: ModuleType) -> None:
    """The first request is sent at once, the others at the rate."""
    assert prompts.arrivals(4, 2.0, False, 0) == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_have_the_rate_and_its_spread(prompts: ModuleType) -> None:
    """Gaps of a Poisson process have a standard deviation as large as their mean."""
    times = prompts.arrivals(20_001, 5.0, True, 3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.2, rel=0.05)
    assert spread == pytest.approx(0.2, rel=0.05)
    assert times == prompts.arrivals(20_001, 5.0, True, 3)


class ForeignServer(BaseHTTPRequestHandler):
    """A server of another make: it refuses, fails within a stream, breaks off, and counts no tokens."""

    error = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "x"}}\n\n'
    whole = (
        b': hello\r\n\r\ndata:{"choices": [{"text": "a"}]}\r\n\r\n'
        b'data: {"choices": [{"delta": {"content": "b"}}]}\n\ndata: [DONE]\n\n'
    )
    counted = (
        b'data: {"choices": [{"text": "ab"}], "usage": null}\n\n'
        b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 7}}\n\ndata: [DONE]\n\n'
    )
    replies = (
        (429, b'{"error": {"message": "full"}}'),
        (200, error),
        (200, b'data: {"choices": [{"text": "a"}]}\n\n'),
        (200, b"data: [1\n\n"),
        (200, whole),
        (200, counted),
    )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        number = self.server.asked = getattr(self.server, "asked", -1) + 1  # type: ignore[attr-defined]
        status, body = self.replies[number]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@pytest.fixture
def foreign() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ForeignServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def sent(url: str, prompts: ModuleType, **load: Any) -> list[Any]:
    """Put a load of six short prompts on a server."""
    import serving_client
    import serving_load

    async def send() -> list[Any]:
        question = serving_load.Question("m", False, 4, {})
        made = prompts.random_prompts(6, 5, 0)
        async with serving_client.Client(url) as client:
            return await serving_load.run(client, question, made, serving_load.Load(**load))

    return asyncio.run(send())


def test_failures_of_any_server_are_counted_by_kind(
    foreign: str, prompts: ModuleType, reports: ModuleType
) -> None:
    """A refusal, an error within a stream and an unfinished stream are failures.

    Without counts of the server, each part of a text counts as one token.
    """
    found = reports.report("", sent(foreign, prompts), reports.Limits())
    assert found.errors == {"429": 1, "incomplete": 1, "stream": 2}
    assert found.messages == {"429": "full", "stream": "x"}
    assert (found.completed, found.prompt_tokens, found.output_tokens) == (2, 5, 2 + 7)


def test_requests_to_a_server_that_is_down_are_failures(prompts: ModuleType) -> None:
    """Requests at a rate fail one by one, with the reason."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = sent(f"http://127.0.0.1:{held.getsockname()[1]}", prompts, rate=500.0)
    assert [outcome.error for outcome in found] == ["connection"] * 6
    assert "onnect" in found[0].message


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(reports: ModuleType, count: int, percent: float) -> None:
    """Between two values the percentile is interpolated, at the ends it is one of them."""
    values = sorted(float(v) for v in numpy.random.default_rng(0).random(count))
    expected = float(numpy.percentile(values, percent))
    assert reports.percentile(values, percent) == pytest.approx(expected)


def test_there_is_no_percentile_of_nothing(reports: ModuleType) -> None:
    """Nothing has no percentile and no spread."""
    with pytest.raises(ValueError, match="no percentile of no values"):
        reports.percentile([], 50)
    assert reports.Spread.of([]) is None


@pytest.fixture
def outcomes(reports: ModuleType) -> list[Any]:
    """Two answers of 3 and 2 tokens, a refusal, and an answer that was cut off."""
    outcome = reports.Outcome
    return [
        outcome(10.0, 14.0, [11.0, 12.0, 14.0], prompt_tokens=5, output_tokens=3),
        outcome(11.0, 18.0, [15.0, 18.0], prompt_tokens=7, output_tokens=2),
        outcome(12.0, 12.1, error="429"),
        outcome(12.0, 20.0, [13.0], prompt_tokens=9, output_tokens=1, error="incomplete"),
    ]


def test_a_report_sums_up_answers_and_counts_failures(
    reports: ModuleType, outcomes: list[Any]
) -> None:
    """Tokens and latencies are those of answered requests; the time ends with the last request."""
    found = reports.report("2 at a time", outcomes, reports.Limits())
    first = reports.Spread(2.5, 2.5, pytest.approx(3.7), pytest.approx(3.97))
    assert (found.seconds, found.requests, found.completed) == (10.0, 4, 2)
    assert (found.prompt_tokens, found.output_tokens) == (12, 5)
    assert found.output_tokens_per_second == pytest.approx(0.5)
    assert found.errors == {"429": 1, "incomplete": 1}
    assert found.time_to_first_token == first
    assert found.time_per_output_token.mean == pytest.approx((1.5 + 3) / 2)
    assert found.inter_token_latency.p50 == 2.0
    assert found.end_to_end.mean == 5.5


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({}, 2),
        ({"time_to_first_token": 1.0}, 1),
        ({"time_per_output_token": 1.5}, 1),
        ({"end_to_end": 3.9}, 0),
        ({"time_to_first_token": 4, "time_per_output_token": 3, "end_to_end": 7}, 2),
    ],
)
def test_goodput_counts_fast_answers(
    reports: ModuleType, outcomes: list[Any], limits: dict[str, float], good: int
) -> None:
    """Goodput is the rate of answered requests within every limit."""
    found = reports.report("", outcomes, reports.Limits(**limits))
    assert found.goodput == pytest.approx(good / 10)


def test_a_load_without_an_answer_has_a_report(reports: ModuleType, outcomes: list[Any]) -> None:
    """If every request failed, rates are 0 and there are no latencies."""
    found = reports.report("", outcomes[2:3], reports.Limits())
    assert (found.completed, found.goodput, found.end_to_end) == (0, 0.0, None)
