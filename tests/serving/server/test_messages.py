"""``/v1/messages``, Anthropic's interface, answers as chats do, in blocks and events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from opgraft.serving.server.chat_messages import arguments_of
from support.servers import Server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Weather", "input_schema": SCHEMA}
USER = {"role": "user", "content": "the cat"}


def ask(server: Server, **body: Any) -> httpx.Response:
    given = {"model": server.model, "messages": [USER], "temperature": 0, "max_tokens": 5, **body}
    return server.post("/v1/messages", **given)


def events_of(server: Server, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream. Each has its type as its name."""
    events = []
    for written in ask(server, stream=True, **body).text.strip().split("\n\n"):
        name, data = written.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_the_answer_is_that_of_a_chat(server: Server) -> None:
    """Text, usage and the reason of the end agree with the same request for a chat."""
    chat = server.chat(messages=[{"role": "system", "content": "be brief"}, USER]).json()
    message = ask(server, system=[{"type": "text", "text": "be brief"}]).json()
    assert message["content"] == [
        {"type": "text", "text": chat["choices"][0]["message"]["content"]}
    ]
    assert (message["role"], message["stop_reason"]) == ("assistant", "max_tokens")
    usage = message["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert read == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_blocks_are_the_messages_of_a_chat(recorder: Server) -> None:
    """Thinking, calls and their results have the places of a chat's messages."""
    call = {"id": "c1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}
    blocks = [
        {"type": "thinking", "thinking": "so", "signature": "s"},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", **call},
    ]
    thanks = {"type": "text", "text": "thanks"}
    messages = [
        USER,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [thanks, result]},
    ]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    of_chat = [
        USER,
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "so",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ]
    chat = recorder.chat(messages=of_chat).json()
    message = ask(recorder, messages=messages).json()
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    counted = recorder.post("/v1/messages/count_tokens", model=recorder.model, messages=messages)
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_a_call_that_has_failed(recorder: Server) -> None:
    """The result begins with a word that tells the model so."""
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
    failed = {"type": "tool_result", "tool_use_id": "c1", "content": "no net", "is_error": True}
    told = {"type": "tool_result", "tool_use_id": "c1", "content": "Error: no net"}
    counts = []
    for result in (failed, told):
        messages = [
            USER,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        counts.append(ask(recorder, messages=messages).json()["usage"])
    assert counts[0]["input_tokens"] + counts[0]["cache_read_input_tokens"] == sum(
        counts[1][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_system_messages(recorder: Server) -> None:
    """Those at the beginning are one, because templates take one."""
    both = [{"role": "system", "content": "be kind"}, USER]
    message = ask(recorder, system="be brief", messages=both).json()
    one = ask(recorder, system="be brief\n\nbe kind").json()
    assert message["content"] == one["content"]


def test_a_prompt_that_is_too_long_is_counted(server: Server) -> None:
    """Clients count the tokens to find out whether to shorten a chat."""
    long = [{"role": "user", "content": "the cat " * 1000}]
    body = {"model": server.model, "messages": long}
    counted = server.post("/v1/messages/count_tokens", **body).json()["input_tokens"]
    assert counted == server.post("/tokenize", **body).json()["count"] > 512


def test_the_id_of_a_request(server: Server) -> None:
    """Anthropic's clients read a header of another name."""
    answer = ask(server)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_stream_of_events(server: Server) -> None:
    """Events open and close each block, and add up to the whole message."""
    events = events_of(server)
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    whole = ask(server).json()
    assert "".join(each["delta"]["text"] for each in deltas) == whole["content"][0]["text"]
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stop_sequence(server: Server) -> None:
    """The answer ends before the text, and the message names it."""
    whole = ask(server, max_tokens=8).json()["content"][0]["text"]
    stop = whole[3:5]
    message = ask(server, max_tokens=8, stop_sequences=[stop]).json()
    assert message["content"][0]["text"] == whole[: whole.index(stop)]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_a_forced_call(server: Server, choice: dict[str, Any]) -> None:
    """The input of the call follows the schema, whole and in parts alike."""
    pytest.importorskip("llguidance")
    body = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    message = ask(server, **body).json()
    (call,) = message["content"]
    assert (call["type"], call["name"]) == ("tool_use", "weather")
    assert call["input"]["city"] in ("Rome", "Oslo")
    assert message["stop_reason"] == "tool_use"
    events = events_of(server, **body)
    begun = [each for each in events if each["type"] == "content_block_start"]
    parts = [each for each in events if each["type"] == "content_block_delta"]
    assert begun[0]["content_block"]["input"] == {}
    written = "".join(each["delta"]["partial_json"] for each in parts)
    assert json.loads(written) == call["input"]


@pytest.mark.parametrize("written", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_arguments_that_only_python_reads(written: str) -> None:
    """Arguments with numbers or characters that JSON lacks stay text, so that the answer is JSON."""
    assert arguments_of(written) == {"invalid_json": written}


def test_a_form(server: Server) -> None:
    """The text of the answer follows the schema of ``output_config``."""
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "schema": SCHEMA}
    message = ask(server, output_config={"format": form}, max_tokens=200).json()
    assert json.loads(message["content"][0]["text"])["city"] in ("Rome", "Oslo")


def test_an_answer_that_the_client_has_begun(server: Server) -> None:
    """A last message of the model is gone on with, as ``continue_final_message`` of a chat does."""
    messages = [USER, {"role": "assistant", "content": "the dog"}]
    chat = server.chat(messages=messages, continue_final_message=True).json()
    message = ask(server, messages=messages).json()
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"model": "other"}, 404, "not_found_error", "is not served here"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: expected a whole number"),
        ({"max_tokens": 10**6}, 400, "invalid_request_error", "max_tokens is 1000000"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            r"messages\[0\].content\[0\].type: expected 'text'",
        ),
        ({"tools": [{**TOOL, "type": "bash"}]}, 400, "invalid_request_error", r"tools\[0\].type"),
    ],
    ids=["model", "missing", "too-many", "image", "tool"],
)
def test_errors_have_the_form_of_this_interface(
    server: Server, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    """Each has a type of Anthropic's, and names the field in its message."""
    answer = ask(server, **body)
    assert answer.status_code == status
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    with pytest.raises(ValueError, match=words):
        raise ValueError(told["error"]["message"])
