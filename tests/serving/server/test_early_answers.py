"""A server answers from the first moment, and says what it waits for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opgraft.config import ServerConfig
from opgraft.errors import ConfigError
from opgraft.serving.server.early_answers import EarlyAnswers
from support.servers import PYTHON, SETTINGS, WITHOUT_CERTIFICATES, error_of

SECONDS = 120


@pytest.fixture
def early() -> Iterator[EarlyAnswers]:
    with EarlyAnswers(ServerConfig(port=0, host="127.0.0.1")) as answers:
        yield answers


def ask(early: EarlyAnswers, method: str, path: str, **options: Any) -> httpx.Response:
    port = early.listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.request(method, url, verify=WITHOUT_CERTIFICATES, timeout=60, **options)


@pytest.mark.parametrize("path", ["/health", "/", "/v1/chat/completions", "/nowhere"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_any_request_is_told_what_the_server_waits_for(
    early: EarlyAnswers, method: str, path: str
) -> None:
    first = ask(early, method, path)
    early.timeline.add("load model")
    second = ask(early, method, path)
    for answer, phase in ((first, "import torch"), (second, "load model")):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["content-type"] == "application/json"
        error = error_of(answer)
        assert error["code"] == "starting"
        assert f"the server is starting ({phase}, for 0." in error["message"]
    assert "server" not in {name.lower() for name in first.headers}


def test_a_client_of_anthropics_interface_gets_its_form(early: EarlyAnswers) -> None:
    answer = ask(early, "POST", "/v1/messages", json={"model": "m"})
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert answer.json()["type"] == "error"


def test_the_head_alone(early: EarlyAnswers) -> None:
    answer = ask(early, "HEAD", "/health")
    assert answer.status_code == 503
    assert int(answer.headers["content-length"]) > 0


def test_a_large_body_gets_its_answer(early: EarlyAnswers) -> None:
    """A client whose body is not read would see a broken connection."""
    answer = ask(early, "POST", "/v1/completions", content=b"x" * 900_000)
    assert answer.status_code == 503


def test_a_slow_client_holds_up_nobody(early: EarlyAnswers) -> None:
    with socket.create_connection(early.listener.getsockname()) as slow:
        slow.sendall(b"POST /health HTTP/1.1\r\ncontent-length: 100\r\n\r\n")
        assert ask(early, "GET", "/health").status_code == 503


def test_a_client_after_the_end_waits_for_the_server(early: EarlyAnswers) -> None:
    """The connection waits in the listening socket, which the server takes over."""
    early.end()
    with socket.create_connection(early.listener.getsockname(), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        early.listener.setblocking(True)
        accepted, _ = early.listener.accept()
        with accepted:
            assert accepted.recv(100).startswith(b"GET /health")


def test_a_port_that_is_taken_is_an_error_at_once(early: EarlyAnswers) -> None:
    port = early.listener.getsockname()[1]
    with pytest.raises(
        ConfigError, match=rf"cannot listen on 127.0.0.1, port {port}.*server\.port"
    ):
        EarlyAnswers(ServerConfig(port=port, host="127.0.0.1"))


def test_a_start_from_its_first_answer_to_the_model(checkpoint: Path) -> None:
    """A poller sees the phases of the start, and no gap between them and the model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [part for name, value in SETTINGS.items() for part in (f"--{name}", value)]
    command = [*PYTHON, "-m", "opgraft", "serve", str(checkpoint), "--port", str(port), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            waits = list(_polled(process, f"http://127.0.0.1:{port}/health"))
        finally:
            process.kill()
    assert waits[0] == "import torch"
    assert "load model" in waits
    assert waits[-1] == "ready"
    assert "refused" not in waits


def _polled(process: subprocess.Popen[bytes], url: str) -> Iterator[str]:
    """Yield what a server waits for, each phase once, to "ready"; "refused" after an answer."""
    end = time.monotonic() + SECONDS
    last = None
    while last != "ready":
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < end, f"the server waits for {last}"
        now = _phase(url)
        # Nobody listens before the first answer.
        if now != last and (last is not None or now != "refused"):
            yield now
            last = now
        time.sleep(0.01)


def _phase(url: str) -> str:
    try:
        answer = httpx.get(url, verify=WITHOUT_CERTIFICATES, timeout=60)
    except httpx.ConnectError:
        return "refused"
    if answer.status_code == 200:
        assert json.loads(answer.text) == {"status": "ready"}
        return "ready"
    message = str(error_of(answer)["message"])
    return message.partition("(")[2].partition(",")[0]
