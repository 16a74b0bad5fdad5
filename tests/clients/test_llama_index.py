"""LlamaIndex, as its model of servers like OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, Pet, get_weather


@pytest.fixture
def given(base_url: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "api_base": base_url,
        "api_key": "none",
        "is_chat_model": True,
        "temperature": 0,
        "max_retries": 0,
    }


def test_two_turns(given: dict[str, Any]) -> None:
    """The message of an answer goes back, and a second answer comes."""
    model = OpenAILike(max_tokens=TOKENS, **given)
    messages = [ChatMessage(TEXT)]
    messages += [model.chat(messages).message, ChatMessage("And in Rome?")]
    assert model.chat(messages).message.content


def test_tools(given: dict[str, Any]) -> None:
    """A model that must call runs the tool."""
    model = OpenAILike(max_tokens=CALL_TOKENS, is_function_calling_model=True, **given)
    tool = FunctionTool.from_defaults(get_weather)
    answer = model.chat_with_tools([tool], user_msg=TEXT, tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert "It is sunny" in str(tool(**call.tool_kwargs))


def test_structured_output(given: dict[str, Any]) -> None:
    """A class of pydantic comes back as an object."""
    model = OpenAILike(
        max_tokens=CALL_TOKENS,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        **given,
    )
    answer = model.as_structured_llm(Pet).complete(TEXT)
    assert isinstance(answer.raw, Pet)


def test_streams(given: dict[str, Any]) -> None:
    """The parts of a stream are the text of the whole answer."""
    model = OpenAILike(max_tokens=TOKENS, **given)
    messages = [ChatMessage(TEXT)]
    parts = [part.delta or "" for part in model.stream_chat(messages)]
    assert "".join(parts) == model.chat(messages).message.content
