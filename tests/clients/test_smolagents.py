"""The model of smolagents for servers like OpenAI's."""

from __future__ import annotations

from typing import Any

from smolagents import OpenAIServerModel, tool
from smolagents.models import ChatMessage, MessageRole
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, Pet

QUESTION = {"role": "user", "content": [{"type": "text", "text": TEXT}]}


@tool
def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: its name.
    """
    return f"It is sunny in {city}."


def model(base_url: str, **options: Any) -> OpenAIServerModel:
    given = {"temperature": 0, "max_tokens": TOKENS, **options}
    return OpenAIServerModel(MODEL, api_base=base_url, api_key="none", **given)


def test_two_turns(base_url: str) -> None:
    """The message of an answer goes back, and a second answer comes."""
    chat = model(base_url)
    first = chat.generate([QUESTION])
    next_one = ChatMessage(MessageRole.USER, [{"type": "text", "text": "And in Rome?"}])
    answer = ChatMessage(MessageRole.ASSISTANT, [{"type": "text", "text": first.content}])
    assert chat.generate([QUESTION, answer, next_one]).content


def test_tools(base_url: str) -> None:
    """A call is forced, as smolagents always does, and runs."""
    answer = model(base_url, max_tokens=CALL_TOKENS).generate(
        [QUESTION], tools_to_call_from=[weather]
    )
    (call,) = model(base_url).parse_tool_calls(answer).tool_calls
    assert call.function.name == "weather"
    assert "It is sunny" in weather(**call.function.arguments)


def test_structured_output(base_url: str) -> None:
    """A JSON schema is the form of an answer."""
    schema = {"name": "pet", "schema": Pet.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    answer = model(base_url, max_tokens=CALL_TOKENS).generate([QUESTION], response_format=form)
    assert Pet.model_validate_json(answer.content)


def test_streams(base_url: str) -> None:
    """The parts of a stream are the text of the whole answer, and the usage comes last."""
    chat = model(base_url)
    parts = list(chat.generate_stream([QUESTION]))
    assert "".join(part.content or "" for part in parts) == chat.generate([QUESTION]).content
    assert parts[-1].token_usage.output_tokens <= TOKENS
