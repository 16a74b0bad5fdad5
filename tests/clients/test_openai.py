"""The official client of OpenAI."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.client_questions import (
    CALL_TOKENS,
    MODEL,
    NEXT,
    QUESTION,
    TOKENS,
    TOOL,
    Pet,
    get_weather,
)

GIVEN: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS}
CALL: dict[str, Any] = {**GIVEN, "tools": [TOOL], "max_tokens": CALL_TOKENS}


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def test_two_turns(client: openai.OpenAI) -> None:
    """The message of an answer goes back as it is, and a second answer comes."""
    messages: list[Any] = [QUESTION]
    first = client.chat.completions.create(messages=messages, **GIVEN)
    messages += [first.choices[0].message, NEXT]
    second = client.chat.completions.create(messages=messages, **GIVEN)
    assert second.choices[0].message.content
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_tools(client: openai.OpenAI) -> None:
    """A forced call has arguments of the schema, and its result goes back."""
    messages: list[Any] = [QUESTION]
    first = client.chat.completions.create(messages=messages, tool_choice="required", **CALL)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    given = {**CALL, "max_tokens": TOKENS}
    second = client.chat.completions.create(messages=messages, tool_choice="none", **given)
    assert second.choices[0].message.content


def test_structured_output(client: openai.OpenAI) -> None:
    """A class of pydantic comes back as an object."""
    given = {**GIVEN, "max_tokens": CALL_TOKENS}
    answer = client.chat.completions.parse(messages=[QUESTION], response_format=Pet, **given)
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_streams(client: openai.OpenAI) -> None:
    """The parts of a stream are the text of the whole answer."""
    whole = client.chat.completions.create(messages=[QUESTION], **GIVEN)
    stream = client.chat.completions.create(messages=[QUESTION], stream=True, **GIVEN)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(parts) > 2
    assert "".join(parts) == whole.choices[0].message.content


def test_events_of_a_streamed_call(client: openai.OpenAI) -> None:
    """The helper for streams tells the end of the arguments of a call."""
    with client.chat.completions.stream(
        messages=[QUESTION], tool_choice="required", **CALL
    ) as stream:
        kinds = {event.type for event in stream}
    assert "tool_calls.function.arguments.done" in kinds


RESPONSE: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": TOKENS}
FUNCTION: dict[str, Any] = {"type": "function", **TOOL["function"]}


def test_two_turns_of_responses(client: openai.OpenAI) -> None:
    """The server keeps the first turn, or the output goes back as items."""
    first = client.responses.create(input=QUESTION["content"], **RESPONSE)
    given = {"input": [NEXT], "previous_response_id": first.id}
    kept = client.responses.create(**given, **RESPONSE)
    sent = client.responses.create(input=[QUESTION, *first.output, NEXT], **RESPONSE)
    assert kept.output_text == sent.output_text
    assert kept.usage.input_tokens > first.usage.input_tokens


def test_tools_of_responses(client: openai.OpenAI) -> None:
    """A forced call has arguments of the schema, and its result goes back."""
    given = {**RESPONSE, "max_output_tokens": CALL_TOKENS, "tools": [FUNCTION]}
    first = client.responses.create(input=[QUESTION], tool_choice="required", **given)
    (call,) = first.output
    result = get_weather(**json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    given["max_output_tokens"] = TOKENS
    second = client.responses.create(
        input=[output], previous_response_id=first.id, tool_choice="none", **given
    )
    assert second.output_text


def test_structured_output_of_responses(client: openai.OpenAI) -> None:
    """A class of pydantic comes back as an object."""
    given = {**RESPONSE, "max_output_tokens": CALL_TOKENS}
    answer = client.responses.parse(input=[QUESTION], text_format=Pet, **given)
    assert isinstance(answer.output_parsed, Pet)


def test_streams_of_responses(client: openai.OpenAI) -> None:
    """The client's own sum of the events is the whole answer."""
    given = {**RESPONSE, "max_output_tokens": CALL_TOKENS}
    whole = client.responses.parse(input=[QUESTION], text_format=Pet, **given)
    with client.responses.stream(input=[QUESTION], text_format=Pet, **given) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(parts) == whole.output_text
    assert final.output_parsed == whole.output_parsed
