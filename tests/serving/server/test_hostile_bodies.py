"""Bodies as large as the server takes, of every shape that is dear to read, are answered at once, and others too."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opgraft.serving.server.bodies import MOST_CONTAINERS
from support.servers import OpenClient, Server, error_of, expect_idle, worked

SIZE = 4 << 20
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ANSWER_SECONDS, OTHERS_SECONDS = 4.0, 1.0
"""Of the server's processor time, which other work on the machine does not change: for an answer, and while another
client waits. They are several times of what is measured; a body that is read without bounds takes minutes."""


def filled(item: str, last: str = "") -> str:
    """A list of as many items as there is room for."""
    return (
        "["
        + ",".join([item] * ((SIZE - 4096) // (len(item) + 1)))
        + (f",{last}" if last else "")
        + "]"
    )


def named(value: str) -> str:
    """An object of as many fields as there is room for."""
    count = (SIZE - 4096) // (len(value) + 11)
    return ",".join(f'"k{number:06}":{value}' for number in range(count))


def nested(opening: str, closing: str, depth: int = 100) -> str:
    return filled(opening * depth + "1" + closing * depth)


SHAPES: dict[str, tuple[str, Callable[[], str], str | None]] = {
    "ids-and-a-text": (COMPLETIONS, lambda: f'"prompt":{filled("1", TEXT)}', "prompt["),
    "ids": (COMPLETIONS, lambda: f'"prompt":{filled("1")}', "prompt"),
    "texts": (COMPLETIONS, lambda: f'"prompt":{filled(TEXT)}', "prompt"),
    "texts-and-an-id": (COMPLETIONS, lambda: f'"prompt":{filled(TEXT, "1")}', "prompt["),
    "lists-of-ids": (COMPLETIONS, lambda: f'"prompt":{filled("[1]")}', None),
    "empty-lists": (COMPLETIONS, lambda: f'"prompt":{filled("[]")}', None),
    "nested-lists": (COMPLETIONS, lambda: f'"prompt":{nested("[", "]")}', None),
    "nested-objects": (
        CHATS,
        lambda: f'"messages":[],"chat_template_kwargs":{{"a":{nested(BRACE, "}")}}}',
        None,
    ),
    "messages": (CHATS, lambda: f'"messages":{filled(MESSAGE)}', None),
    "wrong-messages": (CHATS, lambda: f'"messages":{filled("1")}', "messages[0]"),
    "unknown-fields": (CHATS, lambda: f'"messages":[],{named("1")}', "messages"),
    "unknown-nulls": (CHATS, lambda: f'"messages":[],{named("null")}', "messages"),
    "wrong-biases": (
        COMPLETIONS,
        lambda: f'"prompt":"a","logit_bias":{{{named("1e999")}}}',
        "logit_bias.k000000",
    ),
    "wrong-stop-ids": (
        COMPLETIONS,
        lambda: f'"prompt":"a","stop_token_ids":{filled(TEXT)}',
        "stop_token_ids[0]",
    ),
    "stop-ids": (
        COMPLETIONS,
        lambda: f'"prompt":"a","stop_token_ids":{filled("7")}',
        "stop_token_ids",
    ),
    "brackets-in-a-text": (COMPLETIONS, lambda: f'"prompt":"{"[{" * (SIZE // 2 - 99)}"', "prompt"),
    "input": ("/v1/embeddings", lambda: f'"input":{filled(TEXT, "1")}', "input["),
    "tokens": ("/detokenize", lambda: f'"tokens":{filled("1", TEXT)}', "tokens["),
    "fields-of-a-schema": (
        CHATS,
        lambda: (
            f'"messages":[],"tools":[{{"type":"function","function":{{"name":"f","parameters":{{{named("1")}}}}}}}]'
        ),
        "messages",
    ),
}
TEXT, BRACE, MESSAGE = '"a"', '{"a":', '{"role":"user","content":"a"}'


@contextmanager
def others(server: Server) -> Iterator[list[float]]:
    """Ask for the version all the while, and note how long the server works until each of these is answered."""
    waits: list[float] = []
    began, ended = threading.Event(), threading.Event()

    def ask() -> None:
        with OpenClient(timeout=60) as client:
            while not ended.is_set():
                started = worked(server)
                assert client.get(f"{server.url}/version").status_code == 200
                waits.append(worked(server) - started)
                began.set()
                time.sleep(0.005)

    asking = threading.Thread(target=ask)
    asking.start()
    assert began.wait(timeout=60)
    try:
        yield waits
    finally:
        ended.set()
        asking.join()


def memory(server: Server) -> int:
    """The most bytes that the server has had so far."""
    with open(f"/proc/{server.pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


@pytest.fixture(scope="module", autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """Afterwards nothing runs, requests are answered, and little memory was taken by all of it."""
    before = memory(server)
    yield
    expect_idle(server)
    assert server.complete(max_tokens=2).status_code == 200
    assert memory(server) - before < 400 << 20


@pytest.mark.parametrize("shape", SHAPES)
def test_large_bodies(server: Server, shape: str) -> None:
    """The answer comes at once and names one fault, and who asks for something else meanwhile is answered."""
    path, fields, field = SHAPES[shape]
    body = f'{{"model":"{server.model}",{fields()}}}'.encode()
    assert SIZE * 0.9 < len(body) <= SIZE
    with others(server) as waits:
        started = worked(server)
        response = server.send(path, body)
        taken = worked(server) - started
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"] or "").startswith(field or "")
    assert len(error["message"]) < 500
    assert taken < ANSWER_SECONDS
    assert max(waits) < OTHERS_SECONDS, f"{max(waits):.2f} s"


def test_lists_and_objects_are_counted_outside_of_texts(server: Server) -> None:
    """Brackets of texts are none, whatever stands before them; one container too many is told with the limit."""
    text = '[{\\"[' * MOST_CONTAINERS + "\\\\"
    response = server.send("/tokenize", f'{{"prompt":"{text}","tools":[{{}}]}}'.encode())
    assert error_of(response)["param"] == "tools[0].type"
    response = server.post("/tokenize", prompt="a", tools=[{}] * MOST_CONTAINERS)
    assert error_of(response)["message"].startswith(
        f"the body has {MOST_CONTAINERS + 2} lists and objects"
    )
    assert json.loads(response.text)["error"]["code"] == "limit_exceeded"


def test_several_large_bodies_at_once(server: Server) -> None:
    """They are read one after the other, and others are answered in between."""
    body: dict[str, Any] = {"model": server.model, "prompt": [1] * 1_900_000}
    content = json.dumps(body, separators=(",", ":")).encode()
    started = worked(server)
    assert server.send(COMPLETIONS, content).status_code == 400
    one = worked(server) - started
    with others(server) as waits:
        asked = [server.later(lambda: server.send(COMPLETIONS, content)) for _ in range(8)]
        assert [each.result().status_code for each in asked] == [400] * 8
    assert max(waits) < 6 * one, f"{max(waits):.2f} s, where one body takes {one:.2f} s"
