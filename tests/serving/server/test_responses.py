"""``/v1/responses`` answers as chats do, in items and events, and keeps conversations within a bound."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from opgraft.errors import HTTPError
from opgraft.serving.server.response_store import ResponseStore
from pydantic import BaseModel
from support.servers import Server, error_of

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
INFINITE = float("inf")
CALL = {"call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}


class Pet(BaseModel):
    """A form of answers."""

    kind: bool


def respond(server: Server, **body: Any) -> Any:
    given = {"model": server.model, "temperature": 0, "max_output_tokens": 5, **body}
    return server.openai.responses.create(**given)


def events_of(server: Server, **body: Any) -> list[Any]:
    return list(respond(server, stream=True, **body))


def test_the_answer_is_that_of_a_chat(server: Server) -> None:
    """Text, usage and the reason of the end agree with the same request for a chat."""
    chat = server.chat(messages=[{"role": "user", "content": "the cat"}]).json()
    response = respond(server, input="the cat")
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == chat["usage"]["completion_tokens"]


def test_items_are_the_messages_of_a_chat(recorder: Server) -> None:
    """Instructions, messages, reasoning, calls and results have the places of a chat's messages."""
    call = {"id": "c1", "type": "function", "function": {**CALL}}
    del call["function"]["call_id"]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the cat\nthe dog"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "so",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ]
    parts = [{"type": "input_text", "text": text} for text in ("the cat", "the dog")]
    said = {"type": "output_text", "text": "I look", "annotations": []}
    items = [
        {"role": "user", "content": parts},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [said],
        },
        {"type": "function_call", "id": "f", **CALL},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "thanks"},
    ]
    chat = recorder.chat(messages=messages).json()
    response = respond(recorder, instructions="be brief", input=items)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_reasoning_between_parts_of_an_answer(recorder: Server) -> None:
    """Reasoning joins the message of the model before it, and first system messages are one."""
    messages = [
        {"role": "system", "content": "be brief\n\nbe kind"},
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "I look", "reasoning_content": "so\nthen"},
        {"role": "user", "content": "thanks"},
    ]
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "the cat"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "I look"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "then"}]},
        {"role": "user", "content": "thanks"},
    ]
    chat = recorder.chat(messages=messages).json()
    response = respond(recorder, instructions="be brief", input=items)
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.output_text == chat["choices"][0]["message"]["content"]


def test_a_stream_of_events(server: Server) -> None:
    """Events are numbered, open and close each item, and end with the response that a whole answer is."""
    events = events_of(server, input="the cat")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    whole = respond(server, input="the cat")
    assert text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens


def test_a_forced_call(server: Server) -> None:
    """The call is an item; its arguments arrive as events that add up to the arguments."""
    pytest.importorskip("llguidance")
    choice = {"type": "function", "name": "weather"}
    body = {"input": "the cat", "tools": [TOOL], "tool_choice": choice, "max_output_tokens": 200}
    (call,) = respond(server, **body).output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = events_of(server, **body)
    done = [each for each in events if each.type == "response.function_call_arguments.done"]
    parts = [each for each in events if each.type == "response.function_call_arguments.delta"]
    assert [each.arguments for each in done] == [call.arguments]
    assert "".join(each.delta for each in parts) == call.arguments
    assert events[-1].type == "response.completed"


def test_a_form(server: Server) -> None:
    """The client's own class comes back as an object."""
    pytest.importorskip("llguidance")
    response = server.openai.responses.parse(
        model=server.model, input="the cat", text_format=Pet, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Pet)


def test_log_probabilities(server: Server) -> None:
    """The text has them if the request includes them."""
    include: Any = ["message.output_text.logprobs"]
    response = respond(server, input="the cat", include=include, top_logprobs=2)
    (part,) = response.output[0].content
    assert len(part.logprobs) == 5
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_repeats_halves_of_characters(server: Server, stream: bool) -> None:
    """Text of the client that no file may have comes back with a question mark."""
    body = {"input": "the cat", "user": "half \ud800", "stream": stream, "max_output_tokens": 2}
    answer = server.send("/v1/responses", json.dumps(body).encode())
    assert answer.status_code == 200
    assert "half ?" in answer.text
    assert "event: error" not in answer.text


