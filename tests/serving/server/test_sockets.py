"""Clients that send slowly, too much, half, twice or no HTTP: each is answered or closed, and the others are served."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.servers import OpenClient, Server, error_of, expect_idle, serving, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(checkpoint: Path) -> Iterator[Server]:
    """A server with short times and small bodies."""
    limits = {
        "head_seconds": "1",
        "body_seconds": "2",
        "read_seconds": "2",
        "max_body_bytes": "100000",
        "max_connections": "100",
        "max_total_body_bytes": "250000",
        "max_total_logprobs": "1000000",
    }
    options = [part for name, value in limits.items() for part in (f"--server.{name}", value)]
    with serving(checkpoint, *options, step_seconds=0.02) as running:
        yield running
        assert running.process.poll() is None, "whatever came, the server runs"


@pytest.fixture(autouse=True)
def others_are_served(strict: Server) -> Iterator[None]:
    yield
    assert strict.complete(max_tokens=2).status_code == 200
    expect_idle(strict)


def connected(server: Server, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(30)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", httpx.URL(server.url).port))
    return connection


def request(server: Server, **body: object) -> bytes:
    """The bytes of a request for a completion."""
    content = json.dumps(
        {"model": server.model, "prompt": "the cat", "temperature": 0, **body}
    ).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(content) + content


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes, be it by a reset."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def expect_error(answer: bytes, status: int) -> str:
    """Expect one answer, an error of OpenAI's shape with an id."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"x-request-id: " in head
    return str(json.loads(body)["error"]["message"])


def test_slow_heads_and_bodies(strict: Server) -> None:
    """What does not come in time is 408, however many such clients there are; who sends nothing is closed."""
    heads = [connected(strict) for _ in range(50)]
    body, silent = connected(strict), connected(strict)
    for connection in heads:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-a: ")
    body.sendall(HEAD + b'content-length: 1000\r\n\r\n{"model"')
    for connection in heads:
        assert "did not come within 1 seconds" in expect_error(rest(connection), 408)
        connection.close()
    assert "did not come within 2 seconds" in expect_error(rest(body), 408)
    assert rest(silent) == b""
    body.close()
    silent.close()


def test_many_connections_at_once(strict: Server) -> None:
    """Beyond the limit they are told so and closed; when others have ended there is room again."""
    open_ones = [connected(strict) for _ in range(100)]
    with connected(strict) as refused:
        assert "100 connections are open" in expect_error(rest(refused), 503)
    for connection in open_ones:
        connection.close()
    until(lambda: strict.get("/health").status_code == 200)


def test_a_trickle_of_headers(strict: Server) -> None:
    """Bytes that come one by one buy no time."""
    with connected(strict) as connection:
        started = time.monotonic()
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            while time.monotonic() < started + 60:
                connection.sendall(b"a: b\r\n")
                time.sleep(0.1)
        except OSError:
            pass
        assert time.monotonic() < started + 30


@pytest.mark.parametrize(
    "flood", [b"a: b\r\n" * 300, b"a: " + b"b" * 100_000 + b"\r\n", b"cookie: " + b"c" * 10**7]
)
def test_floods_of_headers(strict: Server, flood: bytes) -> None:
    """Too many headers, or too long ones, are 431 as soon as they are."""
    with connected(strict) as connection:
        with contextlib.suppress(
            OSError
        ):  # closed before all was sent, which does not take the answer back
            connection.sendall(b"GET /health HTTP/1.1\r\n" + flood + b"\r\n")
        assert "larger than 65536 bytes or 200 headers" in expect_error(rest(connection), 431)


def test_a_long_address(strict: Server) -> None:
    """So is an address."""
    with connected(strict) as connection:
        connection.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert "larger than" in expect_error(rest(connection), 431)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"hello\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    ],
)
def test_what_is_no_http(strict: Server, garbage: bytes) -> None:
    """It is 400, once, and the connection is closed."""
    with connected(strict) as connection:
        connection.sendall(garbage)
        expect_error(rest(connection), 400)


def test_a_broken_body(strict: Server) -> None:
    """It closes the connection without a word, as whoever answers may have begun with it."""
    with connected(strict) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
        assert rest(connection) == b""


