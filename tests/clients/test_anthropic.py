"""The official client of Anthropic."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from support.client_questions import (
    CALL_TOKENS,
    MODEL,
    NEXT,
    QUESTION,
    TOKENS,
    City,
    Pet,
    get_weather,
)

GREEDY = {"temperature": 0}
GIVEN: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "extra_body": GREEDY}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": get_weather.__doc__,
    "input_schema": City.model_json_schema(),
}


@pytest.fixture
def client(server: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)


def test_two_turns(client: anthropic.Anthropic) -> None:
    """The content of an answer goes back as it is, and a second answer comes."""
    messages: list[Any] = [QUESTION]
    first = client.messages.create(messages=messages, **GIVEN)
    messages += [{"role": "assistant", "content": first.content}, NEXT]
    second = client.messages.create(messages=messages, system="Be brief.", **GIVEN)
    assert second.content[0].type == "text"
    assert second.content[0].text


def test_tools(client: anthropic.Anthropic) -> None:
    """A forced call has input of the schema, and its result goes back."""
    messages: list[Any] = [QUESTION]
    given = {**GIVEN, "tools": [TOOL], "max_tokens": CALL_TOKENS}
    first = client.messages.create(messages=messages, tool_choice={"type": "any"}, **given)
    (call,) = first.content
    assert first.stop_reason == "tool_use"
    assert call.type == "tool_use"
    result = get_weather(**call.input)
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}],
        },
    ]
    given["max_tokens"] = TOKENS
    second = client.messages.create(messages=messages, tool_choice={"type": "none"}, **given)
    assert second.content


def test_structured_output(client: anthropic.Anthropic) -> None:
    """A class of pydantic comes back as an object."""
    given = {**GIVEN, "max_tokens": CALL_TOKENS}
    answer = client.messages.parse(messages=[QUESTION], output_format=Pet, **given)
    assert isinstance(answer.parsed_output, Pet)


def test_streams(client: anthropic.Anthropic) -> None:
    """The parts of a stream are the text of the whole answer, and so is the client's own sum."""
    whole = client.messages.create(messages=[QUESTION], **GIVEN)
    with client.messages.stream(messages=[QUESTION], **GIVEN) as stream:
        parts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(parts) > 2
    assert "".join(parts) == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_streamed_call(client: anthropic.Anthropic) -> None:
    """The input of a call arrives in parts, which the client reads into an object."""
    given = {**GIVEN, "tools": [TOOL], "max_tokens": CALL_TOKENS}
    choice: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=[QUESTION], tool_choice=choice, **given) as stream:
        final = stream.get_final_message()
    (call,) = final.content
    assert call.input["city"] in ("Paris", "Rome")


def test_counts_and_errors(client: anthropic.Anthropic) -> None:
    """The tokens of a prompt are counted as an answer counts them; errors are of the client's classes."""
    counted = client.messages.count_tokens(model=MODEL, messages=[QUESTION])
    usage = client.messages.create(messages=[QUESTION], **GIVEN).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(messages=[QUESTION], **{**GIVEN, "model": "other"})
