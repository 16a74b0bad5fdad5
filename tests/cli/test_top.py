"""``opgraft top`` shows the load of a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from opgraft.cli.readings import Reading, load_between
from opgraft.engine.stats import PARTS
from opgraft.errors import InputError
from referencing import Registry, Resource
from support import servers
from support.servers import Server, serving, until, write_model
from support.small_tokenizers import trained_tokenizer

pytest.importorskip("fastapi")
pytest.importorskip("openai")

SCHEMAS = Path(__file__).parents[2] / "docs/reference/schemas"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Iterator[Server]:
    """A server that asks for a key."""
    folder = tmp_path_factory.mktemp("watched")
    model = write_model(folder / "llama", trained_tokenizer())
    (folder / "keys").write_text("secret\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "PYTHON", [warm_python])
        options = ("--api-key-file", str(folder / "keys"), "--server.time_ops_every", "3")
        with serving(model, *options) as running:
            running.key = "secret"
            yield running


METRICS = {
    "/metrics": "process_open_fds 7\n",
    "/older/metrics": 'vllm:num_requests_running{model_name="llama"} 1\n',
    "/named/metrics": 'vllm:num_requests_running{model_name="llama",engine="first"} 1\n',
    "/shaky/metrics": 'opgraft:num_requests_running{model_name="llama",engine="0"} 1\n',
}
"""Metrics of other programs by path."""


class Stranger(BaseHTTPRequestHandler):
    """A server with metrics of other programs.

    One path redirects, another answers without HTTP, a third fails each third time.
    """

    shaken = 0

    def do_GET(self) -> None:
        if self.path == "/shaky/metrics":
            Stranger.shaken += 1
            if Stranger.shaken % 3 == 0:
                self.send_error(503)
                return
        if self.path == "/ssh/metrics":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            return
        if self.path == "/moved/metrics":
            self.send_response(302)
            self.send_header("location", "/metrics")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/long/metrics":
            # The reader may have left.
            with suppress(OSError):
                self.wfile.write(b"#" * ((1 << 24) + 1))
            return
        self.wfile.write(METRICS[self.path].encode())

    def log_message(self, *_: object) -> None:
        """Nobody reads the log."""


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    """The URL of another program's server."""
    with HTTPServer(("127.0.0.1", 0), Stranger) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_figures_are_those_of_the_interval(cli, server: Server) -> None:
    """Tokens per second, means and shares are those of what ran between the two readings."""
    seen = threading.Event()

    def ask() -> Any:
        answer = None
        while not seen.is_set():
            answer = server.complete(max_tokens=200, ignore_eos=True)
        return answer

    asked = server.later(ask)
    until(lambda: server.metric("num_requests_running") > 0)
    before = server.metric("generation_tokens_total")
    answer = cli("top", server.url, "--api-key", "secret", "--json", "--interval", "0.5")
    most = server.metric("generation_tokens_total") - before
    seen.set()
    told = json.loads(answer.stdout)
    common = json.loads((SCHEMAS / "common.json").read_text())
    schema = json.loads((SCHEMAS / "opgraft.top.1.json").read_text())
    registry = Registry().with_resource("common.json", Resource.from_contents(common))
    assert list(Draft202012Validator(schema, registry=registry).iter_errors(told)) == []
    assert (answer.returncode, told["model"], told["url"]) == (0, "llama", server.url)
    [engine] = told["engines"]
    assert 0 < engine["output_tokens_per_second"] * told["seconds"] <= most
    assert 0 <= engine["cache_usage"] <= 1
    assert sum(told["shares_of_step"].values()) == pytest.approx(1)
    assert sorted(told["shares_of_step"]) == sorted(PARTS)
    assert sum(told["shares_of_ops"].values()) == pytest.approx(1)
    assert {"rms_norm", "silu_and_mul", "outside of ops"} < told["shares_of_ops"].keys()
    assert told["mean_seconds"]["between_tokens"] > 0
    kernels = server.get("/v1/decisions").json()["ops"]
    running = {
        (row["op"], row["kernel"], row["provider"]["name"]) for row in kernels if row["runs"]
    }
    shown = {(row["op"], row["kernel"], row["provider"]["name"]) for row in told["kernels"]}
    assert shown == running
    assert asked.result().status_code == 200


def test_text_is_for_people(cli, server: Server, tmp_path: Path) -> None:
    """A row for each engine, times, shares and kernels; without requests in the interval, a dash."""
    (tmp_path / "keys").write_text("secret\n")
    options = ("--api-key-file", str(tmp_path / "keys"), "--once", "--interval", "0.05")
    answer = cli("top", f"{server.url}/", *options)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 0, answer.stderr
    assert lines[0].startswith(f"llama at {server.url}, in 0.")
    assert lines[1].split("  ")[0] == "engine"
    assert lines[2].split() == ["0", "0", "0", "0.0%", "0.0", "0.0"]
    assert "mean times: first token -, between tokens -, request -" in lines
    assert "step: -" in lines
    assert any(line.startswith("ops: ") for line in lines)
    assert any(line.split()[:1] == ["rms_norm"] for line in lines)


def test_the_address_comes_from_settings(cli, server: Server) -> None:
    """Without a URL, the settings of the server name it."""
    port = server.url.rpartition(":")[2]
    options = ("--host", "0.0.0.0", "--port", port, "--api-key", "secret", "--json")  # noqa: S104
    answer = cli("top", *options, "--interval", "0.05")
    assert json.loads(answer.stdout)["url"] == f"http://127.0.0.1:{port}"