def test_bodies_beyond_the_limit(strict: Server) -> None:
    """They are 413, whether their length was told before or not, and the client reads the answer."""
    told = strict.send("/v1/completions", b"a" * 1_000_000)
    parts = (b"a" * 10_000 for _ in range(50))
    chunks = strict.request("POST", "/v1/completions", content=parts)
    for response in (told, chunks):
        assert response.status_code == 413
        assert "larger than 100000 bytes" in error_of(response)["message"]
    with connected(strict) as connection:
        connection.sendall(HEAD + b"content-length: 99999999\r\n\r\n" + b"a" * 1000)
        assert "larger than" in expect_error(rest(connection), 413), "it is not waited for the rest"


def test_many_bodies_at_once(strict: Server) -> None:
    """Together they have a limit, beyond which it is 429; those before are served, and their room comes back."""
    body = (
        json.dumps({"model": strict.model, "prompt": "a", "max_tokens": 1}).encode().ljust(99_000)
    )
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    connections = [connected(strict) for _ in range(3)]
    for connection in connections[:2]:
        connection.sendall(head + body[:-1])
    time.sleep(0.3)
    connections[2].sendall(head + body)
    refused = rest(connections[2])
    assert "the bodies of all requests" in expect_error(refused, 429)
    assert b"retry-after: 1" in refused
    for connection in connections[:2]:
        connection.sendall(body[-1:])
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert strict.send("/v1/completions", body).status_code == 200
    for connection in connections:
        connection.close()


def test_readers_that_stop_and_slow_ones(strict: Server) -> None:
    """Who does not read on is given up after a while; who reads slowly, and so for longer, gets the whole answer."""
    asked = {
        "prompt": [[5] * 400] * 8,
        "n": 8,
        "temperature": 1,
        "max_tokens": 1,
        "echo": True,
        "logprobs": 20,
    }
    with connected(strict, receive_buffer=4096) as stopped:
        stopped.sendall(request(strict, **asked))
        stopped.recv(1)  # its answer has begun, so its time passes while the other one reads
        with connected(strict, receive_buffer=1 << 16) as slow:
            slow.sendall(request(strict, **asked))
            head, _, body = slow.recv(1000).partition(b"\r\n\r\n")
            size, read = int(head.partition(b"content-length: ")[2].split()[0]), len(body)
            pauses = 0
            while part := slow.recv(1 << 15) if read < size else b"":
                read += len(part)
                # Four pauses take longer than the server waits for a reader that stops.
                if pauses < 4 and read > (pauses + 1) << 20:
                    pauses += 1
                    time.sleep(0.8)
        assert len(rest(stopped)) < size == read


@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave(strict: Server, how: str, stream: bool) -> None:
    """A client that closes, half closes or resets its connection has left: its request ends and frees the cache."""
    before = strict.metric("generation_tokens_total")
    with connected(strict) as connection:
        connection.sendall(request(strict, max_tokens=500, ignore_eos=True, stream=stream))
        until(lambda: strict.metric("num_requests_running") == 1)
        if how == "half":
            connection.shutdown(socket.SHUT_WR)
            rest(connection)
        elif how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    expect_idle(strict)
    assert strict.metric("generation_tokens_total") < before + 400


def test_a_request_behind_another(strict: Server) -> None:
    """A second request on a connection whose first is not answered is not served; that the client leaves is seen."""
    with connected(strict) as connection:
        connection.sendall(request(strict, max_tokens=3) * 2)
        assert rest(connection).count(b"HTTP/1.1 200") == 1
    before = strict.metric("generation_tokens_total")
    with connected(strict) as connection:
        connection.sendall(request(strict, max_tokens=500, ignore_eos=True) * 2)
        until(lambda: strict.metric("num_requests_running") == 1)
    expect_idle(strict)
    assert strict.metric("generation_tokens_total") < before + 400


def test_garbage_behind_a_request(strict: Server) -> None:
    """It ends the connection, without a second answer in the middle of the first."""
    with connected(strict) as connection:
        connection.sendall(request(strict, max_tokens=500, ignore_eos=True, stream=True))
        assert b"data: " in connection.recv(1 << 16) + connection.recv(1 << 16)
        connection.sendall(b"\x00\x00\x00garbage\r\n\r\n")
        assert b"HTTP/1.1" not in rest(connection)


def test_many_connections_one_after_the_other(strict: Server) -> None:
    """A connection may be used again, and one that asks for an answer before it sends its body gets it."""
    with OpenClient() as client:
        for _ in range(20):
            assert client.get(f"{strict.url}/health").status_code == 200
    body = json.dumps({"model": strict.model, "prompt": "a", "max_tokens": 1}).encode()
    with connected(strict) as connection:
        connection.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(body)
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
