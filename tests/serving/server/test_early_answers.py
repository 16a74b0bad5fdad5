"""A server answers from the first moment, and says what it waits for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from opgraft.config import OpgraftConfig, ServerConfig
from opgraft.errors import ConfigError
from opgraft.serving.server.early_answers import EarlyAnswers
from support.servers import SETTINGS, WITHOUT_CERTIFICATES, error_of, until

SECONDS = 120


def settings(**given: Any) -> ServerConfig:
    return OpgraftConfig(server=ServerConfig(**given)).resolved().server


@pytest.fixture
def early() -> Iterator[EarlyAnswers]:
    with EarlyAnswers(settings(port=0, host="127.0.0.1")) as answers:
        yield answers


def ask(early: EarlyAnswers, method: str, path: str, **options: Any) -> httpx.Response:
    port = early.listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.request(method, url, verify=WITHOUT_CERTIFICATES, timeout=60, **options)


@pytest.mark.parametrize("path", ["/health", "/", "/v1/chat/completions", "/nowhere"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "PROPFIND"])
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


@pytest.mark.parametrize("size", [900_000, 8_000_000])
def test_a_large_body_gets_its_answer(early: EarlyAnswers, size: int) -> None:
    """A client whose body is not read would see a broken connection."""
    answer = ask(early, "POST", "/v1/completions", content=b"x" * size)
    assert answer.status_code == 503


def test_a_body_in_chunks_gets_its_answer(early: EarlyAnswers) -> None:
    answer = ask(early, "POST", "/v1/completions", content=iter([b"x" * 100_000] * 20))
    assert answer.status_code == 503


@pytest.mark.parametrize(
    "sent", [b"no request\r\n\r\n", b"\x16\x03\x01 hello\n", b"GET / HTTP/9\r\n\r\n"]
)
def test_other_bytes_get_the_same_answer(early: EarlyAnswers, sent: bytes) -> None:
    """The answer tells nothing of Python, as the answer of ``http.server`` would."""
    with socket.create_connection(early.listener.getsockname(), timeout=60) as client:
        client.sendall(sent)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "starting"
    assert b"ython" not in head


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_a_slow_client_holds_up_nobody(early: EarlyAnswers) -> None:
    with socket.create_connection(early.listener.getsockname()) as slow:
        slow.sendall(b"POST /hea")
        assert ask(early, "GET", "/health").status_code == 503


def test_a_request_that_does_not_come_is_given_up() -> None:
    impatient = settings(port=0, host="127.0.0.1", head_seconds=0.2, body_seconds=0.2)
    with (
        EarlyAnswers(impatient) as early,
        socket.create_connection(early.listener.getsockname(), timeout=60) as slow,
    ):
        slow.sendall(b"POST /hea")
        assert read_all(slow) == b""


def test_a_request_that_arrives_during_the_end_gets_its_answer(early: EarlyAnswers) -> None:
    with socket.create_connection(early.listener.getsockname(), timeout=60) as slow:
        slow.sendall(b"POST /hea")
        # A later client was taken, so the slow one was, too.
        assert ask(early, "GET", "/health").status_code == 503
        early.end()
        slow.sendall(b"lth HTTP/1.1\r\n\r\n")
        assert read_all(slow).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("round_", range(10))
def test_no_client_is_lost_at_the_end(early: EarlyAnswers, round_: int) -> None:
    """Each of the clients that keep coming gets the early answer, or waits for the server."""
    clients: list[socket.socket] = []
    coming = threading.Thread(target=come, args=(early.listener.getsockname(), clients))
    coming.start()
    until(lambda: len(clients) > 20 + round_)
    early.end()
    coming.join()
    with suppress(BlockingIOError):
        while True:
            waiting, _ = early.listener.accept()
            with waiting:
                waiting.sendall(b"of the server")
                waiting.shutdown(socket.SHUT_WR)
                waiting.recv(1 << 16)
    answers = set()
    for client in clients:
        with client:
            answers.add(read_all(client)[:13])
    assert answers <= {b"HTTP/1.1 503 ", b"of the server"}


def come(address: tuple[str, int], clients: list[socket.socket]) -> None:
    for _ in range(200):
        client = socket.create_connection(address, timeout=10)
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        clients.append(client)


def test_many_clients_get_their_answers(early: EarlyAnswers) -> None:
    """Each client has its connection before the first one asks."""
    with ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection(early.listener.getsockname(), timeout=60))
            for _ in range(200)
        ]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        for client in clients:
            assert read_all(client).startswith(b"HTTP/1.1 503 ")


def test_many_clients_wait_for_the_server(early: EarlyAnswers) -> None:
    """A short queue of the socket would leave later clients without a connection for seconds."""
    early.end()
    with ExitStack() as opened:
        for _ in range(200):
            opened.enter_context(socket.create_connection(early.listener.getsockname(), timeout=10))


@pytest.mark.parametrize(
    ("host", "asked"),
    [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")],  # noqa: S104  # closed in a moment
)
def test_addresses(host: str, asked: str) -> None:
    """An address of IPv6, and all addresses of the machine."""
    with EarlyAnswers(settings(port=0, host=host)) as early:
        port = early.listener.getsockname()[1]
        with socket.create_connection((asked, port), timeout=60) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert read_all(client).startswith(b"HTTP/1.1 503 ")


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
        EarlyAnswers(settings(port=port, host="127.0.0.1"))


def test_a_start_from_its_first_answer_to_the_model(checkpoint: Path) -> None:
    """A poller sees the phases of the start, and no gap between them and the model."""
    # A warm interpreter would have imported torch already.
    with starting([sys.executable], checkpoint) as (process, url):
        waits = list(_polled(process, url))
    assert waits[0] == "import torch"
    assert "load model" in waits
    assert waits[-1] == "ready"
    assert "refused" not in waits


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_start(checkpoint: Path, number: int) -> None:
    with starting([sys.executable], checkpoint) as (process, url):
        assert next(_polled(process, url)) == "import torch"
        process.send_signal(number)
        assert process.wait(30) == -number


def test_a_sigterm_ends_the_start_of_a_container(checkpoint: Path) -> None:
    """The kernel keeps signals without a handler from the first process of a container."""
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no process be the first of its namespace")
    with starting([*container, sys.executable], checkpoint) as (process, url):
        assert next(_polled(process, url)) == "import torch"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


@contextmanager
def starting(
    interpreter: list[str], checkpoint: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server, and yield its process and the URL of its health."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [part for name, value in SETTINGS.items() for part in (f"--{name}", value)]
    command = [*interpreter, "-m", "opgraft", "serve", str(checkpoint), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            yield process, f"http://127.0.0.1:{port}/health"
        finally:
            process.kill()


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
