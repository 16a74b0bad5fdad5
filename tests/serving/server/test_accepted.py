"""What other servers take, this one takes: fields, values, and the history that clients send back."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers import Server, error_of, serving

USER = {"role": "user", "content": "the cat"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "1"}

WITHOUT_EFFECT = {
    "reasoning_effort": "low",
    "verbosity": "low",
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "safety_identifier": "u",
    "metadata": {"a": "b"},
    "user": "u",
    "prediction": {"type": "content", "content": "a"},
    "stream_options": {"include_obfuscation": False},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "logits_processors": [],
    "return_token_ids": False,
    "request_id": "r",
}


def test_fields_without_an_effect(server: Server) -> None:
    """They are known, so that no header names them; a field of vLLM's has its default value."""
    response = server.chat(**WITHOUT_EFFECT)
    assert response.json()["choices"] == server.chat().json()["choices"]
    assert "x-ignored-fields" not in response.headers


def test_unknown_fields_are_ignored_and_named(server: Server) -> None:
    """The header of the answer names each, wherever it stands, in characters that a header may have."""
    names = {
        "temprature": 1,
        "x" * 5000: 1,
        "__proto__": {},
        "\u00fc\r\nset-cookie: a": 1,
        "n": None,
    }
    message = {**USER, "mood": 1, "content": [{"type": "text", "text": "the cat", "lang": "en"}]}
    response = server.chat(messages=[message], **names)
    assert response.json()["choices"] == server.chat(messages=[USER]).json()["choices"]
    named = response.headers["x-ignored-fields"]
    assert named.startswith("messages[].content[].lang, messages[].mood, temprature, xxx")
    assert "set-cookie" not in response.headers
    assert len(named) <= 1024
    streamed = server.chat(messages=[message], stream=True)
    assert "messages[].mood" in streamed.headers["x-ignored-fields"]


@pytest.fixture(scope="module")
def strict(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that refuses unknown fields, with a chat template of its own."""
    template = tmp_path_factory.mktemp("templates") / "other.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    options = ("--server.unknown_fields", "refuse", "--chat-template", str(template))
    with serving(checkpoint, *options) as running:
        yield running


def test_a_server_that_refuses_unknown_fields(strict: Server) -> None:
    """It names the first with a near one, and takes those without an effect."""
    error = error_of(strict.chat(temprature=1))
    assert (error["param"], error["code"]) == ("temprature", "unsupported_field")
    assert error["message"] == "temprature is not supported: did you mean 'temperature'?"
    error = error_of(strict.chat(messages=[{**USER, "mood": 1}]))
    assert error["param"] == "messages[0].mood"
    assert strict.chat(**WITHOUT_EFFECT).status_code == 200


def test_a_chat_template_in_a_file(strict: Server) -> None:
    """The file stands in place of the checkpoint's template."""
    tokens = strict.post("/tokenize", messages=[USER]).json()["tokens"]
    assert strict.post("/detokenize", tokens=tokens).json()["prompt"] == "<the cat>"


def raw(server: Server, head: str, body: bytes = b"") -> bytes:
    """Return all bytes of the answer to a request, until the server closes the connection."""
    url = httpx.URL(server.url)
    headers = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    request = f"{head}\r\n{headers}\r\n\r\n".encode() + body
    with socket.create_connection((url.host, url.port or 80), 60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0(server: Server, stream: bool) -> None:
    """A stream has no chunks and ends with the connection; other answers have their length."""
    asked = {"model": server.model, "messages": [USER], "max_tokens": 4, "temperature": 0}
    body = json.dumps({**asked, "stream": stream}).encode()
    path = "/v1/chat/completions"
    head, _, answer = raw(server, f"POST {path} HTTP/1.0", body).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    if stream:
        events = answer.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert all(event.startswith(b"data: ") for event in events[:-1])
    else:
        assert b"content-length: %d" % len(answer) in head
        assert json.loads(answer)["choices"]
    assert raw(server, "HEAD /health HTTP/1.0").endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("message", "like"),
    [
        ({"content": "hello", "provider_specific_fields": {"refusal": None}}, None),
        ({"content": "hello", "reasoning": "hm"}, {"content": "hello", "reasoning_content": "hm"}),
        ({"content": "hello", "id": "msg_1", "annotations": [1], "audio": None}, None),
        ({"content": None, "refusal": "I cannot"}, {"content": "I cannot"}),
        ({"content": [{"type": "refusal", "refusal": "I cannot"}]}, {"content": "I cannot"}),
        ({"content": None, "tool_calls": []}, {"content": ""}),
        ({}, {"content": ""}),
        ({"tool_calls": [{**CALL, "index": 0}]}, {"tool_calls": [CALL]}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"tool_calls": [CALL]}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, {"tool_calls": [CALL]}),
        ({"tool_calls": [{"function": {"name": "f"}}]}, {"tool_calls": [CALL]}),
        ({"function_call": {"name": "f", "arguments": "{}"}}, {"tool_calls": [CALL]}),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]},
            {"tool_calls": [{"function": {"name": "f", "arguments": {"invalid_json": '{"a": '}}}]},
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": [1, "a"]}}]},
            {
                "tool_calls": [
                    {"function": {"name": "f", "arguments": {"invalid_json": '[1, "a"]'}}}
                ]
            },
        ),
    ],
    ids=range(14),
)
def test_history_that_clients_send_back(
    server: Server, message: dict[str, Any], like: dict[str, Any] | None
) -> None:
    """Whatever an answer has become on its way through a client, the chat goes on, with the expected prompt."""

    def tokens(answer: dict[str, Any]) -> Any:
        chat = [USER, {"role": "assistant", **answer}]
        chat += [RESULT] if answer.get("tool_calls") or answer.get("function_call") else []
        response = server.post("/tokenize", messages=[*chat, USER])
        assert response.status_code == 200, response.text
        return response.json()["tokens"]

    content = {"content": message.get("content")}
    assert tokens(message) == tokens(content if like is None else like)


