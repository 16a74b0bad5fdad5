"""Calls are found in the text of an answer, whole or as it grows, in the forms that models write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from opgraft.engine.sampling import Grammar, GrammarTokens
from opgraft.errors import RequestError
from opgraft.serving.server.call_reader import WrittenCall
from opgraft.serving.server.protocol import ChatRequest
from opgraft.serving.server.tools import Tools
from opgraft.serving.tokenizer import Tokenizer
from support.small_tokenizers import trained_tokenizer

HERMES = "{{ tools }} <tool_call>"
MISTRAL = "{{ tools }} [TOOL_CALLS]"
PLAIN = "{{ tools }}"
GRANITE = "{{ tools }} <|tool_call|>"
ARGS = "{{ tools }} [TOOL_CALLS] [ARGS]"
V3 = "{{ tools }} <｜tool▁calls▁begin｜><｜tool▁call▁begin｜> ```json"
V31 = "{{ tools }} <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
ROME = {"name": "weather", "arguments": {"city": "Rome"}}
OSLO = {"name": "weather", "arguments": {"city": "Oslo"}}


def tools(template: str, **body: Any) -> Tools:
    offered = [{"type": "function", "function": {"name": "weather"}}]
    given = {"model": "m", "messages": [], "tools": offered, **body}
    return Tools(ChatRequest.model_validate(given), template)


def read(found: Tools, text: str) -> tuple[list[WrittenCall], str]:
    """Return the calls and the text of a whole answer."""
    reader = found.reader()
    if reader is not None:
        reader.read(text, ended=True)
    calls = found.calls([] if reader is None else reader.calls, ended=True)
    return list(calls), found.plain(reader, text)


def wrapped(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def of_deepseek(*cities: str, family: str = V31) -> str:
    """Return calls as DeepSeek V3.1 writes them, or V3."""
    written = ""
    for city in cities:
        arguments = json.dumps({"city": city})
        call = f"weather<｜tool▁sep｜>{arguments}"
        if family is V3:
            call = f"function<｜tool▁sep｜>weather\n```json\n{arguments}\n```"
        written += f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def without_opening(city: str) -> str:
    """Return a call as DeepSeek writes it if it forgets the token before all calls."""
    return of_deepseek(city).removeprefix("<｜tool▁calls▁begin｜>")


def of_mistral(*cities: str) -> str:
    """Return calls as Mistral's models write them since November 2024."""
    arguments = [json.dumps({"city": city}) for city in cities]
    return "".join(f"[TOOL_CALLS]weather[ARGS]{each}" for each in arguments)


