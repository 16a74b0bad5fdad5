"""Load, faults and the end of a server: every request is answered once, and its cache is free afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opgraft.errors import ConfigError
from opgraft.serving.server.keys import read_keys
from support.servers import (
    WITHOUT_CERTIFICATES,
    OpenClient,
    Server,
    error_of,
    expect_idle,
    process_of_model,
    serving,
    until,
)

STEP = 0.05
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def slow(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose steps take 50 ms, which runs two requests at once, lets three wait and asks for a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nclé\n", encoding="utf-8")
    limits = {
        "scheduler.max_num_seqs": 2,
        "server.max_waiting_requests": 3,
        "server.max_waiting_tokens": 100,
        "server.max_output_tokens": 900,
        "server.max_body_bytes": 100_000,
        "server.body_seconds": 1,
        "server.head_seconds": 1,
        "server.request_seconds": 25,
        "server.api_key_file": keys,
    }
    options = [part for name, value in limits.items() for part in (f"--{name}", str(value))]
    with serving(checkpoint, "--api-key", "third-key", *options, step_seconds=STEP) as running:
        running.key = "third-key"
        yield running


@pytest.fixture(scope="module")
def telling(checkpoint: Path) -> Iterator[Server]:
    """A server that asks for a key, writes prompts to its log, and has small limits."""
    limits = ("--server.max_total_logprobs", "100", "--server.max_output_tokens", "21")
    with serving(
        checkpoint, "--api-key", "right", "--server.log_prompts", "true", *limits
    ) as running:
        running.key = "right"
        yield running


@contextlib.contextmanager
def logged_lines(server: Server, count: int) -> Iterator[list[dict[str, Any]]]:
    """Return a list that gets the lines of the block's requests, which are so many, at its end."""
    before = len(server.requests())
    lines: list[dict[str, Any]] = []
    yield lines
    until(lambda: len(server.requests()) == before + count)
    lines += server.requests()[before:]


def stream(server: Server, **body: Any) -> AbstractContextManager[httpx.Response]:
    """Begin a stream."""
    given = {"model": server.model, "prompt": "the cat", "temperature": 0, **LONG, **body}
    return httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=given,
        headers=server.headers,
        timeout=60,
        verify=WITHOUT_CERTIFICATES,
    )


def begun(response: httpx.Response) -> Iterator[str]:
    """Return the lines of a stream, whose first event has come."""
    lines = response.iter_lines()
    assert next(lines).startswith("data:")
    return lines


def test_a_client_that_leaves_is_noticed_within_two_steps(slow: Server) -> None:
    """Its request ends, two steps later at most, and its cache is free; the log says why."""
    with stream(slow) as response:
        lines = begun(response)
        for _ in range(3):
            next(lines)
    before = slow.metric(
        "generation_tokens_total"
    )  # the server sees first that the client has left
    expect_idle(slow)
    assert slow.metric("generation_tokens_total") <= before + 3, (
        "two steps, and the one of the moment"
    )
    until(lambda: any(line.get("error") == "the client has left" for line in slow.requests()))
    body = {"model": slow.model, "prompt": "the cat", "max_tokens": 400, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        slow.request("POST", "/v1/completions", json=body, timeout=10 * STEP)
    before = slow.metric("generation_tokens_total")
    expect_idle(slow)
    assert slow.metric("generation_tokens_total") <= before + 3, (
        "who asks for no stream is noticed, too"
    )
    lefts = [line for line in slow.requests() if line.get("error") == "the client has left"]
    assert all(line["completion_tokens"] > 0 for line in lefts[-2:]), (
        "what was made for nobody is told"
    )


def test_what_cannot_wait_is_refused_at_once(slow: Server) -> None:
    """Beyond the bounds on sequences and tokens that wait it is 429 with Retry-After; who runs and waits goes on."""
    with stream(slow) as one, stream(slow) as two:
        running = [begun(one), begun(two)]
        first = slow.later(lambda: slow.complete(max_tokens=2, n=3, temperature=1))
        until(lambda: slow.metric("num_requests_waiting") == 3)
        refused = slow.complete(max_tokens=2)
        assert refused.status_code == 429
        assert not first.done(), "nothing had to end before"
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["message"].startswith(
            "3 sequences wait already, this request has 1, and at most 3"
        )
        assert all(next(lines) == "" for lines in running)
    assert first.result().status_code == 200, "it waited, and ran when there was room"
    expect_idle(slow)
    with stream(slow) as one, stream(slow) as two:
        running = [begun(one), begun(two)]
        first = slow.later(lambda: slow.complete(prompt=[5] * 60, max_tokens=2))
        until(lambda: slow.metric("num_requests_waiting") == 1)
        refused = slow.complete(prompt=[5] * 60, max_tokens=2)
        assert (
            "60 tokens wait already, this request has 60, and at most 100"
            in error_of(refused)["message"]
        )
    assert first.result().status_code == 200
    expect_idle(slow)


def test_what_has_not_begun_waits(slow: Server) -> None:
    """Of several answers, those after the first count as waiting until they begin."""
    with stream(slow, n=3, temperature=1, max_tokens=200) as response:
        lines = begun(response)
        until(lambda: slow.metric("num_requests_waiting") == 1)
        refused = slow.complete(n=3, temperature=1, max_tokens=1)
        assert error_of(refused)["message"].startswith(
            "1 sequences wait already, this request has 3, and at most 3"
        )
        assert next(lines) == ""
    expect_idle(slow)


def test_log_probabilities_of_a_request_have_a_limit(telling: Server) -> None:
    """They are counted over the tokens that are returned, echoed ones too; answers before any is computed."""
    with logged_lines(telling, 7) as lines:
        refused = telling.complete(n=22, temperature=1)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "n")
        assert telling.complete(max_tokens=20, logprobs=4).status_code == 200
        ends = {"logit_bias": {"7": 100}, "stop_token_ids": [7]}
        short = telling.complete(max_tokens=21, logprobs=4, **ends)
        assert short.status_code == 200, "it ends before the limit"
        for asked in (
            {"max_tokens": 21, "logprobs": 4, "ignore_eos": True},
            {"max_tokens": 21, "logprobs": 4, "min_tokens": 21},
            {"max_tokens": 7, "logprobs": 4, "ignore_eos": True, "n": 3, "temperature": 1},
            {"prompt": [5] * 50, "echo": True, "logprobs": 1},
        ):
            refused = telling.complete(**asked)
            assert (refused.status_code, error_of(refused)["param"]) == (400, "logprobs")
            assert "this server allows 100" in error_of(refused)["message"]
    refusals = [line for line in lines if line["status"] == 400]
    assert len(refusals) == 5
    assert not any("completion_tokens" in line for line in refusals), "nothing is computed"


