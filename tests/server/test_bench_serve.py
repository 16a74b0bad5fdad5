"""``opgraft bench serve`` measures a server that runs, and tells what is wrong with one that does not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from cli.test_schemas import validator
from click.testing import CliRunner, Result
from opgraft.cli import cli
from opgraft.errors import OpgraftError
from server.processes import Server, serving

pytest.importorskip("aiohttp")

SMALL = ("--requests", "6", "--words", "5", "--max-tokens", "4", "--ignore-eos", "--warm-up", "1")


def bench(url: str, *options: str) -> Result:
    return CliRunner().invoke(
        cli, ["bench", "serve", "--url", url, *SMALL, *options], standalone_mode=False
    )


def figures(url: str, *options: str, code: int = 0) -> dict[str, Any]:
    result = bench(url, "--json", *options)
    assert result.exception is None, result.exception
    assert result.return_value == code
    found: dict[str, Any] = json.loads(result.stdout)
    assert not list(validator(found["schema"]).iter_errors(found))
    return found


@pytest.mark.slow
def test_loads_of_a_real_server_are_measured(server: Server) -> None:
    """Each load is measured with all its tokens; a later part of the answer never comes before an earlier one."""
    found = figures(server.url, "--rate", "50", "--concurrency", "3", "--chat")
    assert found["model"] == server.model
    assert [load["load"] for load in found["loads"]] == ["50 requests/s", "3 at a time"]
    for load in found["loads"]:
        assert (load["requests"], load["completed"], load["output_tokens"]) == (6, 6, 24)
        assert load["prompt_tokens"] > 30
        assert load["output_tokens_per_second"] == pytest.approx(24 / load["seconds"])
        assert (
            0
            < load["time_to_first_token"]["p50"]
            <= load["end_to_end"]["p50"]
            < load["seconds"] + 1e-9
        )
        assert load["goodput"] == load["requests_per_second"]


def test_the_server_counts_as_many_requests(server: Server) -> None:
    """The warm-up is sent and not measured."""
    before = server.metric("request_success_total")
    figures(server.url)
    assert server.metric("request_success_total") - before == 7


def test_progress_is_shown_on_a_terminal(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of each load goes to stderr where that is a terminal, and nothing of it to stdout or elsewhere."""
    assert bench(server.url).stderr == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    shown = bench(server.url, "--concurrency", "2", "--rate", "90")
    for words in ("requests ended, 2 at a time", "requests ended, 90 requests/s", "100%"):
        assert words in shown.stderr
        assert words not in shown.stdout


def test_limits_decide_what_is_good(server: Server) -> None:
    """No request is good that is slower than a limit, and none fails by it."""
    (load,) = figures(server.url, "--limit-first-token", "0.0001")["loads"]
    assert (load["goodput"], load["completed"]) == (0.0, 6)


def test_a_dataset_is_sent(server: Server, tmp_path: Path) -> None:
    """Prompts and their max_tokens come from the file."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat", "max_tokens": 2}\n"the mat"\n')
    (load,) = figures(server.url, "--dataset", str(file))["loads"]
    assert load["output_tokens"] == 3 * 2 + 3 * 4


def test_chats_need_the_option(server: Server, tmp_path: Path) -> None:
    """Messages cannot be sent as completions."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    result = bench(server.url, "--dataset", str(file))
    assert "ask for chats by --chat" in str(result.exception)


def test_the_table_has_a_row_for_each_latency(server: Server) -> None:
    """Text says what was answered, and has percentiles of every latency."""
    result = bench(server.url)
    assert "8 at a time: 6 of 6 requests answered" in result.stdout
    for name in (
        "time to first token",
        "time per output token",
        "inter-token latency",
        "end to end",
    ):
        (row,) = [line for line in result.stdout.splitlines() if line.startswith(name)]
        assert len(row.removeprefix(name).split()) == 4


def test_a_plot_is_a_png(server: Server, tmp_path: Path) -> None:
    """The picture is written beside the table."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "load.png"
    bench(server.url, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    result = bench(server.url, "--plot", str(tmp_path / "none/load.png"))
    assert isinstance(result.exception, OpgraftError)
    assert "the plot cannot be written" in str(result.exception)


def test_a_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is missing is told before anything is measured."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.delitem(__import__("sys").modules, "opgraft.bench.plot", raising=False)
    result = bench("http://127.0.0.1:1", "--plot", str(tmp_path / "load.png"))
    assert "pip install 'opgraft[bench]'" in str(result.exception)


def test_a_server_that_is_down_is_named() -> None:
    """Nobody answers: the URL is in the error."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        result = bench(url)
    assert isinstance(result.exception, OpgraftError)
    assert f"no server answers at {url}" in str(result.exception)


def test_requests_to_a_server_that_is_down_are_counted() -> None:
    """With a model that is named, what fails are the requests."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = figures(f"http://127.0.0.1:{held.getsockname()[1]}", "--model", "x", code=1)
    assert found["loads"][0]["errors"] == {"connection": 6}
    assert "onnect" in found["loads"][0]["messages"]["connection"]


def test_a_key_is_sent_and_its_lack_is_told(checkpoint: Path, tmp_path: Path) -> None:
    """A server that wants a key says so; with the file it answers."""
    key = tmp_path / "key"
    key.write_text("secret-1\n")
    with serving(checkpoint, "--api-key-file", str(key)) as guarded:
        refused = bench(guarded.url)
        assert isinstance(refused.exception, OpgraftError)
        assert "status 401" in str(refused.exception)
        assert "--api-key-file" in str(refused.exception)
        assert figures(guarded.url, "--model", guarded.model, code=1)["loads"][0]["errors"] == {
            "401": 6
        }
        assert figures(guarded.url, "--api-key-file", str(key))["loads"][0]["completed"] == 6


class _Odd(BaseHTTPRequestHandler):
    """A server of another make: it refuses, fails within a stream, breaks off, or does not count tokens."""

    replies = (
        (429, b"{}"),
        (200, b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "x"}}\n\n'),
        (200, b'data: {"choices": [{"text": "a"}]}\n\n'),
        (200, b"data: [1\n\n"),
        (
            200,
            b': hello\r\n\r\ndata:{"choices": [{"text": "a"}]}\r\n\r\ndata: {"choices": [{"text": "b"}]}\n\n',
        ),
    )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        number = self.server.asked = getattr(self.server, "asked", -1) + 1  # type: ignore[attr-defined]
        status, body = self.replies[min(number, 4)]
        body += b"data: [DONE]\n\n" if number >= 4 else b""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@pytest.fixture
def odd() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Odd)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_failures_of_any_server_are_counted_by_kind(odd: str) -> None:
    """Refusals, errors within a stream and answers that break off are not answers; parts are counted without usage."""
    found = figures(odd, "--model", "x", "--warm-up", "0", "--concurrency", "1", code=1)
    (load,) = found["loads"]
    assert load["errors"] == {"429": 1, "incomplete": 1, "stream": 2}
    assert load["messages"] == {"429": "{}", "stream": "x"}
    assert (load["completed"], load["output_tokens"]) == (2, 4)


def test_the_reason_of_failures_is_shown(server: Server) -> None:
    """The first request of a kind that fails says why, in the server's words."""
    shown = bench(server.url, "--words", "5000")
    assert shown.return_value == 1
    assert "errors: 400: 6" in shown.stdout
    assert "400: prompt has " in " ".join(shown.stdout.split())


def test_usage_errors_are_of_click() -> None:
    """Numbers that make no sense are refused before anything is sent."""
    result = bench("http://127.0.0.1:1", "--rate", "0")
    assert isinstance(result.exception, click.UsageError)