@pytest.mark.parametrize("arguments", ["", '{"a": ', "no", None, [1], {"a": 1}], ids=range(6))
def test_arguments_of_calls_in_other_interfaces(server: Server, arguments: Any) -> None:
    """Arguments that are empty, cut off, or no JSON end no conversation."""
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    response = server.post("/v1/responses", input=[USER, call, result], max_output_tokens=1)
    assert response.status_code == 200, response.text
    block = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
    done = {"type": "tool_result", "tool_use_id": "c1", "content": "1"}
    messages = [
        USER,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [done]},
    ]
    response = server.post("/v1/messages", messages=messages, max_tokens=1)
    assert response.status_code == 200, response.text


def test_results_of_calls(server: Server) -> None:
    """A result may lack its call, or its content, or have the older role."""
    for result in ({"role": "tool"}, {"role": "function", "name": "f", "content": "1"}):
        assert server.chat(messages=[USER, result, USER]).status_code == 200


def test_whole_numbers_may_have_a_point(server: Server) -> None:
    """JSON of some clients writes 4.0 for 4."""
    given = {"max_tokens": 4, "seed": 3, "n": 1, "top_k": 5, "temperature": 1}
    floats = {name: float(value) for name, value in given.items()}
    assert server.chat(**floats).json()["choices"] == server.chat(**given).json()["choices"]


