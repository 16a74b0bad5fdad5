"""pydantic-ai: agents whose answers are texts, calls and forms."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput, capture_run_messages
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, Pet, get_weather

SHORT = ModelSettings(max_tokens=TOKENS, temperature=0)
LONG = ModelSettings(max_tokens=CALL_TOKENS, temperature=0)


@pytest.fixture
def model(base_url: str) -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))


def test_two_turns(model: OpenAIChatModel) -> None:
    """The history of a run goes back, and a second answer comes."""
    agent = Agent(model, model_settings=SHORT)
    first = agent.run_sync(TEXT)
    second = agent.run_sync("And in Rome?", message_history=first.all_messages())
    assert second.output
    assert len(second.all_messages()) == 4


def test_an_object_by_a_tool(model: OpenAIChatModel) -> None:
    """The type of the output is a tool that must be called."""
    agent = Agent(model, output_type=ToolOutput(Pet), model_settings=LONG)
    assert isinstance(agent.run_sync(TEXT).output, Pet)


def test_a_form_beside_tools(model: OpenAIChatModel) -> None:
    """The first answer to an agent with a tool and a form is a call, or has the form."""
    agent = Agent(model, output_type=NativeOutput(Pet), tools=[get_weather], model_settings=LONG)
    once = UsageLimits(request_limit=1)
    with capture_run_messages() as messages, contextlib.suppress(UsageLimitExceeded):
        agent.run_sync(TEXT, usage_limits=once)
    (part,) = messages[1].parts
    if isinstance(part, ToolCallPart):
        assert part.args_as_dict()["city"] in ("Paris", "Rome")
    else:
        assert Pet.model_validate_json(part.content)


def test_streams(model: OpenAIChatModel) -> None:
    """The last part of a stream is the whole answer."""
    agent = Agent(model, model_settings=SHORT)

    async def ask() -> list[str]:
        async with agent.run_stream(TEXT) as run:
            return [text async for text in run.stream_text(debounce_by=None)]

    whole = agent.run_sync(TEXT).output
    assert asyncio.run(ask())[-1] == whole
