"""Haystack's generator for chats."""

from __future__ import annotations

import json
from typing import Any

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, City, Pet, get_weather

QUESTION = ChatMessage.from_user(TEXT)


def generator(base_url: str, **options: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        api_base_url=base_url,
        model=MODEL,
        max_retries=0,
        generation_kwargs={"temperature": 0, "max_tokens": TOKENS, **options},
    )


def test_two_turns(base_url: str) -> None:
    """The message of an answer goes back, and a second answer comes."""
    chat = generator(base_url)
    (first,) = chat.run([QUESTION])["replies"]
    (second,) = chat.run([QUESTION, first, ChatMessage.from_user("And in Rome?")])["replies"]
    assert second.text


def test_tools(base_url: str) -> None:
    """A forced call has arguments of the schema, and its result goes back."""
    tool = Tool("get_weather", "Weather of a city", City.model_json_schema(), get_weather)
    calling = generator(base_url, tool_choice="required", max_tokens=CALL_TOKENS)
    (first,) = calling.run([QUESTION], tools=[tool])["replies"]
    result = tool.invoke(**first.tool_call.arguments)
    history = [QUESTION, first, ChatMessage.from_tool(result, first.tool_call)]
    (second,) = generator(base_url).run(history)["replies"]
    assert second.text


def test_structured_output(base_url: str) -> None:
    """A class of pydantic is the form of an answer."""
    chat = generator(base_url, response_format=Pet, max_tokens=CALL_TOKENS)
    (answer,) = chat.run([QUESTION])["replies"]
    assert Pet.model_validate(json.loads(answer.text))


def test_streams(base_url: str) -> None:
    """The parts of a stream are the text of the whole answer."""
    parts: list[str] = []
    chat = generator(base_url)
    chat.run([QUESTION], streaming_callback=lambda part: parts.append(part.content))
    (whole,) = chat.run([QUESTION])["replies"]
    assert "".join(parts) == whole.text
