"""The server's benchmark: what it counts as good, as recovered, as right, and as left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from benchmarks.test_engine import BENCHMARKS

web = pytest.importorskip("aiohttp.web")


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serve

    return serve


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serving_soak

    return serving_soak


def asked(serving: ModuleType, *outcomes: tuple[float, str | None]) -> Callable[[], Awaitable[Any]]:
    """Return a function that returns outcomes one after the other, the last again and again."""
    waiting = [serving.Outcome(due=0, ended=seconds, error=error) for seconds, error in outcomes]

    async def ask() -> Any:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return ask


@pytest.mark.parametrize("last", [(0.001, "429"), (0.001, "connection"), (5.0, None)])
def test_what_is_refused_or_slow_is_no_recovery(
    serving: ModuleType, last: tuple[float, str | None]
) -> None:
    """However fast a refusal comes, and however often an answer was fast before."""
    ask = asked(serving, (0.1, None), (0.1, None), last)
    assert asyncio.run(serving.until_recovered(ask, limit=1, patience=0.2)) == 0.2


def test_recovery_ends_with_answers_in_a_row(serving: ModuleType) -> None:
    """After refusals and slow answers."""
    ask = asked(serving, (0.001, "429"), (5, None), (0.1, None))
    assert 0.02 <= asyncio.run(serving.until_recovered(ask, limit=1, patience=30)) < 30


def test_a_server_that_is_idle_as_its_load_ends_shows_no_recovery(serving: ModuleType) -> None:
    """Then there is nothing that it recovers from."""
    assert [each.verdict for each in serving.recovery(0, 0.1, 1)] == ["missed", "holds"]
    assert [each.verdict for each in serving.recovery(16, 6, 1)] == ["holds", "missed"]


def test_answers_that_come_too_late_are_no_goodput(serving: ModuleType) -> None:
    """Of 10 answers in 10 seconds, a peak of 1 a second, those within the limit count."""
    outcomes = [serving.Outcome(due=number, ended=number + 1) for number in range(10)]
    for limit, expected in ((1, "holds"), (0.5, "missed")):
        found = serving.bearing(
            outcomes, serving.Limits(end_to_end=limit), 1.0, serving.Load(rate=2)
        )
        assert found[0].verdict == expected
    failed = serving.Outcome(due=0, ended=10, error="500")
    assert (
        serving.bearing(
            [*outcomes, failed], serving.Limits(end_to_end=1), 1.0, serving.Load(rate=2)
        )[2].verdict
        == "missed"
    )


def soaked(soak: ModuleType, answer: Any, **kinds: Any) -> Any:
    """Ask a server of one answer for kinds of requests once."""

    async def ask() -> Any:
        async def models(_: Any) -> Any:
            return web.json_response({"data": [{"id": "a"}]})

        async def others(_: Any) -> Any:
            return answer()

        application = web.Application()
        application.router.add_get("/v1/models", models)
        application.router.add_route("*", "/{path:.*}", others)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (address,) = runner.addresses
        found = soak.Soak(_FakeServed(f"http://127.0.0.1:{address[1]}"), kinds)
        await found.ask(0, 0)
        await runner.cleanup()
        return found

    return asyncio.run(ask())


class _FakeServed:
    """A server without a process, whose metrics are given."""

    def __init__(self, url: str = "", code: int = 0, **metrics: float) -> None:
        self.url, self._code, self._metrics = url, code, metrics

    def metric(self, name: str) -> float:
        return self._metrics.get(name, 0.0)

    def end(self) -> tuple[int, float]:
        return self._code, 0.1


def test_statuses_are_told_by_kind(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind holds where all that was waited for had the status that is right for it."""
    monkeypatch.setattr(soak, "SENT", {})
    kinds = {
        "right": soak.Kind(404, "/a"),
        "wrong": soak.Kind(200, "/b", lambda _: {"prompt": "a"}),
    }
    found = soaked(soak, lambda: web.Response(status=404), **kinds)
    verdicts = {each.name: each.verdict for each in found.findings()}
    assert verdicts == {"right: 404": "holds", "wrong: 200": "missed"}
    assert found.counts["right"].total() == soak.WORKERS
    assert found.hung == 0


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("data: {}\n\ndata: [DONE]\n\n", "200"),
        ("data: {}\n\n", "broken"),
        ('data: {"error": {}}\n\ndata: [DONE]\n\n', "broken"),
    ],
)
def test_streams_have_to_end_well(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str, outcome: str
) -> None:
    """A stream that breaks off, or has an error in it, is no answer."""
    monkeypatch.setattr(soak, "SENT", {})
    found = soaked(
        soak,
        lambda: web.Response(text=text, content_type="text/event-stream"),
        a=soak.Kind(200, "/a"),
    )
    assert set(found.counts["a"]) - {soak.LEFT} == {outcome}


def test_what_never_answers_hangs(soak: ModuleType) -> None:
    """It is counted, be it asked by HTTP or by bytes; those that have left are not."""
    found = soak.Soak(_FakeServed(), {"a": soak.Kind(200, "/a")})
    found.counts = {
        "a": Counter({"timeout": 2, "200": 3, soak.LEFT: 9}),
        "no HTTP": Counter(timeout=1),
    }
    assert found.hung == 3
    first, second = found.findings()
    assert (first.measured, second.measured) == (3 / 5, 0)


def missed(soak: ModuleType, served: _FakeServed, after: Any) -> list[str]:
    """The names of what is missed of a soak of one request."""
    found = soak.Soak(served, {"chat, new schema": soak.Kind(200, soak.CHAT)})
    found.counts = {"chat, new schema": Counter({"200": 1})}
    return [
        each.name
        for each in soak.left(found, soak.Remains(100, 10, 1), after)
        if each.verdict != "holds"
    ]


def test_a_soak_without_a_leak_holds(soak: ModuleType) -> None:
    """All that is looked at is as it was."""
    assert not missed(soak, _FakeServed(grammars_kept=128), soak.Remains(104, 10, 1))
    assert not missed(soak, _FakeServed(), soak.Remains(99, 9, 0)), "less than before is no leak"


@pytest.mark.parametrize(
    ("served", "after", "row"),
    [
        ({"kv_cache_usage_perc": 0.01}, (100, 10, 1), "kv_cache_usage_perc"),
        ({"num_requests_running": 1}, (100, 10, 1), "num_requests_running"),
        ({"admitted_tokens": 5}, (100, 10, 1), "admitted_tokens"),
        ({"grammars_kept": 129}, (100, 10, 1), "grammars kept"),
        ({}, (106, 10, 1), "growth of memory"),
        ({}, (100, 11, 1), "files and connections left"),
        ({}, (100, 10, 2), "processes left"),
        ({"code": 1}, (100, 10, 1), "exit code"),
        ({"code": -9}, (100, 10, 1), "exit code"),
    ],
)
def test_each_leak_is_seen(
    soak: ModuleType, served: Any, after: tuple[int, int, int], row: str
) -> None:
    """By the row that is there for it."""
    assert missed(soak, _FakeServed(**served), soak.Remains(*after)) == [row]


def test_a_process_is_looked_at(soak: ModuleType) -> None:
    """Its memory, its open files and its children."""
    command = "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", f"{command}; child.kill()"], **pipes) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        found = soak.Remains.of(process)
        process.communicate(b"\n")
    assert (found.files, found.processes) == (3, 1)
    assert found.memory > 1 << 20
