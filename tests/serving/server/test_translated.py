"""Other interfaces than chats end streams, refuse keys and count work as chats do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opgraft.serving.server.translated import spelled
from support.servers import Server, expect_idle, serving


@pytest.fixture(scope="module")
def hurried(checkpoint: Path) -> Iterator[Server]:
    """A server with a key whose steps take 50 ms, and which gives a request one second."""
    options = ("--api-key", "k", "--server.request_seconds", "1")
    with serving(checkpoint, *options, step_seconds=0.05) as running:
        running.key = "k"
        running.chat(max_tokens=1)  # the first chat starts the process of templates
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


def test_a_response_belongs_to_a_key(checkpoint: Path, tmp_path: Path) -> None:
    """Another key cannot read, continue or delete it, and its id is not the id in the log."""
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with serving(checkpoint, "--api-key-file", str(keys)) as server:
        server.key = "first"
        body = {"input": "the cat", "max_output_tokens": 2}
        answer = server.post("/v1/responses", **body)
        name = answer.json()["id"]
        assert answer.headers["x-request-id"] not in name
        assert server.get(f"/v1/responses/{name}").json() == answer.json()
        server.key = "second"
        assert server.get(f"/v1/responses/{name}").status_code == 404
        assert server.request("DELETE", f"/v1/responses/{name}").status_code == 404
        refused = server.post("/v1/responses", **body, previous_response_id=name)
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        server.key = "first"
        assert server.request("DELETE", f"/v1/responses/{name}").status_code == 200


def rows(*texts: str) -> list[dict[str, Any]]:
    return [{"token": text, "bytes": list(text.encode())} for text in texts]


def test_log_probabilities_beside_reasoning() -> None:
    """The tokens of the text have them, read at once or in parts; the others have none."""
    tokens = rows("<think>", "why ", "so", "</think>", "\n", "so", " it ", "is", "</s>")
    spelling, rest = spelled(tokens, "why so")
    assert [row["token"] for row in spelling] == ["why ", "so"]
    spelling, rest = spelled(rest, "so it is")
    assert [row["token"] for row in spelling] == ["so", " it ", "is"]
    assert [row["token"] for row in rest] == ["</s>"]
    partly = rows("\ufffd")
    assert spelled(partly, "ä") == (partly, [])


def test_keys(hurried: Server) -> None:
    """The header of Anthropic's clients is taken, and a wrong key is an error in their form."""
    body = {
        "model": hurried.model,
        "messages": [{"role": "user", "content": "the cat"}],
        "max_tokens": 2,
    }
    right, wrong = (
        hurried.request("POST", "/v1/messages", json=body, headers={"x-api-key": key})
        for key in ("k", "w")
    )
    assert right.status_code == 200
    assert wrong.status_code == 401
    assert wrong.json()["error"]["type"] == "authentication_error"
