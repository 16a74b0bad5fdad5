"""DSPy, over litellm, and over its own client for a provider that the user declares."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import dspy
import pytest
from dspy import lm15
from support.client_docs import block
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, get_weather


class Kind(dspy.Signature):
    """Tell the kind of a pet."""

    pet: str = dspy.InputField()
    kind: Literal["cat", "dog"] = dspy.OutputField()


def model(base_url: str, tokens: int) -> dspy.LM:
    return dspy.LM(
        f"openai/{MODEL}",
        api_base=base_url,
        api_key="none",
        temperature=0,
        max_tokens=tokens,
        num_retries=0,
        cache=False,
    )


def test_two_turns(base_url: str) -> None:
    """A second answer comes after a history."""
    chat = model(base_url, TOKENS)
    messages = [{"role": "user", "content": TEXT}]
    (first,) = chat(messages=messages)
    text = first if isinstance(first, str) else first["text"]
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And in Rome?"},
    ]
    assert chat(messages=messages)


def test_structured_output(base_url: str) -> None:
    """The adapter for JSON gets the fields of a signature."""
    with dspy.context(lm=model(base_url, CALL_TOKENS), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Kind)(pet="It barks.").kind in ("cat", "dog")


class Ask(dspy.Signature):
    """Answer with a call."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


@pytest.fixture
def declared(server: str) -> Iterator[str]:
    """The model of a provider that is declared as in the docs."""
    namespace: dict[str, Any] = {}
    exec(block("from dspy import lm15", server), namespace)  # noqa: S102  # of the docs
    yield f"opgraft/{MODEL}"
    lm15.unregister_provider("opgraft")


def test_tools(declared: str) -> None:
    """A forced call has arguments of the tool."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": CALL_TOKENS, "cache": False}
    chat = dspy.LM(declared, tool_choice="required", **options)
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=chat, adapter=adapter):
        answer = dspy.Predict(Ask)(question=TEXT, tools=[dspy.Tool(get_weather)])
    (call,) = answer.calls.tool_calls
    assert "It is sunny" in get_weather(**call.args)


def test_streams(base_url: str) -> None:
    """The parts of a stream add up to the form of the signature."""

    async def ask() -> list[Any]:
        program = dspy.streamify(dspy.Predict(Kind))
        with dspy.context(lm=model(base_url, CALL_TOKENS), adapter=dspy.JSONAdapter()):
            return [part async for part in program(pet="It barks.")]

    *parts, answer = asyncio.run(ask())
    assert len(parts) > 2
    assert answer.kind in ("cat", "dog")
