"""Calls are found in the text of an answer, whole or as it grows, in the forms that models write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opgraft.engine.sampling import Grammar, GrammarTokens
from opgraft.errors import HTTPError, RequestError
from opgraft.serving.server.protocol import ChatRequest
from opgraft.serving.server.tools import Call, Tools
from opgraft.serving.tokenizer import Tokenizer
from support.small_tokenizers import trained_tokenizer

HERMES = "{{ tools }} <tool_call>"
MISTRAL = "{{ tools }} [TOOL_CALLS]"
PLAIN = "{{ tools }}"
ROME = {"name": "weather", "arguments": {"city": "Rome"}}
OSLO = {"name": "weather", "arguments": {"city": "Oslo"}}


def tools(template: str, **body: Any) -> Tools:
    offered = [{"type": "function", "function": {"name": "weather"}}]
    given = {"model": "m", "messages": [], "tools": offered, **body}
    return Tools(ChatRequest.model_validate(given), template)


def wrapped(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "text", "cities", "plain"),
    [
        (HERMES, wrapped(ROME), ["Rome"], ""),
        (HERMES, f"I look.\n{wrapped(ROME)}\n{wrapped(OSLO)}", ["Rome", "Oslo"], "I look."),
        (HERMES, "No call, a < b.", [], "No call, a < b."),
        (HERMES, "<tool_call> is a word", [], "<tool_call> is a word"),
        (
            HERMES,
            wrapped({"name": "fly", "arguments": {}}),
            [],
            wrapped({"name": "fly", "arguments": {}}),
        ),
        (
            HERMES,
            '<tool_call>{"name": "weather", "argum',
            [],
            '<tool_call>{"name": "weather", "argum',
        ),
        (MISTRAL, f"[TOOL_CALLS]{json.dumps([ROME, OSLO])}", ["Rome", "Oslo"], ""),
        (PLAIN, json.dumps({"name": "weather", "parameters": {"city": "Rome"}}), ["Rome"], ""),
        (PLAIN, '{"city": "Rome"}', [], '{"city": "Rome"}'),
        (PLAIN, "Rome is sunny.", [], "Rome is sunny."),
        (PLAIN, "[1, 2]", [], "[1, 2]"),
    ],
)
def test_calls_and_text(template: str, text: str, cities: list[str], plain: str) -> None:
    """What is a call becomes one, all else stays text; a stream of the text has the same, and takes nothing back."""
    found = tools(template)
    assert found.calls(text) == [Call("weather", json.dumps({"city": city})) for city in cities]
    assert found.plain(text, ended=True) == plain
    told = ""
    for end in range(1, len(text) + 1):
        told += found.plain(text[:end], ended=False)[len(told) :]
    told += found.plain(text, ended=True)[len(told) :]
    assert told.rstrip() == plain


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
PARIS = {"name": "weather", "arguments": {"city": "Paris"}}


@pytest.mark.parametrize(
    ("template", "special", "taken", "refused"),
    [
        (
            HERMES,
            (),
            [wrapped(ROME), f"I look.\n{wrapped(ROME)}\n{wrapped(OSLO)}", "a < b", ""],
            wrapped(PARIS),
        ),
        (HERMES, ("<tool_call>",), [wrapped(ROME), "a < b"], wrapped(PARIS)),
        (
            MISTRAL,
            ("[TOOL_CALLS]",),
            [f"[TOOL_CALLS]{json.dumps([ROME, OSLO])}", "a"],
            f"[TOOL_CALLS]{[PARIS]}",
        ),
        (
            PLAIN,
            (),
            [json.dumps(ROME), json.dumps([OSLO]), "Rome is sunny.", ""],
            json.dumps(PARIS),
        ),
    ],
)
def test_calls_of_strict_functions_are_held_to_their_schema(
    template: str, special: tuple[str, ...], taken: list[str], refused: str
) -> None:
    """Whatever marks a call, it must fit; text beside it is free, and so are calls of functions that are not strict."""
    pytest.importorskip("llguidance")
    backend = trained_tokenizer()
    backend.add_special_tokens(list(special))
    strict = {
        "type": "function",
        "function": {"name": "weather", "parameters": CITY, "strict": True},
    }
    clock = {"type": "function", "function": {"name": "clock", "parameters": CITY}}
    spec = tools(template, tools=[strict, clock]).grammar(Tokenizer(Path(), backend).special_token)
    grammar = Grammar({"grammar": spec}, GrammarTokens(backend))
    free = refused.replace("weather", "clock")
    for text in [*taken, free.replace("'", '"')]:
        grammar.start(backend.encode(text, add_special_tokens=False).ids)
    with pytest.raises(RequestError, match="does not follow"):
        grammar.start(backend.encode(refused.replace("'", '"'), add_special_tokens=False).ids)


def test_only_strict_functions_need_a_grammar() -> None:
    """Without one, and where a call is forced, there is none."""
    strict = {"type": "function", "function": {"name": "weather", "strict": True}}
    for body in (
        {},
        {"tools": [strict], "tool_choice": "required"},
        {"tools": [strict], "tool_choice": "none"},
    ):
        assert tools(HERMES, **body).grammar(lambda text: None) is None


def test_one_call_at_a_time() -> None:
    """Without parallel calls the first one counts."""
    text = wrapped(ROME) + wrapped(OSLO)
    assert len(tools(HERMES, parallel_tool_calls=False).calls(text)) == 1


def test_a_template_without_tools_refuses_them() -> None:
    """A model that was not taught to call functions is not offered any."""
    with pytest.raises(HTTPError, match="has no place for tools") as raised:
        tools("{{ messages }}")
    assert raised.value.field == "tools"
    assert tools("{{ messages }}", tools=None).functions is None