def test_it_goes_on_until_it_is_interrupted(server: Server) -> None:
    """A block for each interval; SIGINT is the usual end, without an error."""
    command = [sys.executable, "-m", "opgraft", "top", server.url, "--api-key", "secret"]
    watching = subprocess.Popen(
        [*command, "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    blocks = 0
    while blocks < 2:
        line = watching.stdout.readline()
        assert line, "it has ended"
        blocks += line.startswith("llama at")
    watching.send_signal(signal.SIGINT)
    _, told = watching.communicate(timeout=30)
    assert (watching.returncode, told) == (0, "")


def test_it_outlives_a_lost_server(stranger: str) -> None:
    """A reading that fails is told, and the next one is shown again."""
    command = [sys.executable, "-m", "opgraft", "top", f"{stranger}/shaky", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = iter(watching.stdout.readline, "")
        assert any(line.startswith("llama at") for line in lines)
        assert any("status 503" in line for line in lines)
        assert any(line.startswith("llama at") for line in lines)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{url}",), ("status 401", "give --api-key")),
        (("{url}", "--api-key", "geheim"), ("status 401", "its keys have no such key")),
        (("{url}", "--api-key", "ключ"), ("status 401", "its keys have no such key")),
        (("{url}", "--api-key", "two\nlines"), ("cannot be sent", "--api-key")),
        (("{url}", "--api-key", "geheim\n"), ("cannot be sent", "--api-key")),
        (("{strange}/long",), ("over 16 MiB", "opgraft serve")),
        (("{url}/v2", "--api-key", "secret"), ("status 404", "see that the URL is right")),
        (
            ("http://127.0.0.1:9",),
            ("no server answers at http://127.0.0.1:9/metrics", "opgraft serve"),
        ),
        (("localhost:8000",), ("'localhost:8000' is no URL", "http://host:8000")),
        (("http://localhost:abc",), ("is no URL of a server", "http://host:8000")),
        (("http://a b",), ("is no URL of a server", "http://host:8000")),
        (("http://me:secret@localhost",), ("is no URL of a server", "http://host:8000")),
        (("{strange}",), ("has no metrics of a model",)),
        (("{strange}/older",), ("has no metrics of a model",)),
        (("{strange}/named",), ("has no metrics of a model",)),
        (("{strange}/ssh",), ("no server answers", "BadStatusLine")),
        (("{strange}/moved", "--api-key", "secret"), ("status 302", "give the final URL")),
    ],
)
def test_errors_tell_the_next_step(
    cli, server: Server, stranger: str, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """A wrong key, path, address or server is one line on stderr."""
    given = [each.format(url=server.url, strange=stranger) for each in arguments]
    answer = cli("top", *given, "--once")
    assert answer.returncode == InputError.exit_code
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: ")
    assert "geheim" not in answer.stderr
    for word in words:
        assert word in answer.stderr


@pytest.mark.parametrize("interval", ["nan", "inf", "1e12", "0"])
def test_intervals(cli, interval: str) -> None:
    """An interval is a number of seconds up to an hour."""
    answer = cli("top", "http://127.0.0.1:9", "--interval", interval)
    assert answer.returncode == 2
    assert "Invalid value for '--interval'" in answer.stderr


def reading(moment: float, **values: float) -> Reading:
    """Return a reading of two engines, of which the second has these counters."""
    of = {"model_name": "llama"}
    samples: list[Any] = [
        ("vllm:num_requests_running", {**of, "engine": "10"}, 0.0),
        ("vllm:num_requests_running", {**of, "engine": "9"}, 3.0),
        ("process_open_fds", {}, 7.0),
    ]
    samples += [(f"vllm:{name}", {**of, "engine": "9"}, value) for name, value in values.items()]
    return Reading(moment, samples)


def test_changes_are_divided_by_the_interval() -> None:
    """Engines come by number, each with its own rates; a server that was started anew counts from 0."""
    first = reading(1, generation_tokens_total=100, e2e_request_latency_seconds_count=4)
    second = reading(3, generation_tokens_total=110, e2e_request_latency_seconds_count=4)
    load = load_between(first, second)
    assert [(each.engine, each.running) for each in load.engines] == [("9", 3), ("10", 0)]
    assert [each.output_tokens_per_second for each in load.engines] == [5, 0]
    assert load.mean_seconds["request"] is None
    anew = reading(5, generation_tokens_total=8)
    assert load_between(second, anew).engines[0].output_tokens_per_second == 4
    # The count of the new server is the higher one, and the sum tells that it is new.
    name = "e2e_request_latency_seconds"
    earlier = reading(6, **{f"{name}_count": 4, f"{name}_sum": 90})
    later = reading(7, **{f"{name}_count": 6, f"{name}_sum": 3})
    assert load_between(earlier, later).mean_seconds["request"] == 0.5
    times = {"e2e_request_latency_seconds_count": 6, "e2e_request_latency_seconds_sum": 5}
    assert load_between(first, reading(3, **times)).mean_seconds["request"] == 2.5


def test_shares_of_ops() -> None:
    """They are those of the interval, or since the start if no step of the interval has timed its ops."""

    def timed(moment: float, **seconds: float) -> Reading:
        counted = [
            ("opgraft:engine_op_seconds_total", {"engine": "9", "op": op}, value)
            for op, value in seconds.items()
        ]
        running = ("opgraft:num_requests_running", {"model_name": "llama", "engine": "9"}, 0.0)
        return Reading(moment, [running, *counted])

    first = timed(1, norm=1, attention=3)
    assert load_between(first, timed(2, norm=3, attention=3)).shares_of_ops == {
        "norm": 1,
        "attention": 0,
    }
    assert load_between(first, timed(2, norm=1, attention=3)).shares_of_ops == {
        "attention": 0.75,
        "norm": 0.25,
    }
    assert load_between(timed(1), timed(2)).shares_of_ops == {}