def test_a_stalled_reader_holds_no_dead_server(checkpoint: Path) -> None:
    """When the engine has died, the process ends although a client reads no further."""
    asked = {
        "prompt": [[5] * 400] * 8,
        "n": 8,
        "temperature": 1,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 20,
    }
    large = ("--server.max_total_logprobs", "1000000")
    with (
        serving(checkpoint, *large, step_seconds=0) as server,
        stream(server, **asked, stream=False) as response,
    ):
        assert response.status_code == 200
        server.process.send_signal(signal.SIGUSR2)
        server.later(server.complete)
        assert server.process.wait(15) == 5


def test_tokens_of_all_answers_have_a_limit(slow: Server) -> None:
    """n times max_tokens is refused beyond it, with the numbers; without max_tokens the limit is shared out."""
    error = error_of(slow.complete(n=3, max_tokens=301, temperature=1))
    assert "903 tokens" in error["message"]
    assert "allows 900" in error["message"]
    assert error["param"] == "max_tokens"


def test_a_step_that_fails_fails_its_requests_alone(slow: Server) -> None:
    """They get an error without the cause, which is in the log; the next request is answered."""
    failing = slow.later(lambda: slow.complete(max_tokens=50, ignore_eos=True))
    with stream(slow) as response:
        lines = begun(response)
        until(lambda: slow.metric("num_requests_running") == 2)
        slow.process.send_signal(signal.SIGUSR1)
        *_, last = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    whole = failing.result()
    assert whole.status_code == 500
    assert "secret" not in whole.text + last
    assert "Traceback" not in whole.text + last
    until(lambda: sum("cause" in line for line in slow.requests()) == 2)
    lines = [line for line in slow.requests() if "cause" in line]
    assert sorted(line["status"] for line in lines) == [200, 500]
    for line in lines:
        assert "while it was computed" in line["error"]
        assert "kernel trouble" in line["cause"]
        assert line["level"] == "ERROR"
    assert next(line for line in lines if line["status"] == 200)["completion_tokens"] > 0
    assert slow.complete(max_tokens=2).status_code == 200
    assert slow.get("/health").status_code == 200
    expect_idle(slow)


