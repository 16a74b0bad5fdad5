"""Other interfaces than chats end streams, refuse keys and count work as chats do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.processes import Server, expect_idle, serving


@pytest.fixture(scope="module")
def hurried(checkpoint: Path) -> Iterator[Server]:
    """A server with a key whose steps take 50 ms, and which gives a request one second."""
    options = ("--api-key", "k", "--server.request_seconds", "1")
    with serving(checkpoint, *options, step_seconds=0.05) as running:
        running.key = "k"
        yield running


def last_event(answer: httpx.Response) -> tuple[str, Any]:
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    return name, json.loads(data.removeprefix("data: "))


def test_the_end_of_a_stream_that_fails(hurried: Server) -> None:
    """The last event is the error, in the form of the interface, and the request is freed."""
    given = {"model": hurried.model, "stream": True, "ignore_eos": True}
    answer = hurried.post("/v1/responses", **given, input="the cat", max_output_tokens=400)
    name, told = last_event(answer)
    assert (name, told["type"], told["code"]) == ("event: error", "error", "timeout")
    assert told["sequence_number"] == answer.text.count("event: ") - 1
    messages = [{"role": "user", "content": "the cat"}]
    answer = hurried.post("/v1/messages", **given, messages=messages, max_tokens=400)
    name, told = last_event(answer)
    assert (name, told["error"]["type"]) == ("event: error", "timeout_error")
    expect_idle(hurried)


def test_keys(hurried: Server) -> None:
    """The header of Anthropic's clients is taken, and a wrong key is an error in their form."""
    url = f"{hurried.url}/v1/messages"
    body = {
        "model": hurried.model,
        "messages": [{"role": "user", "content": "the cat"}],
        "max_tokens": 2,
    }
    right = httpx.post(url, json=body, headers={"x-api-key": "k"}, timeout=60)
    assert right.status_code == 200
    wrong = httpx.post(url, json=body, headers={"x-api-key": "w"}, timeout=60)
    assert wrong.status_code == 401
    assert wrong.json()["error"]["type"] == "authentication_error"
