"""Grammars that explode: an error of the client's making, which names the field, and nobody else waits for it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from support.servers import Server, error_of, expect_idle

ENDLESS = {"allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]}
"""A kilobyte whose compilation doubles with each pattern."""
WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(600)}}
"""More properties than the parser takes at one place."""
LATE = {
    "type": "object",
    "properties": {"a": WIDE},
    "required": ["a"],
    "additionalProperties": False,
}
"""The same, after some tokens."""


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"tools": [function], "tool_choice": "required"}


def expect_refused(response: httpx.Response, field: str, message: str) -> None:
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": form(ENDLESS)}, "response_format"),
        pytest.param(tool(ENDLESS), "tools[0].function.parameters", marks=pytest.mark.slow),
    ],
)
def test_an_endless_compilation(server: Server, asked: dict[str, Any], field: str) -> None:
    """It is ended, and meanwhile others are answered: with a schema that is known, and without any."""
    known = {"response_format": form({"enum": ["yes", "no"]})}
    assert server.chat(**known).status_code == 200
    refused = server.later(lambda: server.chat(**asked))
    time.sleep(1)
    assert server.chat(**known).status_code == 200
    assert server.complete(max_tokens=2).status_code == 200
    assert not refused.done()
    expect_refused(refused.result(), field, "cannot be compiled within 5 seconds")


@pytest.mark.parametrize("schema", [WIDE, LATE])
def test_an_explosion_on_the_way(server: Server, schema: dict[str, Any]) -> None:
    """A grammar that comes to a limit while an answer is generated is no failure of the server."""
    expect_refused(
        server.chat(max_tokens=200, response_format=form(schema)),
        "response_format",
        "items; max is",
    )
    with_status = server.chat(max_tokens=200, response_format=form(schema), stream=True)
    *_, last = [line for line in with_status.text.splitlines() if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert (with_status.status_code == 400) == (schema is WIDE), (
        "after the first token it is the last event"
    )
    expect_idle(server)


def test_grammars_that_are_kept_are_counted(server: Server) -> None:
    """Each once, however often it is asked for."""
    before = server.metric("grammars_kept")
    for answer in ("red", "green", "red"):
        assert server.chat(response_format=form({"const": answer})).status_code == 200
    assert server.metric("grammars_kept") == before + 2