@pytest.mark.parametrize(
    ("template", "text", "cities", "plain"),
    [
        (V31, of_deepseek("Rome", "Oslo"), ["Rome", "Oslo"], ""),
        (V31, f"I look.\n\n{of_deepseek('Rome')}", ["Rome"], "I look."),
        (V31, "I <｜tool▁calls▁begin｜> look.", [], "I <｜tool▁calls▁begin｜> look."),
        (V31, f"I look.\n\n{without_opening('Rome')}", ["Rome"], "I look."),
        (V3, of_deepseek("Rome", "Oslo", family=V3), ["Rome", "Oslo"], ""),
        (GRANITE, f"<|tool_call|>{json.dumps([ROME, OSLO])}", ["Rome", "Oslo"], ""),
        (HERMES, f"<tool_call>{json.dumps([ROME])}", ["Rome"], ""),
        (ARGS, of_mistral("Rome", "Oslo"), ["Rome", "Oslo"], ""),
        (ARGS, '[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Rome"}', ["Rome"], ""),
        (ARGS, "[TOOL_CALLS]fly[ARGS]{}", [], "[TOOL_CALLS]fly[ARGS]{}"),
        (PLAIN, f"<|python_tag|>{json.dumps(ROME)}; {json.dumps(OSLO)}", ["Rome", "Oslo"], ""),
        (PLAIN, "<|python_tag|>1 + 1", [], "<|python_tag|>1 + 1"),
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
            '<tool_call>{"name": "wea',
            [],
            '<tool_call>{"name": "wea',
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
    calls = [WrittenCall("weather", json.dumps({"city": city})) for city in cities]
    assert read(found, text) == (calls, plain)
    told, reader = "", found.reader()
    assert reader is not None
    for end in range(len(text) + 2):
        reader.read(text[:end], ended=end > len(text))
        told += found.plain(reader, text[:end])[len(told) :]
        for call, whole in zip(reader.calls, calls, strict=False):
            assert whole.arguments.startswith(call.arguments)
    assert told.rstrip() == plain
    assert reader.calls == calls


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
PARIS = {"name": "weather", "arguments": {"city": "Paris"}}


@pytest.mark.parametrize("more", [{}, {"additionalProperties": True}, {"allOf": [{}]}], ids=str)
def test_arguments_beyond_the_named_ones(more: dict[str, Any]) -> None:
    """A forced call has only the named arguments, unless the schema may allow others."""
    function = {"name": "weather", "parameters": {**CITY, **more}}
    found = tools(PLAIN, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert found.forced is not None
    (call,) = found.forced["anyOf"]
    held = jsonschema.Draft202012Validator(call)
    extended = {**ROME["arguments"], "mood": "good"}
    assert held.is_valid(ROME)
    assert held.is_valid({**ROME, "arguments": extended}) == bool(more)


def test_a_demanded_argument_without_a_property() -> None:
    """The schema of a forced call stays open then, or no call would be valid."""
    parameters = {"type": "object", "properties": {"city": {}}, "required": ["city", "day"]}
    function = {"name": "weather", "parameters": parameters}
    found = tools(PLAIN, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert found.forced is not None
    (call,) = found.forced["anyOf"]
    arguments = {**ROME["arguments"], "day": "today"}
    assert jsonschema.Draft202012Validator(call).is_valid({**ROME, "arguments": arguments})


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
        (V31, (), [of_deepseek("Rome", "Oslo"), "a < b"], of_deepseek("Paris")),
        (
            V3,
            DEEPSEEK_TOKENS,
            [of_deepseek("Rome", "Oslo", family=V3), "a < b"],
            of_deepseek("Paris", family=V3),
        ),
        (ARGS, ("[TOOL_CALLS]", "[ARGS]"), [of_mistral("Rome", "Oslo")], of_mistral("Paris")),
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
    special_token = Tokenizer(Path(), backend).special_token
    spec = tools(template, tools=[strict, clock]).structured_output(special_token, form=None)
    grammar = Grammar(spec, GrammarTokens(backend))
    free = refused.replace("weather", "clock")
    for text in [*taken, free.replace("'", '"')]:
        grammar.start(backend.encode(text, add_special_tokens=False).ids)
    with pytest.raises(RequestError, match="does not follow"):
        grammar.start(backend.encode(refused.replace("'", '"'), add_special_tokens=False).ids)


def test_only_strict_functions_need_a_grammar() -> None:
    """Without one there is none; a forced call has a schema."""
    strict = {"type": "function", "function": {"name": "weather", "strict": True}}
    for body in ({}, {"tools": [strict], "tool_choice": "none"}):
        assert tools(HERMES, **body).structured_output(lambda text: None, form=None) is None
    forced = tools(HERMES, tools=[strict], tool_choice="required")
    spec = forced.structured_output(lambda text: None, form=None)
    assert spec == {"json": forced.forced}


def test_one_call_at_a_time() -> None:
    """Without parallel calls the first one counts."""
    text = wrapped(ROME) + wrapped(OSLO)
    calls, _ = read(tools(HERMES, parallel_tool_calls=False), text)
    assert calls == [WrittenCall("weather", '{"city": "Rome"}')]


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (HERMES, "<tool_call>" + json.dumps(ROME)),
        (MISTRAL, "[TOOL_CALLS]" + json.dumps(ROME)),
        (PLAIN, json.dumps(ROME)),
        (ARGS, of_mistral("Rome")),
        (V31, of_deepseek("Rome")),
    ],
)
def test_a_call_or_an_answer_of_a_form(template: str, call: str) -> None:
    """With a form beside the functions, an answer is a call or of the form, and nothing else."""
    pytest.importorskip("llguidance")
    backend = trained_tokenizer()
    special_token = Tokenizer(Path(), backend).special_token
    form = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    spec = tools(template).structured_output(special_token, form)
    grammar = Grammar(spec, GrammarTokens(backend))
    for text in ('{"a": "x"}', call):
        grammar.start(backend.encode(text, add_special_tokens=False).ids)
    for text in ("Rome is sunny.", '{"b": 1}', call.replace("weather", "fly")):
        with pytest.raises(RequestError, match="does not follow"):
            grammar.start(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weat', [WrittenCall("weather", "")]),
        ('{"name": "weather", "argu', [WrittenCall("weather", "")]),
        ('{"name": "weather", "arguments": {"city": "Ro', [WrittenCall("weather", '{"city": "Ro')]),
        (json.dumps(ROME), [WrittenCall("weather", '{"city": "Rome"}')]),
    ],
)
def test_a_forced_call_that_is_cut_stays_a_call(text: str, calls: list[WrittenCall]) -> None:
    """The arguments are those so far, and no text shows how the model writes a call."""
    named = {"type": "function", "function": {"name": "weather"}}
    found = tools(PLAIN, tool_choice=named)
    assert read(found, text) == (calls, "")


def test_arguments_keep_the_words_of_the_model() -> None:
    """They are what the model has written, or JSON within a text; no arguments are an empty object."""
    found = tools(PLAIN)
    for written, arguments in (
        (
            '{"name": "weather", "arguments": {"city":"Z\\u00fcrich",  "n": 1.0}}',
            '{"city":"Z\\u00fcrich",  "n": 1.0}',
        ),
        ('{"name": "weather", "arguments": "{\\"city\\": 1}"}', '{"city": 1}'),
        ('{"name": "weather"}', "{}"),
        ('{"name": "weather", "id": 1, "arguments": {"city": 1}}', '{"city": 1}'),
        ('{"name": "weather", "arguments": {"a": "}\\"{"}, "id": [{}]}', '{"a": "}\\"{"}'),
        ('{"arguments": {"city": 1}, "name": "weather"}', '{"city": 1}'),
    ):
        assert read(found, written) == ([WrittenCall("weather", arguments)], "")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PLAIN, '{"name": "a\nb", "arguments": {}}'),
        (PLAIN, '{"name": "C:\\q", "arguments": {}}'),
        (PLAIN, '{"name": "weather", "arguments": [1]}'),
        (PLAIN, '{"name": "weather", "arguments": null}'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": "'),
        (HERMES, "<tool_call>[[]]"),
    ],
)
def test_text_that_only_looks_like_a_call(template: str, text: str) -> None:
    """It is told as text, whole or in a stream, and no call begins in between."""
    found = tools(template)
    assert read(found, text) == ([], text)
    reader = found.reader()
    assert reader is not None
    for end in range(len(text) + 1):
        reader.read(text[:end], ended=False)
        assert reader.calls == []


def test_markers_within_arguments() -> None:
    """They are a part of a text, and begin no call."""
    call = {"name": "weather", "arguments": {"city": "a <tool_call>{ b"}}
    calls, _ = read(tools(HERMES), wrapped(call) + wrapped(ROME))
    assert [json.loads(each.arguments) for each in calls] == [call["arguments"], ROME["arguments"]]


def test_many_calls_are_read_once() -> None:
    """The work for a stream grows with the text alone, and the number of calls has a limit."""
    text = "[" + ", ".join([json.dumps(ROME)] * 4000)
    reader = tools(PLAIN).reader()
    assert reader is not None
    for end in range(0, len(text), 40):
        reader.read(text[:end], ended=False)
    assert len(reader.calls) == 128


def test_a_template_without_tools_gets_an_instruction() -> None:
    """A text before the first message tells the model of the functions, and how to call them."""
    found = tools("{{ messages }}")
    assert found.instruction is not None
    assert '"name": "weather"' in found.instruction
    assert tools(PLAIN).instruction is None
    assert tools("{{ messages }}", tools=None).functions is None