def test_a_minimum_that_a_form_cannot_reach(server: Server) -> None:
    """The request is at fault, and not the server."""
    schema = {"type": "object", "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = server.chat(response_format=form, min_tokens=150, max_tokens=200)
    assert response.status_code == 400, response.text
    message = error_of(response)["message"]
    assert "no token is left" in message
    assert message.endswith("bad_words, logit_bias, min_tokens and the structured output")


def test_cached_tokens(server: Server) -> None:
    """The usage has how many tokens of the prompt the cache held."""
    prompt = [7, 8, 9, 10] * 30
    server.complete(prompt=prompt, max_tokens=2)
    usage = server.complete(prompt=prompt, max_tokens=2).json()["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < len(prompt)


def test_parts_of_characters_in_log_probabilities(server: Server) -> None:
    """Each token has its own bytes, and a token that continues a character has the character's place."""
    text = "the \U0001f98a \u8a9e cat sat"
    asked = {"prompt": text, "echo": True, "max_tokens": 0, "logprobs": 0}
    found = server.complete(**asked).json()["choices"][0]
    offsets = found["logprobs"]["text_offset"]
    for token, offset in zip(found["logprobs"]["tokens"], offsets, strict=True):
        assert "\ufffd" in token or found["text"][offset:].startswith(token)
    assert len({*offsets}) < len(offsets)
    tokens = server.post("/tokenize", prompt=text).json()["tokens"]
    for place in range(1, len(tokens)):
        before = server.post("/detokenize", tokens=tokens[:place]).json()["prompt"]
        # Only an unfinished last character is written by U+FFFD.
        assert offsets[place] == len(before.rstrip("\ufffd"))
    row = server.chat(logprobs=True, top_logprobs=20, max_tokens=8).json()["choices"][0]
    for each in row["logprobs"]["content"]:
        for token in each["top_logprobs"]:
            assert "\ufffd" in token["token"] or bytes(token["bytes"]).decode() == token["token"]
            assert bytes(token["bytes"]) != "\ufffd".encode()


def test_tokens_by_their_ids(server: Server) -> None:
    """Log-probabilities name tokens by id, if the request wants this."""
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 4}
    (choice,) = server.chat(**asked, logprobs=True, top_logprobs=2).json()["choices"]
    rows = choice["logprobs"]["content"]
    assert [row["token"] for row in rows] == [f"token_id:{each}" for each in choice["token_ids"]]
    top = [each["token"] for row in rows for each in row["top_logprobs"]]
    assert all(text.startswith("token_id:") for text in top)

    echo = {**asked, "prompt": [5, 6], "echo": True, "logprobs": 1}
    (choice,) = server.complete(**echo).json()["choices"]
    written = [f"token_id:{token}" for token in [5, 6, *choice["token_ids"]]]
    assert choice["logprobs"]["tokens"] == written
    likeliest = [text for each in choice["logprobs"]["top_logprobs"] if each for text in each]
    assert all(text.startswith("token_id:") for text in likeliest)


def test_a_form_beside_functions(server: Server) -> None:
    """The answer is a call, or of the form."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = server.chat(tools=[tool], response_format=form, max_tokens=200)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    assert message.get("tool_calls") or json.loads(message["content"])["a"] == 1


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "(yes|no){2}"}}, "(yes|no){2}"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}, "a[bc]"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}}, "a[0-9]"),
        ({"structured_outputs": {"json": {"enum": ["on", "off"]}}}, '"on"|"off"'),
        ({"structured_outputs": {"json": '{"const": 5}', "disable_fallback": True}}, "5"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, r"\s*\{.*"),
        ({"structured_outputs": {}, "guided_choice": ["red"]}, "red"),
        ({"guided_regex": "a{3}", "guided_decoding_backend": "xgrammar"}, "a{3}"),
        ({"guided_json": {"const": [1]}}, r"\[\s*1\s*\]"),
        ({"guided_grammar": 'start: "x"', "response_format": {"type": "text"}}, "x"),
    ],
    ids=range(11),
)
def test_forms_by_the_names_of_vllm(server: Server, form: dict[str, Any], pattern: str) -> None:
    """Answers have the form, of both paths."""
    chat = server.chat(**form, max_tokens=40)
    assert chat.status_code == 200, chat.text
    assert "x-ignored-fields" not in chat.headers
    completion = server.complete(**form, max_tokens=40)
    texts = [
        chat.json()["choices"][0]["message"]["content"],
        completion.json()["choices"][0]["text"],
    ]
    for text in texts:
        assert re.fullmatch(pattern, text, re.DOTALL), text


FORMS: dict[str, dict[str, Any]] = {
    "guided_json": {"guided_json": {"const": 1}},
    "guided_regex": {"guided_regex": "a+"},
    "guided_choice": {"guided_choice": ["a", "b"]},
    "guided_grammar": {"guided_grammar": 'start: "a"'},
    "structured_outputs.json": {"structured_outputs": {"json": {"const": 1}}},
    "structured_outputs.json_object": {"structured_outputs": {"json_object": True}},
    "structured_outputs.regex": {"structured_outputs": {"regex": "a+"}},
    "structured_outputs.choice": {"structured_outputs": {"choice": ["a"]}},
    "structured_outputs.grammar": {"structured_outputs": {"grammar": 'start: "a"'}},
}
"""By field, a form of vLLM."""


def test_forms_that_exclude_each_other(server: Server) -> None:
    """Two forms are refused, one beside functions that is no JSON, and one beside a forced call."""
    form = {"type": "json_object"}
    error = error_of(server.chat(response_format=form, guided_regex="a"))
    assert error["param"] == "guided_regex"
    assert error["message"] == "guided_regex and response_format are both given: leave one out"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    error = error_of(server.chat(tools=[tool], structured_outputs={"choice": ["a"]}))
    assert (error["param"], error["code"]) == ("structured_outputs.choice", "unsupported_value")
    named = {"type": "function", "function": {"name": "f"}}
    for field, form in FORMS.items():
        for choice in ("required", named):
            response = server.chat(tools=[tool], tool_choice=choice, **form)
            assert response.status_code == 400
            error = error_of(response)
            assert error["param"] == field
            assert error["message"].startswith(f"{field} stands beside a tool_choice that forces")
    beside = {"tools": [tool], "guided_regex": "a{3}", "tool_choice": "none"}
    assert server.chat(**beside).json()["choices"][0]["message"]["content"] == "aaa"
    schema = {"const": {"a": 1}}
    # The likeliest tokens are those of the form: of itself the model may write spaces without end.
    written = server.post("/tokenize", prompt='{"a":1}').json()["tokens"]
    likely = {str(token): 100 for token in written}
    asked = {"tools": [tool], "guided_json": schema, "max_tokens": 60, "logit_bias": likely}
    message = server.chat(**asked).json()["choices"][0]["message"]
    assert message.get("tool_calls") or json.loads(message["content"]) == {"a": 1}


def test_tokens_that_an_answer_may_have(server: Server) -> None:
    """No other token occurs."""
    asked = {"allowed_token_ids": [7, 9], "return_token_ids": True, "max_tokens": 12, "seed": 1}
    for answer in (server.chat(**asked, temperature=1), server.complete(**asked, temperature=1)):
        (choice,) = answer.json()["choices"]
        assert len(choice["token_ids"]) == 12
        assert {*choice["token_ids"]} <= {7, 9}


def test_the_reason_of_a_stop(server: Server) -> None:
    """It is the text or the token that ended the answer, and null for other ends."""
    whole = server.complete(prompt=[5, 6], max_tokens=8, return_token_ids=True).json()["choices"][0]
    token = whole["token_ids"][3]
    for asked, reason in (
        ({"stop_token_ids": [token]}, token),
        ({"stop": [whole["text"][2:4]]}, whole["text"][2:4]),
        ({}, None),
    ):
        asked = {"prompt": [5, 6], "max_tokens": 8, **asked}
        (choice,) = server.complete(**asked).json()["choices"]
        assert (choice["stop_reason"], choice["finish_reason"] == "stop") == (
            reason,
            reason is not None,
        )
    chat = {"guided_regex": "ab{3}", "stop": ["b"], "max_tokens": 9}
    (choice,) = server.chat(**chat).json()["choices"]
    assert (choice["stop_reason"], choice["message"]["content"]) == ("b", "a")
    *_, last = events_of(server.chat(**chat, stream=True))
    assert (last["choices"][0]["stop_reason"], last["choices"][0]["finish_reason"]) == ("b", "stop")


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_token_ids(server: Server) -> None:
    """An answer has those of the prompt and its own, and a stream each once."""
    asked = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    chat = server.chat(**asked).json()
    prompt = server.post("/tokenize", messages=[USER]).json()["tokens"]
    assert server.chat(messages=[USER], **asked).json()["prompt_token_ids"] == prompt
    completion = server.complete(prompt=[5, 6], **asked).json()["choices"][0]
    assert completion["prompt_token_ids"] == [5, 6]
    assert len(completion["token_ids"]) == len(chat["choices"][0]["token_ids"]) == 6

    chunks = events_of(server.chat(**asked, stream=True))
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [chat["prompt_token_ids"]]
    tokens = [each for chunk in chunks for each in chunk["choices"][0].get("token_ids", ())]
    assert tokens == chat["choices"][0]["token_ids"]

    streamed = events_of(server.complete(prompt=[5, 6], **asked, stream=True))
    choices = [chunk["choices"][0] for chunk in streamed]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        [5, 6],
        *[None] * (len(choices) - 1),
    ]
    assert [token for choice in choices for token in choice["token_ids"]] == completion["token_ids"]
    scored = {**asked, "echo": True, "max_tokens": 0, "logprobs": 0, "prompt": [5, 6]}
    assert server.complete(**scored).json()["choices"][0]["token_ids"] == []
    assert "token_ids" not in server.chat().json()["choices"][0]
