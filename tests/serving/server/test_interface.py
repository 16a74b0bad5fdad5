"""Each field of the interface does what it says, or is an error that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from opgraft import SamplingParams, current_platform
from opgraft.serving.llm import LLM
from support.servers import TEMPLATE, Server, serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def llm(checkpoint: Any) -> LLM:
    """The same model in this process."""
    lengths = {"cache.num_blocks": 256, "cache.block_size": 4, "load.progress": False}
    return LLM(str(checkpoint), dtype="float32", max_model_len=512, **lengths)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends as streams do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in found]


def refused(response: httpx.Response, field: str, status: int = 400) -> str:
    """The message of an error in OpenAI's shape that names a field."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    return str(error["message"])


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"max_tokens": 20, "ignore_eos": True}, {"max_tokens": 20, "ignore_eos": True}),
        ({"temperature": 1, "seed": 7}, {"temperature": 1.0, "seed": 7}),
        ({"temperature": 1.5, "seed": 7, "top_k": 3}, {"temperature": 1.5, "seed": 7, "top_k": 3}),
        (
            {"temperature": 1.5, "seed": 7, "top_p": 0.4},
            {"temperature": 1.5, "seed": 7, "top_p": 0.4},
        ),
        (
            {"temperature": 1.5, "seed": 7, "min_p": 0.5},
            {"temperature": 1.5, "seed": 7, "min_p": 0.5},
        ),
        ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {"70": 100}}, {"logit_bias": {70: 100.0}}),
        ({"n": 3, "temperature": 1, "seed": 5}, {"n": 3, "temperature": 1.0, "seed": 5}),
        (
            {"stop_token_ids": [5], "logit_bias": {"5": 100}},
            {"stop_token_ids": [5], "logit_bias": {5: 100.0}},
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_sampling_is_that_of_the_engine(
    server: Server, llm: LLM, body: dict[str, Any], params: dict[str, Any]
) -> None:
    """Texts and reasons are those of LLM with the same parameters, whole and as a stream."""
    (expected,) = llm.generate("the cat", SamplingParams(**{"temperature": 0.0, **params}))
    answers = [(answer.text, answer.finish_reason) for answer in expected.outputs]
    whole = server.complete(**body).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == answers
    told = dict.fromkeys(range(len(answers)), "")
    for event in events(server.complete(**body, stream=True)):
        for choice in event["choices"]:
            told[choice["index"]] += choice["text"]
    assert list(told.values()) == [text for text, _ in answers]


def test_a_stop_string(server: Server) -> None:
    """The text ends before the string, in streams too, and with it where that is asked for."""
    text = server.complete(max_tokens=40).json()["choices"][0]["text"]
    stop = text[5:7]
    before = text[: text.index(stop)]
    given: dict[str, Any] = {"max_tokens": 40, "stop": [stop]}
    (choice,) = server.complete(**given).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    streamed = events(server.complete(**given, stream=True))
    assert "".join(event["choices"][0]["text"] for event in streamed) == before
    (choice,) = server.complete(**given, include_stop_str_in_output=True).json()["choices"]
    assert choice["text"] == before + stop


def test_log_probabilities_of_completions(server: Server) -> None:
    """There are as many places as tokens, echoed ones too, and the stream has them in parts."""
    given: dict[str, Any] = {"max_tokens": 6, "logprobs": 2}
    (choice,) = server.complete(**given).json()["choices"]
    found = choice["logprobs"]
    assert [
        len(found[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ] == [6] * 4
    assert all(1 <= len(top) <= 2 for top in found["top_logprobs"]), (
        "two tokens may have the same text"
    )
    assert found["token_logprobs"] == [max(top.values()) for top in found["top_logprobs"]]
    parts = [
        event["choices"][0]["logprobs"] for event in events(server.complete(**given, stream=True))
    ]
    assert [token for part in parts for token in part["tokens"]] == found["tokens"]
    assert [place for part in parts for place in part["text_offset"]] == found["text_offset"]
    response = server.complete(**given, echo=True).json()
    echoed = response["choices"][0]["logprobs"]
    assert len(echoed["tokens"]) == response["usage"]["total_tokens"]
    assert echoed["token_logprobs"][0] is None
    assert echoed["tokens"][-6:] == found["tokens"]


def test_log_probabilities_of_chats(server: Server) -> None:
    """Each token has its own and the likeliest, with bytes; top_logprobs alone is an error."""
    (choice,) = server.chat(logprobs=True, top_logprobs=3).json()["choices"]
    rows = choice["logprobs"]["content"]
    assert len(rows) == 5
    for row in rows:
        assert len(row["top_logprobs"]) == 3
        assert row["logprob"] == row["top_logprobs"][0]["logprob"] <= 0
    (choice,) = server.chat(logprobs=True).json()["choices"]
    assert [row["top_logprobs"] for row in choice["logprobs"]["content"]] == [[]] * 5
    assert "needs logprobs" in refused(server.chat(top_logprobs=3), "top_logprobs")


def test_several_prompts(server: Server) -> None:
    """Texts and token ids are prompts; choices count through prompts, then answers."""
    ids = server.post("/tokenize", prompt="the mat").json()["tokens"]
    both = server.complete(prompt=["the cat", "the mat"]).json()
    alone = server.complete(prompt=[ids]).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert both["choices"][1]["text"] == alone["choices"][0]["text"]
    assert both["usage"]["prompt_tokens"] == len(ids) + len(
        server.post("/tokenize", prompt="the cat").json()["tokens"]
    )
    drawn = server.complete(prompt=["the cat", "the mat"], n=2, temperature=1, stream=True)
    assert {choice["index"] for event in events(drawn) for choice in event["choices"]} == {
        0,
        1,
        2,
        3,
    }


def test_usage_in_a_stream(server: Server) -> None:
    """The last event has the usage of all if that is asked for, or each event that of the tokens so far."""
    given: dict[str, Any] = {
        "stream_options": {"include_usage": True},
        "n": 2,
        "temperature": 1,
        "max_tokens": 4,
    }
    *chunks, last = events(server.chat(**given, ignore_eos=True, stream=True))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    given["stream_options"]["continuous_usage_stats"] = True
    usages = [each["usage"] for each in events(server.chat(**given, ignore_eos=True, stream=True))]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert usages[-1]["total_tokens"] == last["usage"]["total_tokens"]


def test_the_length_of_an_answer(server: Server) -> None:
    """Either name of the limit holds; a chat without one goes on as far as the context, a completion for 16 tokens."""
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"max_tokens": None, name: 7, "ignore_eos": True}
        assert server.chat(**body).json()["usage"]["completion_tokens"] == 7
    long = [{"role": "user", "content": "the cat " * 120}]
    answer = server.chat(messages=long, max_tokens=None, ignore_eos=True).json()
    assert answer["usage"]["prompt_tokens"] < 500
    assert answer["usage"]["total_tokens"] == 512
    assert server.complete(ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    assert "maximum context length is 512" in refused(server.complete(max_tokens=511), "max_tokens")
    assert "512" in refused(server.complete(prompt=[5] * 600), "prompt")


@pytest.mark.parametrize(
    ("form", "required"),
    [
        ({"type": "json_object"}, []),
        (
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "pet",
                    "schema": {
                        "type": "object",
                        "properties": {"kind": {"enum": ["cat", "dog"]}},
                        "required": ["kind"],
                        "additionalProperties": False,
                    },
                },
            },
            ["kind"],
        ),
    ],
    ids=["json_object", "json_schema"],
)
def test_structured_answers(server: Server, form: dict[str, Any], required: list[str]) -> None:
    """An answer that has come to its end is JSON of the form, whatever the model would say."""
    bias = {str(server.post("/tokenize", prompt="}").json()["tokens"][0]): 100}
    (choice,) = server.chat(response_format=form, max_tokens=60, logit_bias=bias).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(required) <= set(json.loads(choice["message"]["content"]))


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}},
            "response_format",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}},
            "response_format",
        ),
    ],
)
def test_forms_that_cannot_be_compiled(server: Server, form: dict[str, Any], field: str) -> None:
    """They are errors of the request, which name what is wrong."""
    refused(server.chat(response_format=form), field)


