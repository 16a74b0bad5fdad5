"""Fields that would be without effect beside others are errors that name them, and those that only look so are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from support.servers import Server, error_of, serving

FUNCTION = {"type": "function", "function": {"name": "f"}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "zebra"}}}
TEXT_WITH_SCHEMA = {**FORM, "type": "text"}
USER = {"role": "user", "content": "the cat"}


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (
            {"response_format": TEXT_WITH_SCHEMA},
            "response_format.json_schema",
            "needs the type json_schema",
        ),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_tokens",
            "older name of max_completion_tokens, and they differ",
        ),
        ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"priority": 1}, "priority", "set scheduler.policy to priority"),
        ({"metadata": {"a": 1}}, "metadata.a", "expected text"),
    ],
)
def test_chats(server: Server, body: dict[str, Any], field: str, message: str) -> None:
    """The field is named, and what to do about it."""
    response = server.chat(**body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize("name", ["tools", "add_generation_prompt", "chat_template_kwargs"])
def test_tokens_of_a_prompt(server: Server, name: str) -> None:
    """What is of chats has no place beside a prompt."""
    value = {"tools": [FUNCTION], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}[
        name
    ]
    response = server.post("/tokenize", prompt="a", **{name: value})
    assert error_of(response)["param"] == name
    assert server.post("/tokenize", messages=[USER], **{name: value}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [FUNCTION], "tool_choice": "none", "response_format": {"type": "json_object"}},
        {"tools": [FUNCTION], "response_format": {"type": "text"}, "parallel_tool_calls": False},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"stream_options": {"include_usage": True}, "max_tokens": 5, "max_completion_tokens": 5},
        {
            "tool_choice": "none",
            "priority": 0,
            "metadata": {"a": "b"},
            "user": "u",
            "functions": None,
            "audio": None,
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "x", "refusal": None, "annotations": []},
                USER,
            ]
        },
        {
            "messages": [
                {**USER, "tool_calls": None},
                {"role": "assistant", "reasoning_content": "hm"},
            ]
        },
        {
            "response_format": {"type": "text", "json_schema": None},
            "max_tokens": None,
            "max_completion_tokens": 5,
        },
    ],
)
def test_what_does_not_contradict(server: Server, body: dict[str, Any]) -> None:
    """Fields that have their effect, or ask for none, are taken; so is null for whatever there is not."""
    assert server.chat(**body).status_code == 200, server.chat(**body).text


def test_a_priority_where_it_counts(roomy: Server) -> None:
    """A server whose order is that of priorities takes them."""
    assert roomy.complete(max_tokens=2, priority=3).status_code == 200


@pytest.fixture(scope="module")
def roomy(checkpoint: Path) -> Iterator[Server]:
    """A server with room for schemas in its prompts, and an order by priorities."""
    longest = ("--model.max_model_len", "4096", "--cache.num_blocks", "2048")
    with serving(checkpoint, "--scheduler.policy", "priority", *longest) as running:
        yield running


class Street(BaseModel):
    """A street, and those that lead off it."""

    name: str
    crossings: list[Street] = []


class Address(BaseModel):
    """Where somebody lives."""

    street: Street


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Address"}}]
)
def test_functions_with_nested_parameters(roomy: Server, choice: Any) -> None:
    """References within the parameters of a function go on from them, those of several functions apart."""
    tools = [openai.pydantic_function_tool(Address), openai.pydantic_function_tool(Street)]
    ends = {'"': 100, "}": 50, "]": 50}  # so that texts and lists end at once
    brief = {
        str(roomy.post("/tokenize", prompt=text).json()["tokens"][0]): bias
        for text, bias in ends.items()
    }
    response = roomy.chat(tools=tools, tool_choice=choice, max_tokens=300, logit_bias=brief)
    assert response.status_code == 200, response.text
    (found,) = response.json()["choices"]
    (call,) = found["message"]["tool_calls"]
    known: dict[str, type[BaseModel]] = {"Address": Address, "Street": Street}
    assert known[call["function"]["name"]].model_validate_json(call["function"]["arguments"])


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {
            "$id": "https://example.com/x",
            "$defs": {"A": {"const": 1}},
            "properties": {"a": {"$ref": "#/$defs/A"}},
        },
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "definitions": {"A": {"type": "integer"}},
            "properties": {"a": {"$ref": "#/definitions/A"}},
        },
    ],
    ids=["itself", "its-own-identity", "draft-4"],
)
def test_parameters_that_refer_to_themselves(server: Server, parameters: dict[str, Any]) -> None:
    """They are taken as in a schema that stands alone."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert server.chat(tools=[tool], tool_choice="required").status_code == 200


def test_parameters_that_cannot_be_used(server: Server) -> None:
    """The error is of the tools, where the schema is."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/none"}}}
    error = error_of(server.chat(tools=[tool], tool_choice="required"))
    assert error["param"] == "tools[0].function.parameters"
    assert "'/$defs/none' does not exist" in error["message"]
    other = {"type": "function", "function": {"name": "g"}}
    assert error_of(server.chat(tools=[other, tool], tool_choice="required"))["param"] == "tools"
    named = {"type": "function", "function": {"name": "f"}}
    error = error_of(server.chat(tools=[other, tool], tool_choice=named))
    assert error["param"] == "tools[1].function.parameters"


def test_values_that_only_other_clients_send(server: Server) -> None:
    """A temperature of nearly 0 is greedy, a seed below 0 is one like others, and an empty suffix is none."""
    greedy = server.complete(max_tokens=8).json()["choices"]
    assert server.complete(max_tokens=8, temperature=1e-8, suffix="").json()["choices"] == greedy
    drawn = [
        server.complete(max_tokens=8, temperature=2, seed=seed).json()["choices"]
        for seed in (-1, -1, 1, -2)
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] not in drawn[2:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_scored(server: Server, stream: bool) -> None:
    """With an echo and no token of an answer, the log-probabilities are those of the prompt, and no token counts."""
    given: dict[str, Any] = {"prompt": "the cat sat", "echo": True, "logprobs": 1}
    whole = server.complete(**given, max_tokens=1).json()["choices"][0]["logprobs"]
    response = server.complete(**given, max_tokens=0)
    (choice,) = response.json()["choices"]
    assert choice["text"] == "the cat sat"
    assert choice["logprobs"]["token_logprobs"] == whole["token_logprobs"][:-1]
    assert response.json()["usage"]["completion_tokens"] == 0
    if stream:
        streamed = server.complete(**given, max_tokens=0, stream=True).text
        assert '"text":"the cat sat"' in streamed
        assert streamed.count('"token_logprobs":[null') == 1
    assert error_of(server.complete(max_tokens=0))["param"] == "max_tokens"