def test_a_conversation_that_the_server_keeps(server: Server) -> None:
    """The next request goes on with the previous response, until it is deleted; ``store: false`` keeps none."""
    client = server.openai.responses
    first = respond(server, input="the cat", instructions="be brief")
    shown = client.retrieve(first.id)
    assert shown.output_text == first.output_text
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and the dog"},
    ]
    chat = server.chat(messages=messages).json()
    second = respond(server, input="and the dog", previous_response_id=first.id)
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]
    client.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="does not keep") as raised:
        respond(server, input="and the dog", previous_response_id=first.id)
    assert raised.value.param == "previous_response_id"
    unkept = respond(server, input="the cat", store=False)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(unkept.id)


def test_a_stream_is_kept(server: Server) -> None:
    """Its response can be asked for after the last event."""
    *_, last = events_of(server, input="the cat")
    assert (
        server.openai.responses.retrieve(last.response.id).output_text == last.response.output_text
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{**TOOL, "parameters": {"const": INFINITE}}]}, "tools[0].parameters"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": INFINITE}}}},
            "text.format.schema",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_have_the_names_of_this_interface(
    server: Server, body: dict[str, Any], field: str
) -> None:
    """The field at fault is named as the client has written it."""
    given = json.dumps({"model": server.model, "input": "the cat", **body})
    answer = server.send("/v1/responses", given.encode())
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


def test_the_oldest_responses_go_first() -> None:
    """The store has room for a number of bytes; a response that is larger alone is not kept."""
    store = ResponseStore(limit=300, longest=1000)

    def keep(name: str, size: int, owner: bytes = b"") -> None:
        message = {"role": "user", "content": "y"}
        store.keep(owner, {"id": name, "text": "x" * size}, [message])

    def kept(names: str, owner: bytes = b"") -> str:
        return "".join(name for name in names if is_kept(store, owner, name))

    for name in "abcd":
        keep(name, 60)
    assert kept("abcd") == "cd"
    keep("e", 300)
    assert kept("cde") == "cd"
    asyncio.run(store.drop(b"", "c"))
    with pytest.raises(HTTPError, match="'c' is not kept"):
        asyncio.run(store.drop(b"", "c"))
    keep("f", 60)
    assert kept("df") == "df"
    # A client with many responses loses its own ones.
    keep("g", 1, b"other")
    keep("h", 60)
    assert kept("dfh") == "fh"
    assert kept("g", b"other") == "g"
    assert kept("fh", b"other") == ""


def is_kept(store: ResponseStore, owner: bytes, name: str) -> bool:
    try:
        asyncio.run(store.response(owner, name))
    except HTTPError:
        return False
    return True


@pytest.mark.parametrize(
    "content", ["x" * 1000, [{"type": "text"}] * 40_000], ids=["bytes", "lists"]
)
def test_a_conversation_that_is_larger_than_a_body(content: Any) -> None:
    """It does not go on, because bodies have bounds for a reason."""
    longest = 1000 if isinstance(content, str) else 10**8
    store = ResponseStore(limit=10**8, longest=longest)
    store.keep(b"", {"id": "a"}, [{"role": "user", "content": content}])
    with pytest.raises(HTTPError, match="larger than a body may be") as raised:
        asyncio.run(store.messages(b"", "a"))
    assert (raised.value.status, raised.value.code) == (400, "limit_exceeded")


def test_a_response_that_is_cut(server: Server) -> None:
    """The last item is incomplete, whole and in the events alike."""
    (item,) = respond(server, input="the cat").output
    assert item.status == "incomplete"
    events = events_of(server, input="the cat")
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert done.status == events[-1].response.output[0].status == "incomplete"


def test_fields_of_vllm(server: Server) -> None:
    """The answer ends at a text, or has a form."""
    whole = respond(server, input="the cat", max_output_tokens=8).output_text
    stop = whole[3:5]
    body = {"input": "the cat", "max_output_tokens": 8, "temperature": 0}
    stopped = server.post("/v1/responses", **body, stop=[stop]).json()
    assert stopped["output"][0]["content"][0]["text"] == whole[: whole.index(stop)]
    pytest.importorskip("llguidance")
    held = server.post("/v1/responses", **body, structured_outputs={"choice": ["yes"]}).json()
    assert held["output"][0]["content"][0]["text"] == "yes"


def test_a_kept_response_as_a_stream(server: Server) -> None:
    """It is refused, because the response comes whole."""
    kept = respond(server, input="the cat")
    refused = server.get(f"/v1/responses/{kept.id}?stream=true")
    assert error_of(refused)["param"] == "stream"