def test_a_forced_call(server: Server) -> None:
    """The function that is chosen is called, with arguments of its schema; streamed alike."""
    named = {"type": "function", "function": {"name": "weather"}}
    given: dict[str, Any] = {"tools": [CLOCK, WEATHER], "tool_choice": named, "max_tokens": 200}
    (choice,) = server.chat(**given).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    streamed = events(server.chat(**given, stream=True))
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert not any(delta.get("content") for delta in deltas)
    first, *further = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert first["function"]["name"] == "weather"
    arguments = [piece["function"]["arguments"] for piece in (first, *further)]
    assert "".join(arguments) == call["function"]["arguments"]
    assert len([piece for piece in arguments if piece]) > 2  # they come as they are written
    assert (deltas[-1], streamed[-1]["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert all(deltas[:-1])
    (choice,) = server.chat(tools=[CLOCK, WEATHER], tool_choice="required", max_tokens=200).json()[
        "choices"
    ]
    assert choice["message"]["tool_calls"][0]["function"]["name"] in ("clock", "weather")


def test_a_strict_function_is_called_by_its_schema(server: Server) -> None:
    """A call that the model makes by itself is held to the parameters of a strict function; text stays free."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    brace = str(server.post("/tokenize", prompt="{").json()["tokens"][0])
    called = server.chat(tools=[strict, CLOCK], logit_bias={brace: 100}, max_tokens=200).json()[
        "choices"
    ][0]["message"]
    (call,) = called["tool_calls"]
    if call["function"]["name"] == "weather":
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    free = server.chat(tools=[strict], logit_bias={brace: -100}, max_tokens=9).json()["choices"][0][
        "message"
    ]
    assert "tool_calls" not in free
    broken = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "nothing"}, "strict": True},
    }
    refused(server.chat(tools=[broken]), "tools")


def test_tools_reach_the_template(server: Server) -> None:
    """The model reads of the functions, but where none may be called; an answer without a call is a text."""
    alone = server.chat().json()
    offered = server.chat(tools=[WEATHER]).json()
    assert offered["usage"]["prompt_tokens"] > alone["usage"]["prompt_tokens"]
    assert "tool_calls" not in offered["choices"][0]["message"]
    assert server.chat(tools=[WEATHER], tool_choice="none").json()["choices"] == alone["choices"]
    unknown = {"type": "function", "function": {"name": "fly"}}
    assert "the request does not have" in refused(
        server.chat(tools=[WEATHER], tool_choice=unknown), "tool_choice"
    )
    refused(server.chat(tool_choice="required"), "tool_choice")


def test_a_chat_with_calls_and_parts(server: Server) -> None:
    """Calls, their results and parts of text are taken; arguments that are no JSON are an error, as are pictures."""
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert server.chat(messages=messages).status_code == 200
    ids = server.post("/tokenize", messages=messages).json()["tokens"]
    text = server.post("/detokenize", tokens=ids).json()["prompt"]
    assert text == "system: Be brief.\nuser: the\ncat\nassistant: \ntool: sunny\n"
    call["function"] = {"name": "weather", "arguments": "Rome"}
    assert server.chat(messages=messages).status_code == 200
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "expected 'text'" in refused(
        server.chat(messages=picture), "messages[0].content[0].type"
    )


@pytest.mark.parametrize(
    "field",
    [
        "best_of",
        "audio",
        "suffix",
        "web_search_options",
    ],
)
def test_what_is_not_supported_is_named(server: Server, field: str) -> None:
    """A field that does nothing here is an error, for it would be missed."""
    values = {"best_of": 3, "suffix": "x"}
    response = (server.complete if field in values else server.chat)(
        **{field: values.get(field, {"a": 1})}
    )
    assert field in refused(response, field)


def test_null_is_as_good_as_nothing(server: Server) -> None:
    """Clients that send every field, most of them null, get the same answer."""
    names = (
        "n",
        "stop",
        "seed",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "user",
        "stream",
    )
    assert server.chat(**dict.fromkeys(names)).json()["choices"] == server.chat().json()["choices"]


def test_tokens_and_text(server: Server) -> None:
    """Token ids of a text lead back to it; either a prompt or messages are given, and ids are those that there are."""
    found = server.post("/tokenize", prompt="the cat sat").json()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "the cat sat"}
    refused(server.post("/tokenize"), "prompt")
    assert "the vocabulary has 400" in refused(
        server.post("/detokenize", tokens=[3, 400]), "tokens"
    )


def test_a_salt_is_taken(server: Server) -> None:
    """Requests of different salts share nothing in the cache."""

    def hits_of(salt: str) -> float:
        before = server.metric("prefix_cache_hits_total")
        assert (
            server.complete(prompt="the cat sat on the mat " * 8, cache_salt=salt).status_code
            == 200
        )
        return server.metric("prefix_cache_hits_total") - before

    assert [hits_of("a") > 0, hits_of("a") > 0, hits_of("b") > 0] == [False, True, False]


def test_a_decoder_has_no_embeddings(server: Server) -> None:
    """Asking for them is an error that says so."""
    assert "generates text" in refused(
        server.post("/v1/embeddings", model=server.model, input="a"), "model"
    )


def test_metrics(server: Server) -> None:
    """Tokens, times and kernels are counted under the names that operators know."""
    before = server.metric("generation_tokens_total")
    server.complete(max_tokens=9, ignore_eos=True)
    assert server.metric("generation_tokens_total") == before + 9
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric("kernel_info") > 0
    assert server.metric("num_requests_running") == 0


def test_decisions(server: Server) -> None:
    """The platform is told with its reasons, and each op with kernel, provider and reason."""
    found = server.get("/v1/decisions").json()
    assert found["platform"] == found["decision"]["chosen"] == current_platform().name
    assert all(row["kernel"] and row["reason"] and row["provider"]["name"] for row in found["ops"])


def test_requests_are_logged_once_and_prompts_are_not(server: Server) -> None:
    """One line of JSON for a request: its id, status, tokens and times, and nothing of its text."""
    response = server.complete(prompt="the naïve mat", max_tokens=3, ignore_eos=True)
    line = server.logged(response)
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert (line["level"], line["client"]) == ("INFO", "127.0.0.1")
    assert (line["status"], line["completion_tokens"], line["path"]) == (200, 3, "/v1/completions")
    assert 0 < line["seconds_to_first_token"] <= line["seconds"]
    assert "naïve" not in "".join(map(str, server.requests()))


def test_the_name_that_a_client_has_for_a_request_is_logged(server: Server) -> None:
    """Unless it is none that a log can have."""
    for given, logged in (("trace-7/a", "trace-7/a"), ('x" , "status": 1', None)):
        answer = server.get("/version", headers={"x-request-id": given})
        assert server.logged(answer).get("client_request_id") == logged


def test_answers_are_counted(server: Server) -> None:
    """By method, path of the interface and status; paths that strangers make up are one."""
    counts = [
        'opgraft:http_requests_total{method="GET",model_name="llama",path="other",status="404"}',
        'opgraft:http_requests_total{method="POST",model_name="llama",path="/v1/completions",status="400"}',
    ]

    def values() -> list[float]:
        lines = dict(line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines())
        assert float(lines["process_resident_memory_bytes"]) > 0
        return [float(lines.get(name, 0)) for name in counts]

    before = values()
    server.get("/made-up")
    server.get("/made-up-too")
    server.complete(max_tokens=-1)
    assert [after - b for after, b in zip(values(), before, strict=True)] == [2, 1]


def test_times_begin_when_the_request_came(server: Server) -> None:
    """The time to the first token in the metrics has the preparation in it, as that in the log has."""
    before = server.metric("time_to_first_token_seconds_sum")
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(60)},
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = server.complete(max_tokens=2, response_format=response_format)
    line = server.logged(answer)
    found = server.metric("time_to_first_token_seconds_sum") - before
    assert found == pytest.approx(line["seconds_to_first_token"], rel=0.25)


def test_state_for_monitors(server: Server) -> None:
    """A ping has no content, by either method, and a request does not count itself as load."""
    for answer in (server.get("/ping"), server.post("/ping")):
        assert (answer.status_code, answer.content) == (200, b"")
    assert server.get("/load").json() == {"server_load": 0}


def test_the_tokenizer(server: Server) -> None:
    """Clients that tokenize by this server find the special tokens and the template."""
    told = server.get("/tokenizer_info").json()
    assert told["chat_template"] == TEMPLATE
    assert told["model_max_length"] == 512
    assert told["vocab_size"] > 1


def test_going_on_with_the_last_message(server: Server) -> None:
    """The prompt ends with the text of the last message, or is not begun as an answer."""
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the dog"}]
    asked = {"messages": messages, "return_token_ids": True}
    answer = server.chat(**asked, continue_final_message=True).json()
    tokens = server.post("/tokenize", prompt="user: the cat\nassistant: the dog").json()["tokens"]
    assert answer["prompt_token_ids"] == tokens
    refused(
        server.chat(**asked, continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
    )


def test_cuts_prompts(server: Server) -> None:
    """The last tokens of a prompt are kept; -1 leaves room for the answer."""
    prompt = "the cat and the dog"
    tokens = server.post("/tokenize", prompt=prompt).json()["tokens"]
    asked = {"prompt": prompt, "return_token_ids": True, "max_tokens": 1}
    (choice,) = server.complete(**asked, truncate_prompt_tokens=2).json()["choices"]
    assert choice["prompt_token_ids"] == tokens[-2:]
    for answer, kept in (({"max_tokens": 1}, 511), ({"max_tokens": 3}, 509), ({}, 512 - 16)):
        long = {"prompt": [5] * 600, "truncate_prompt_tokens": -1, "ignore_eos": True}
        usage = server.complete(**long, **answer).json()["usage"]
        assert usage["prompt_tokens"] == kept
        assert usage["completion_tokens"] == 512 - kept
    said = [{"role": "user", "content": "the cat " * 600}]
    chat = {"messages": said, "truncate_prompt_tokens": -1, "ignore_eos": True}
    usage = server.chat(**chat, max_tokens=None, max_completion_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == 510
    assert server.chat(truncate_prompt_tokens=3).json()["usage"]["prompt_tokens"] == 3
    more = "the cat " * 5000
    (whole,) = server.complete(**{**asked, "prompt": more}, truncate_prompt_tokens=2).json()[
        "choices"
    ]
    assert (
        whole["prompt_token_ids"]
        == server.post("/tokenize", prompt=more[-80:]).json()["tokens"][-2:]
    )
    said = [{"role": "user", "content": more}]
    cut = server.chat(messages=said, truncate_prompt_tokens=3).json()
    assert cut["usage"]["prompt_tokens"] == 3
    assert "use 1 or more" in refused(
        server.complete(**asked, truncate_prompt_tokens=0), "truncate_prompt_tokens"
    )


def test_log_probabilities_of_a_prompt(server: Server) -> None:
    """A completion and a chat have one for each token of the prompt but the first, as an echo has."""
    asked = {"max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 1}
    (choice,) = server.complete(**asked).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(choice["prompt_token_ids"]) - 1
    (echo,) = server.complete(max_tokens=1, echo=True, logprobs=1).json()["choices"]
    told = echo["logprobs"]["token_logprobs"][1:-1]
    tokens = choice["prompt_token_ids"][1:]
    found = [row[str(token)]["logprob"] for token, row in zip(tokens, others, strict=True)]
    assert found == pytest.approx(told, abs=1e-5)
    ranks = [each["rank"] for row in others for each in row.values()]
    assert min(ranks) == 1
    chat = server.chat(**asked).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    refused(server.chat(prompt_logprobs=1, stream=True), "prompt_logprobs")
    refused(server.complete(prompt_logprobs=21), "prompt_logprobs")
    refused(server.complete(prompt_logprobs=-1), "prompt_logprobs")


def test_a_request_without_a_model(server: Server) -> None:
    """It is for the model that is served, on each path."""
    messages = [{"role": "user", "content": "the cat"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "the cat"},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/responses": {"input": "the cat", "max_output_tokens": 2},
        "/v1/messages": {"messages": messages, "max_tokens": 2},
    }
    for path, body in bodies.items():
        answer = server.post(path, **body).json()
        assert answer["model"] == server.model, path


def test_settings(server: Server) -> None:
    """The settings of the server are told by name, with the version and the platform."""
    told = server.get("/server_info").json()
    assert told["settings"]["model.max_model_len"] == "512"
    assert told["settings"]["cache.block_size"] == "4"
    assert told["version"] == server.get("/version").json()["version"]
    assert told["platform"] == current_platform().name


@pytest.fixture(scope="module")
def lenient(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two names, which takes chat templates, of a checkpoint with defaults."""
    folder = tmp_path_factory.mktemp("lenient") / "model"
    shutil.copytree(checkpoint, folder)
    defaults = {"temperature": 0, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    options = ("--server.model_name", "first,second", "--server.request_templates", "true")
    with serving(folder, *options) as running:
        running.model = "second"
        yield running


def test_several_names(lenient: Server) -> None:
    """Each is listed, shown and served; answers have the first."""
    assert [model.id for model in lenient.openai.models.list().data] == ["first", "second"]
    assert lenient.openai.models.retrieve("second").id == "second"
    assert lenient.complete(max_tokens=1).json()["model"] == "first"


def test_a_chat_template_in_a_request(lenient: Server, server: Server) -> None:
    """The operator allows it; the prompt is that of the template."""
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    answer = lenient.chat(chat_template=template, return_token_ids=True).json()
    tokens = lenient.post("/tokenize", prompt="<the cat>").json()["tokens"]
    assert answer["prompt_token_ids"] == tokens
    refused(lenient.chat(chat_template="{% for %}"), "messages")
    assert "server.request_templates" in refused(
        server.chat(chat_template=template), "chat_template"
    )


def test_defaults_of_sampling(lenient: Server) -> None:
    """A request has those of the checkpoint, unless it has its own."""
    body = {"model": "first", "prompt": "the cat", "ignore_eos": True}
    plain = lenient.post("/v1/completions", **body).json()
    assert plain["usage"]["completion_tokens"] == 3
    greedy = lenient.post("/v1/completions", **body, temperature=0).json()
    assert plain["choices"][0]["text"] == greedy["choices"][0]["text"]
    longer = lenient.post("/v1/completions", **body, max_tokens=5).json()
    assert longer["usage"]["completion_tokens"] == 5
