"""Choices among functions: some of them allowed, and OpenAI's older form of functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.servers import Server, error_of

pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """Return the choice among some functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chunks_of(server: Server, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of the chunks of a stream."""
    lines = server.chat(**body, stream=True).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(each)["choices"][0] for each in data if each != "[DONE]"]


@pytest.mark.parametrize("name", ["weather", "clock"])
def test_a_call_of_an_allowed_function(server: Server, name: str) -> None:
    """With the mode "required", the answer calls an allowed function."""
    asked = {"tools": TOOLS, "tool_choice": allowed("required", name), "max_tokens": 200}
    (choice,) = server.chat(**asked).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == name


def test_only_allowed_functions_reach_the_template(server: Server) -> None:
    """With the mode "auto", the request is like one with these tools alone."""
    some = server.chat(tools=TOOLS, tool_choice=allowed("auto", "clock")).json()
    alone = server.chat(tools=TOOLS[1:]).json()
    assert some["choices"] == alone["choices"]
    assert some["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_an_allowed_function_of_responses(server: Server) -> None:
    """The other interface of OpenAI has the same choice in a flat form."""
    choice = {"mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    asked = {
        "input": "the cat",
        "tools": [{"type": "function", **function} for function in (WEATHER, CLOCK)],
        "tool_choice": {"type": "allowed_tools", **choice},
        "max_output_tokens": 200,
    }
    answer = server.post("/v1/responses", model=server.model, **asked).json()
    assert [item["name"] for item in answer["output"]] == ["clock"]
    assert answer["tool_choice"] == asked["tool_choice"]


@pytest.mark.parametrize("choice", [{"name": "weather"}, "auto"], ids=["named", "auto"])
def test_functions_in_the_older_form(server: Server, choice: Any) -> None:
    """Answers are those to tools, in the older form; the parts of a stream add up to the call."""
    named = {"type": "function", "function": {"name": "weather"}}
    newer = {"tools": TOOLS, "tool_choice": "auto" if choice == "auto" else named}
    (expected,) = server.chat(**newer, max_tokens=200).json()["choices"]
    older = {"functions": [WEATHER, CLOCK], "function_call": choice, "max_tokens": 200}
    (found,) = server.chat(**older).json()["choices"]
    calls = expected["message"].pop("tool_calls", [])
    function = found["message"].pop("function_call", None)
    assert found["message"] == expected["message"]
    assert function == (calls[0]["function"] if calls else None)
    if choice != "auto":
        assert found["finish_reason"] == "function_call"
        assert json.loads(function["arguments"])["city"] in ("Rome", "Oslo")
        chunks = chunks_of(server, **older)
        parts = [each["delta"].get("function_call", {}) for each in chunks]
        assert [part["name"] for part in parts if "name" in part] == ["weather"]
        assert "".join(part.get("arguments", "") for part in parts) == function["arguments"]
        assert chunks[-1]["finish_reason"] == "function_call"


def test_no_function_in_the_older_form(server: Server) -> None:
    """With the choice "none", the model knows no function."""
    none = server.chat(functions=[WEATHER], function_call="none").json()
    assert none["choices"] == server.chat().json()["choices"]
    assert server.chat(functions=[], function_call="auto").status_code == 200


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "fly")},
            "tool_choice",
            "allows the function 'fly', which the request does not have: known: ",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("any", "clock")},
            "tool_choice.allowed_tools.mode",
            "expected 'auto' or 'required'",
        ),
        (
            {"functions": [WEATHER], "function_call": {"name": "fly"}},
            "function_call",
            "function_call asks for the function 'fly', which the request does not have: known: weather",
        ),
        (
            {
                "functions": [{"name": "f", "parameters": {"type": 5}}],
                "function_call": {"name": "f"},
            },
            "functions[0].parameters",
            "",
        ),
        (
            {"tools": TOOLS, "functions": [WEATHER]},
            "functions",
            "is the older name of tools: leave one of the two out",
        ),
        ({"functions": [WEATHER], "tool_choice": "none"}, "tool_choice", "needs tools"),
        ({"function_call": {"name": "f"}}, "function_call", "needs functions"),
        ({"tools": TOOLS, "function_call": "none"}, "function_call", "needs functions"),
    ],
    ids=range(8),
)
def test_choices_that_cannot_be_followed(
    server: Server, body: dict[str, Any], field: str, message: str
) -> None:
    """The error is about the field that the client has written."""
    response = server.chat(**body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field
    assert message in error_of(response)["message"]


def test_a_faulty_function_is_told_by_its_own_number(server: Server) -> None:
    """The number counts all tools of the request, and not the allowed ones alone."""
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}
    response = server.chat(tools=[*TOOLS, broken], tool_choice=allowed("required", "f"))
    assert error_of(response)["param"] == "tools[2].function.parameters"
