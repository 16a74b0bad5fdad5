"""Reasoning at the beginning of an answer is told apart, whole or as the answer grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from opgraft.serving.server.reasoning import ReasoningReader
from support.servers import TEMPLATE, Server, error_of, serving


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("why\n</think>\n\nso", True, "why", "so"),
        ("<think>\nwhy</think>so", True, "why", "so"),
        ("\n<think></think>so", False, "", "so"),
        ("<think>why", False, "why", ""),
        ("why </thin", True, "why </thin", ""),
        ("<thin so", False, "", "<thin so"),
        ("a <think> b </think>", False, "", "a <think> b </think>"),
        ("<", False, "", "<"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_answer(text: str, opened: bool, reasoning: str, answer: str) -> None:
    """Each growing text adds to what was told, and nothing is taken back."""
    assert ReasoningReader(opened).split(text, ended=True) == (reasoning, answer)
    reader = ReasoningReader(opened)
    told = ["", ""]
    for end in range(len(text) + 1):
        parts = reader.split(text[:end], ended=False)
        for place, part in enumerate(parts):
            assert part.startswith(told[place])
        told = list(parts)
    ended = reader.split(text, ended=True)
    assert ended == (reasoning, answer)
    assert all(whole.startswith(part) for whole, part in zip(ended, told, strict=True))


@pytest.fixture(scope="module")
def reasoner(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a template that begins each answer with reasoning. It never ends here."""
    template = tmp_path_factory.mktemp("templates") / "reasoning.jinja"
    effort = "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    budget = "{% if thinking_budget %}{{ thinking_budget }}{% endif %}"
    template.write_text(
        TEMPLATE + effort + budget + "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    with serving(checkpoint, "--chat-template", str(template)) as running:
        yield running


def test_every_interface_has_the_reasoning(reasoner: Server) -> None:
    """A chat has ``reasoning_content``, a response an item, a message a block; streams have the same."""
    message = reasoner.chat().json()["choices"][0]["message"]
    reasoning = message["reasoning_content"]
    assert reasoning
    assert message["content"] == ""
    chunks = reasoner.chat(stream=True).text.split("\n\n")
    deltas = [
        json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"]
        for chunk in chunks
        if chunk.startswith("data: {")
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning

    given = {"model": reasoner.model, "temperature": 0}
    body = {**given, "input": "the cat", "max_output_tokens": 5}
    response = reasoner.openai.responses.create(**body)
    (item,) = response.output
    assert (item.type, item.content[0].text) == ("reasoning", reasoning)
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    events = list(reasoner.openai.responses.create(**body, stream=True))
    parts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(parts) == reasoning

    messages = [{"role": "user", "content": "the cat"}]
    anthropic = reasoner.post("/v1/messages", **given, messages=messages, max_tokens=5).json()
    (block,) = anthropic["content"]
    assert (block["type"], block["thinking"]) == ("thinking", reasoning)


def test_no_effort_is_no_thinking(recorder: Server) -> None:
    """Templates of Qwen's kind read another value than the effort."""
    body = {"input": "the cat", "max_output_tokens": 5}
    plain = recorder.post("/v1/responses", **body).json()["usage"]["input_tokens"]
    without = recorder.post("/v1/responses", **body, reasoning={"effort": "none"}).json()
    assert without["usage"]["input_tokens"] > plain
    chat = recorder.chat(reasoning_effort="none").json()
    assert chat["usage"]["prompt_tokens"] == without["usage"]["input_tokens"]
    messages = [{"role": "user", "content": "the cat"}]
    count = {"messages": messages, "output_config": {"effort": "none"}}
    counted = recorder.post("/v1/messages/count_tokens", **count).json()
    assert counted["input_tokens"] == without["usage"]["input_tokens"]


def test_the_effort_reaches_the_template(reasoner: Server) -> None:
    """Each interface has a field for it, and the prompt grows by the word."""
    plain = reasoner.chat().json()["usage"]["prompt_tokens"]
    chat = reasoner.chat(reasoning_effort="high").json()["usage"]["prompt_tokens"]
    assert chat > plain
    given = {"model": reasoner.model, "max_output_tokens": 5, "input": "the cat"}
    response = reasoner.openai.responses.create(**given, reasoning={"effort": "high"})
    assert response.usage.input_tokens == chat
    messages = [{"role": "user", "content": "the cat"}]
    body = {"model": reasoner.model, "messages": messages, "output_config": {"effort": "high"}}
    counted = reasoner.post("/v1/messages/count_tokens", **body)
    assert counted.json() == {"input_tokens": chat}


def test_the_budget_reaches_the_template(reasoner: Server, server: Server) -> None:
    """The most tokens of reasoning are a value of the template; a template without a place for them refuses."""
    plain = reasoner.chat().json()["usage"]["prompt_tokens"]
    chat = reasoner.chat(thinking_token_budget=512).json()["usage"]["prompt_tokens"]
    assert chat > plain
    body = {
        "messages": [{"role": "user", "content": "the cat"}],
        "thinking": {"type": "enabled", "budget_tokens": 512},
    }
    counted = reasoner.post("/v1/messages/count_tokens", **body)
    assert counted.json() == {"input_tokens": chat}
    refused = error_of(server.chat(thinking_token_budget=512))
    assert (refused["param"], refused["code"]) == ("thinking_token_budget", "unsupported_value")
    assert server.post("/v1/messages/count_tokens", **body).status_code == 200


def test_a_form_leaves_no_room_for_reasoning(reasoner: Server) -> None:
    """An answer that is held to a form is the content."""
    pytest.importorskip("llguidance")
    message = reasoner.chat(guided_choice=["yes", "no"]).json()["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert "reasoning_content" not in message