def test_a_request_has_so_much_time(checkpoint: Path) -> None:
    """A request that takes longer is 504, or ends its stream with the error; its cache is free."""
    with serving(checkpoint, "--server.request_seconds", "0.6", step_seconds=STEP) as server:
        late = server.complete(max_tokens=300, ignore_eos=True)
        assert late.status_code == 504
        assert "longer than the 0.6 seconds" in error_of(late)["message"]
        with stream(server) as response:
            *_, last = [line for line in begun(response) if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        expect_idle(server)
        assert server.complete(max_tokens=2).status_code == 200
        with stream(server):
            assert server.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer",
        "Bearer wrong",
        "Bearer first-key2",
        "first-key",
        "Basic first-key",
        "Bearer first-key third-key",
    ],
)
def test_without_a_key_nothing_is_told(slow: Server, header: str | None) -> None:
    """A missing or a wrong key is 401 on all paths but /health."""
    headers = {} if header is None else {"authorization": header}
    for path in (
        "/v1/models",
        "/metrics",
        "/v1/decisions",
        "/openapi.json",
        "/version",
        "/nowhere",
    ):
        refused = slow.get(path, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert error_of(refused)["code"] == "invalid_api_key"
    assert slow.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["Bearer first-key", "Bearer third-key", "bearer  clé"])
def test_each_key_opens(slow: Server, key: str) -> None:
    """Keys of the file and of the option hold, in any letters, and the scheme in any case."""
    answer = slow.get("/v1/models", headers={"authorization": key.encode()})
    assert answer.status_code == 200
    assert not any("clé" in line or "-key" in line for line in slow.log)


def test_a_drain_lets_requests_finish(checkpoint: Path) -> None:
    """After a SIGTERM new ones are refused, short ones end, long ones are aborted in time, and the code is 0."""
    options = ("--drain-seconds", "2", "--host", "0.0.0.0")  # noqa: S104 - for its warning
    with serving(checkpoint, *options, step_seconds=STEP) as server, OpenClient() as client:
        assert client.get(f"{server.url}/health").status_code == 200
        with stream(server) as long, stream(server, max_tokens=5) as short:
            lines = [begun(long), begun(short)]
            server.process.send_signal(signal.SIGTERM)
            until(lambda: refuses(server))
            assert [line for line in lines[1] if line][-1] == "data: [DONE]"
            *_, last = [line for line in lines[0] if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
        assert server.process.wait(60) == 0
        streams = [line for line in server.requests() if line["path"] == "/v1/completions"]
        assert sorted(line.get("error", "")[:11] for line in streams) == ["", "the request"]
        until(lambda: any('"ended"' in line for line in server.log))
        told = [line.get("message", "")[:30] for line in map(json.loads, server.log)]
        expected = [
            "server.host is 0.0.0.0 and the",
            "ready",
            "shutting down: no new requests",
            "ended",
        ]
        assert [line for line in told if line in expected] == expected


def refuses(server: Server) -> bool:
    """Tell whether the server takes no more connections."""
    try:
        # A connection made while the server stops listening may never be answered.
        server.get("/health", timeout=2)
    except httpx.TransportError:
        return True
    return False


def test_a_second_signal_ends_at_once(checkpoint: Path) -> None:
    """Nothing is waited for any more."""
    with (
        serving(checkpoint, "--drain-seconds", "60", step_seconds=STEP) as server,
        stream(server) as response,
    ):
        _kept = begun(response)  # whose end would hang up
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server))
        assert server.end(seconds=30) == -signal.SIGTERM


def answers_to_the_end(server: Server) -> list[httpx.Response]:
    """Ask for health and for completions by turns until the server takes no more connections."""
    answers = []
    with contextlib.suppress(httpx.TransportError):
        while True:
            answers.append(server.get("/health"))
            answers.append(server.complete(max_tokens=1))
    return answers


def expect_the_end(server: Server, signal_number: int, waits: Callable[[], bool]) -> None:
    """Break the engine by a signal: who streams, who waits and who comes gets an error, and the exit code is 5."""
    with stream(server) as response:
        lines = begun(response)
        whole = server.later(lambda: server.complete(max_tokens=400, ignore_eos=True))
        until(waits)
        server.process.send_signal(signal_number)
        come = server.later(lambda: answers_to_the_end(server))
        *_, last = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
    assert whole.result().status_code == 503
    assert server.process.wait(60) == 5
    refused = [answer for answer in come.result() if answer.status_code == 503]
    assert {answer.request.url.path for answer in refused} == {"/health", "/v1/completions"}
    assert all("engine has stopped" in error_of(answer)["message"] for answer in refused)


def test_the_death_of_the_engine_ends_every_request(checkpoint: Path) -> None:
    """It is told by every answer, /health too, and its cause by none."""
    with serving(checkpoint, "--scheduler.max_num_seqs", "1", step_seconds=STEP) as server:
        expect_the_end(server, signal.SIGUSR2, lambda: server.metric("num_requests_waiting") == 1)
        assert not any("the thread is dead" in line for line in server.requests())


