"""langchain-openai, and a graph of langgraph."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, Pet, get_weather


@pytest.fixture
def given(base_url: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "base_url": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }


def test_two_turns(given: dict[str, Any]) -> None:
    """The message of an answer goes back, and a second answer comes."""
    model = ChatOpenAI(max_tokens=TOKENS, **given)
    messages: list[Any] = [HumanMessage(TEXT)]
    messages += [model.invoke(messages), HumanMessage("And in Rome?")]
    answer = model.invoke(messages)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= TOKENS


def test_tools_in_a_graph(given: dict[str, Any]) -> None:
    """A graph calls the tool, and goes on with the result."""
    calling = ChatOpenAI(max_tokens=CALL_TOKENS, **given).bind_tools(
        [get_weather], tool_choice="any", strict=True
    )
    answering = ChatOpenAI(max_tokens=TOKENS, **given)

    def answer(state: MessagesState) -> dict[str, Any]:
        messages = state["messages"]
        model = answering if isinstance(messages[-1], ToolMessage) else calling
        return {"messages": [model.invoke(messages)]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    messages = graph.compile().invoke({"messages": [HumanMessage(TEXT)]})["messages"]
    kinds = [type(message) for message in messages]
    assert kinds == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert "It is sunny" in messages[2].content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(given: dict[str, Any], method: str) -> None:
    """A class of pydantic comes back as an object, by either method."""
    model = ChatOpenAI(max_tokens=CALL_TOKENS, **given)
    answer = model.with_structured_output(Pet, method=method).invoke(TEXT)
    assert isinstance(answer, Pet)


def test_streams(given: dict[str, Any]) -> None:
    """The parts of a stream are the text of the whole answer."""
    model = ChatOpenAI(max_tokens=TOKENS, **given)
    parts = [part.content for part in model.stream(TEXT)]
    assert "".join(parts) == model.invoke(TEXT).content


def test_streams_a_call(given: dict[str, Any]) -> None:
    """The parts of a call add up to a call."""
    model = ChatOpenAI(max_tokens=CALL_TOKENS, **given)
    bound = model.bind_tools([get_weather], tool_choice="any", strict=True)
    first, *parts = bound.stream(TEXT)
    for part in parts:
        first += part
    (call,) = first.tool_calls
    assert call["args"]["city"] in ("Paris", "Rome")
