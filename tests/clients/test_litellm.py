"""litellm, as its provider of vLLM servers."""

from __future__ import annotations

import json
from typing import Any

import litellm
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


@pytest.fixture
def given(base_url: str) -> dict[str, Any]:
    return {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": TOKENS,
        "num_retries": 0,
    }


def test_two_turns(given: dict[str, Any]) -> None:
    """The message of an answer goes back with the fields that litellm adds."""
    messages: list[Any] = [QUESTION]
    first = litellm.completion(messages=messages, **given)
    messages += [first.choices[0].message, NEXT]
    assert litellm.completion(messages=messages, **given).choices[0].message.content


def test_tools(given: dict[str, Any]) -> None:
    """A forced call has arguments of the schema, and its result goes back."""
    messages: list[Any] = [QUESTION]
    asked = {**given, "tools": [TOOL], "tool_choice": "required", "max_tokens": CALL_TOKENS}
    message = litellm.completion(messages=messages, **asked).choices[0].message
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    given |= {"tools": [TOOL], "tool_choice": "none"}
    assert litellm.completion(messages=messages, **given).choices[0].message.content


def test_structured_output(given: dict[str, Any]) -> None:
    """A class of pydantic is the form of an answer."""
    given["max_tokens"] = CALL_TOKENS
    answer = litellm.completion(messages=[QUESTION], response_format=Pet, **given)
    assert Pet.model_validate_json(answer.choices[0].message.content)


def test_streams(given: dict[str, Any]) -> None:
    """The parts of a stream are the text of the whole answer."""
    whole = litellm.completion(messages=[QUESTION], **given)
    stream = litellm.completion(messages=[QUESTION], stream=True, **given)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == whole.choices[0].message.content


def test_a_prompt_that_is_too_long(given: dict[str, Any]) -> None:
    """litellm recognizes the error, so that a chat can be shortened."""
    long = {"role": "user", "content": "word " * 9000}
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length"):
        litellm.completion(messages=[long], **given)
