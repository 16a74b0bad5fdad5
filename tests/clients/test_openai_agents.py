"""OpenAI's agents, over chat completions and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
import pytest
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, Pet, get_weather

SHORT = agents.ModelSettings(max_tokens=TOKENS, temperature=0)
LONG = agents.ModelSettings(max_tokens=CALL_TOKENS, temperature=0)
CALL = agents.ModelSettings(max_tokens=CALL_TOKENS, temperature=0, tool_choice="required")


MODELS = (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel)


@pytest.fixture(params=MODELS, ids=lambda kind: kind.__name__)
def model(base_url: str, request: pytest.FixtureRequest) -> Any:
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return request.param(MODEL, client)


def test_two_turns(model: Any) -> None:
    """The items of a run go back, and a second answer comes."""
    agent = agents.Agent("one", model=model, model_settings=SHORT)

    async def ask() -> str:
        first = await agents.Runner.run(agent, TEXT)
        items = [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}]
        second = await agents.Runner.run(agent, items)
        return str(second.final_output)

    assert asyncio.run(ask())


def test_tools(model: Any) -> None:
    """The agent calls its tool, and answers with the result in its history."""
    tool = agents.function_tool(get_weather)
    agent = agents.Agent("two", model=model, model_settings=CALL, tools=[tool])
    run = asyncio.run(agents.Runner.run(agent, TEXT))
    kinds = [item.type for item in run.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert "It is sunny" in str(run.new_items[1].output)


def test_a_form_beside_tools(model: Any) -> None:
    """The type of the output and a tool stand in one request: the answer is a call or the form."""
    agent = agents.Agent(
        "three",
        model=model,
        model_settings=LONG,
        tools=[agents.function_tool(get_weather)],
        output_type=Pet,
        tool_use_behavior="stop_on_first_tool",
    )
    answer = asyncio.run(agents.Runner.run(agent, TEXT)).final_output
    assert isinstance(answer, Pet) or answer.startswith("It is sunny")


# With responses, the library takes a stream that the length cuts off for a failure.
@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_streams(model: Any) -> None:
    """The parts of a stream are the final output."""
    agent = agents.Agent("four", model=model, model_settings=SHORT)

    async def ask() -> tuple[str, str]:
        run = agents.Runner.run_streamed(agent, TEXT)
        parts = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return "".join(parts), str(run.final_output)

    streamed, whole = asyncio.run(ask())
    assert streamed == whole