def test_a_step_that_hangs_ends_every_request(checkpoint: Path) -> None:
    """When its time is up it is as if the engine had died."""
    with serving(checkpoint, "--server.step_seconds", "1", step_seconds=STEP) as server:
        expect_the_end(server, signal.SIGHUP, lambda: server.metric("num_requests_running") == 2)
        assert any("has taken longer than 1 seconds" in line for line in server.log)


def test_polls_are_not_logged(telling: Server) -> None:
    """Neither probes nor readers of metrics fill the log, unless they are refused; they may ask for the head alone."""
    with logged_lines(telling, 2) as lines:
        for path in ("/health", "/metrics"):
            assert telling.get(path).status_code == 200
            head = telling.request("HEAD", path)
            assert (head.status_code, head.content) == (200, b"")
        assert telling.get("/metrics", headers={}).status_code == 401
        telling.complete(max_tokens=1)
    refused, answered = lines
    assert (refused["path"], refused["status"]) == ("/metrics", 401)
    assert answered["path"] == "/v1/completions"


def test_prompts_are_logged_where_that_is_asked_for(telling: Server) -> None:
    """The line of a request then has its prompt and its answers, streamed ones too."""
    with logged_lines(telling, 3) as lines:
        text = telling.complete(max_tokens=3).json()["choices"][0]["text"]
        telling.complete(max_tokens=3, stream=True)
        telling.chat()
    whole, streamed, chat = lines
    assert (whole["prompt"], whole["answers"]) == ("the cat", {"0/0": text})
    assert streamed["answers"] == whole["answers"]
    assert chat["prompt"][0]["content"] == "the cat"


def test_files_of_keys(tmp_path: Path) -> None:
    """A comment is no key, and a line with blanks is refused with its number."""
    keys = tmp_path / "keys"
    keys.write_text("# for production\n\nreal-key\n  other-key \n", "utf-8")
    assert read_keys(keys, "--api-key-file") == ["real-key", "other-key"]
    keys.write_text("real-key\nof production\n", "utf-8")
    with pytest.raises(ConfigError, match="has blanks in line 2"):
        read_keys(keys, "--api-key-file")
    keys.write_text("# none\n", "utf-8")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(keys, "--api-key-file")


def test_names_that_are_not_its_own(server: Server) -> None:
    """A page of a stranger, whose name leads here, is refused; an address of this machine is not."""
    for host, status in (
        ("evil.example", 403),
        ("localhost:8000", 200),
        ("[::1]:8000", 200),
        ("127.0.0.1", 200),
    ):
        assert server.get("/v1/models", headers={"host": host}).status_code == status


def ended(pid: int) -> bool:
    """Tell whether a process has ended, or waits for nothing but to be forgotten."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_worker_that_is_killed_ends_the_server(checkpoint: Path) -> None:
    """The process of the model dies: who waits gets an error, and the server ends with the code 5."""
    with serving(checkpoint) as server:
        asked = server.later(lambda: server.complete(max_tokens=500, ignore_eos=True))
        until(lambda: server.metric("num_requests_running") == 1)
        os.kill(process_of_model(server), signal.SIGKILL)
        assert asked.result().status_code in (500, 503)
        assert server.process.wait(60) == 5
        assert "the process of the worker has ended, with the status -9" in "".join(server.log)


def test_a_worker_that_hangs_ends_the_server(checkpoint: Path) -> None:
    """A step in the process of the model never ends: who waits gets an error, and server and worker end."""
    with serving(checkpoint, "--server.step_seconds", "1") as server:
        worker = process_of_model(server)
        asked = server.later(lambda: server.complete(max_tokens=500, ignore_eos=True))
        until(lambda: server.metric("num_requests_running") == 1)
        os.kill(worker, signal.SIGSTOP)
        assert asked.result().status_code == 503
        assert server.process.wait(60) == 5
        assert any("has taken longer than 1 seconds" in line for line in server.log)
        until(lambda: ended(worker))


def test_signals_are_for_the_server(checkpoint: Path) -> None:
    """Signals to the whole group let what runs finish; the worker ends with the server, also where that is killed."""
    with serving(checkpoint, "--server.drain_seconds", "300") as server:
        worker = process_of_model(server)
        asked = server.later(lambda: server.complete(max_tokens=500, ignore_eos=True))
        until(lambda: server.metric("num_requests_running") == 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker, number)
        server.process.send_signal(signal.SIGTERM)
        assert asked.result().json()["usage"]["completion_tokens"] == 500
        assert server.process.wait(60) == 0
        assert ended(worker)
    with serving(checkpoint) as server:
        worker = process_of_model(server)
        server.process.kill()
        until(lambda: ended(worker))
