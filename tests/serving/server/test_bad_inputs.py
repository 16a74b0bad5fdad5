"""Bad inputs: each is an error that names its field, and nothing of what was asked appears in the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.servers import Server, error_of, expect_idle

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MARKER = "marmalade"
FUNCTION = {"type": "function", "function": {"name": "f"}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PROMPTS: list[tuple[Any, str, str]] = [
    ("", "prompt", "prompt is empty"),
    ([], "prompt", "prompt is empty"),
    ([[]], "prompt", "has no tokens"),
    (["a", ""], "prompt", r"prompt[1] has no tokens"),
    ([1, "a"], "prompt[1]", "expected a whole number"),
    ([[1], [2, "a"]], "prompt[1][1]", "expected a whole number"),
    (["a", 1], "prompt[1]", "expected text"),
    (None, "prompt", "expected text"),
    (5, "prompt", "expected text"),
    ({"a": 1}, "prompt", "expected text"),
    ([-1], "prompt[0]", "expected at least 0"),
    ([400], "prompt", "the vocabulary has 400 (0 to 399)"),
    ([10**30], "prompt", "the vocabulary has 400"),
    ([True], "prompt[0]", "expected a whole number"),
    ([1.5], "prompt[0]", "expected a whole number"),
    (
        [1] * 600,
        "prompt",
        "prompt has 600 tokens and needs room for 3 more, and this model's maximum context length is 512 tokens",
    ),
    ("the cat " * 5000, "prompt", "has a text of 40000 characters, and this server takes 32768"),
    (["a"] * 129, "prompt", "asks for 129 answers (prompts times n), and this server allows 128"),
    ("half a \ud800 pair", "prompt", "half a surrogate pair, '\\ud800', at character 7"),
]
MESSAGES: list[tuple[Any, str, str]] = [
    ([], "messages", "has no messages"),
    ({}, "messages", "expected a list"),
    ("hi", "messages", "expected a list"),
    ([5], "messages[0]", "expected an object"),
    ([{"content": "a"}], "messages[0].role", "is missing"),
    ([{"role": "boss", "content": "a"}], "messages[0].role", "expected 'system', 'developer'"),
    (user(5), "messages[0].content", "expected text, not a number"),
    ([{"role": "user"}], "messages[0].content", "is missing"),
    ([{"role": "system", "contnt": "a"}], "messages[0].content", "is missing"),
    (
        user([{"type": "image_url", "image_url": {"url": "http://x"}}]),
        "messages[0].content[0].type",
        "expected 'text', not 'image_url'",
    ),
    (user("\udfff"), "messages", "half a surrogate pair"),
    (user("the cat " * 5000), "messages", "and this server takes 32768"),
    (
        user("a") * 600,
        "messages",
        "tokens and needs room for 3 more, and this model's maximum context length is 512 tokens",
    ),
]
FIELDS: list[tuple[str, Any, str, str]] = [
    ("model", 5, "model", "expected text"),
    ("temperature", "hot", "temperature", "expected a number, not text"),
    ("temperature", True, "temperature", "expected a number"),
    ("temperature", -1, "temperature", "use 0 for greedy decoding"),
    ("temperature", 10**400, "temperature", "expected a number"),
    ("top_p", 0, "top_p", "above 0 and at most 1"),
    ("top_p", 2, "top_p", "above 0 and at most 1"),
    ("top_k", -2, "top_k", "at least 0"),
    ("min_p", -1, "min_p", "from 0 to 1"),
    ("presence_penalty", 3, "presence_penalty", "from -2 to 2"),
    ("frequency_penalty", -3, "frequency_penalty", "from -2 to 2"),
    ("repetition_penalty", 5e-324, "repetition_penalty", "from 0.001 to 1000"),
    ("n", 0, "n", "an integer of at least 1"),
    ("n", -1, "n", "an integer of at least 1"),
    ("n", 10**9, "n", "asks for 1000000000 answers"),
    ("n", 2.5, "n", "expected a whole number"),
    ("max_tokens", 0, "max_tokens", "at least 1"),
    (
        "max_tokens",
        10**30,
        "max_tokens",
        "this model's maximum context length is 512 tokens: ask for at most",
    ),
    ("min_tokens", 9, "min_tokens", "lower the one or raise the other"),
    ("seed", 0.5, "seed", "expected a whole number"),
    ("stop", [""], "stop", "strings that are not empty"),
    ("stop", ["a"] * 65, "stop", "65 entries of stop, and this server allows 64"),
    ("stop", "a" * 257, "stop", "257 characters of an entry of stop, and this server allows 256"),
    ("stop_token_ids", [-1], "stop_token_ids", "of at least 0"),
    ("stop_token_ids", [1] * 65, "stop_token_ids", "allows 64"),
    ("stop_token_ids", [400], "stop_token_ids", "use 0 to 399"),
    ("bad_words", [""], "bad_words", "strings that are not empty"),
    ("bad_words", ["a"] * 65, "bad_words", "allows 64"),
    ("logit_bias", {"x": 1}, "logit_bias", "'x', which is no token id: use 0 to 399"),
    ("logit_bias", {"400": 1}, "logit_bias", "use 0 to 399"),
    ("logit_bias", {"\u0665": 1}, "logit_bias", "no token id"),
    ("logit_bias", {"5": 101}, "logit_bias", "from -100 to 100"),
    (
        "logit_bias",
        {str(token): 1 for token in range(301)},
        "logit_bias",
        "301 entries of logit_bias",
    ),
    ("stream", "yes", "stream", "expected true or false"),
    ("priority", 0.5, "priority", "expected a whole number"),
    ("cache_salt", 5, "cache_salt", "expected text"),
    ("user", 5, "user", "expected text"),
    ("use_beam_search", True, "use_beam_search", "is not supported: leave it out"),
    ("guided_json", 5, "guided_json", "expected an object"),
    ("structured_outputs", {"json": 5}, "structured_outputs.json", "expected an object"),
    ("guided_json", "{", "guided_json", "is a text that is no JSON: give a JSON schema"),
    ("guided_json", "[]", "guided_json", "is a text without an object"),
    ("guided_regex", "(", "guided_regex", "the regular expression in regex cannot be used"),
    ("guided_choice", [], "guided_choice", "a list of at least one text"),
    ("guided_grammar", 5, "guided_grammar", "expected text"),
    ("structured_outputs", {"regex": "["}, "structured_outputs.regex", "cannot be used"),
    (
        "structured_outputs",
        {"regex": "a", "choice": ["b"]},
        "structured_outputs.choice",
        "and structured_outputs.regex are both given: leave one out",
    ),
    (
        "structured_outputs",
        {"structural_tag": "{}"},
        "structured_outputs.structural_tag",
        "is not supported: use tools, or write a grammar",
    ),
    (
        "structured_outputs",
        {"json": {}, "whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern",
        "is not supported: leave it out",
    ),
    ("allowed_token_ids", [], "allowed_token_ids", "null or a list of token ids"),
    ("allowed_token_ids", [400], "allowed_token_ids", "use 0 to 399"),
    ("allowed_token_ids", [1] * 401, "allowed_token_ids", "and this server allows 400"),
    ("return_token_ids", 1, "return_token_ids", "expected true or false"),
]
COMPLETION_FIELDS: list[tuple[str, Any, str, str]] = [
    (
        "logprobs",
        21,
        "logprobs",
        "asks for 21 log-probabilities of a token, and this server allows 20",
    ),
    ("logprobs", -1, "logprobs", "use 0 to 20"),
    ("echo", "yes", "echo", "expected true or false"),
    # The text may be a part of a prompt, which no log may have.
    ("suffix", MARKER, "suffix", "suffix is a text, which is not supported: leave it out"),
]
CHAT_FIELDS: list[tuple[str, Any, str, str]] = [
    ("logprobs", 3, "logprobs", "expected true or false"),
    ("top_logprobs", 3, "top_logprobs", "needs logprobs: true"),
    ("max_completion_tokens", 10**9, "max_completion_tokens", "ask for at most"),
    ("tools", [{"type": "web"}], "tools[0].type", "expected 'function'"),
    (
        "tools",
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        "tools[0].function.parameters",
        "expected an object",
    ),
    ("tool_choice", "always", "tool_choice", "'none', 'auto' or 'required'"),
    ("tool_choice", FUNCTION, "tool_choice", "which the request does not have: known: none"),
    ("tool_choice", "required", "tool_choice", "'required', and the request has no tools"),
    (
        "chat_template_kwargs",
        {"messages": []},
        "chat_template_kwargs.messages",
        "cannot be given there",
    ),
    (
        "chat_template_kwargs",
        {"add_generation_prompt": 0},
        "chat_template_kwargs.add_generation_prompt",
        "cannot be",
    ),
    ("response_format", form(nested(400)), "response_format", "recursion limit exceeded"),
    (
        "response_format",
        form({"type": "number", "minimum": float("nan")}),
        "response_format",
        "no valid JSON schema",
    ),
    ("response_format", form({"const": "\ud800"}), "response_format", "no valid JSON schema"),
    (
        "response_format",
        form({"type": "string", "pattern": "(("}),
        "response_format",
        "unclosed group",
    ),
    ("response_format", form({"$ref": "#"}), "response_format", "allows no first token"),
    ("response_format", form({"$ref": "file:///etc/passwd"}), "response_format", "cannot be used"),
    (
        "response_format",
        form({"type": "integer", "minimum": 5, "maximum": 3}),
        "response_format",
        "Unsatisfiable",
    ),
    (
        "response_format",
        form({"properties": {f"p{number}": {"type": "string"} for number in range(20000)}}),
        "response_format",
        "too large",
    ),
]
BODIES: list[tuple[bytes, str | None, str]] = [
    (b"", None, "a body of JSON is missing"),
    (b"{", None, "is not valid JSON"),
    (b"{'model': 1}", None, "is not valid JSON"),
    (b'{"model": [}', None, "is not valid JSON: Expecting value at character 11"),
    (b"\xff\xfe\x00", None, "is not UTF-8"),
    (b"null", None, "is no JSON object"),
    (b"[]", None, "is no JSON object"),
    (b"5", None, "is no JSON object"),
    (b'"' + b"a" * 1000 + b'"', None, "is no JSON object"),
    (b"[" * 30_000, None, "nested too deeply"),
    (b'{"a":' * 30_000, None, "nested too deeply"),
    (b'{"model": "llama", "n": ' + b"9" * 5000 + b"}", None, "is not valid JSON"),
    (
        b'{"model": "llama", "temperature": NaN, "prompt": "a"}',
        "temperature",
        "expected a number that is finite",
    ),
    (
        b'{"model": "llama", "temperature": -Infinity, "prompt": "a"}',
        "temperature",
        "expected a number that is finite",
    ),
    (
        b'{"model": "llama", "prompt": "a\\u0000b", "top_p": "\\u0000"}',
        "top_p",
        "expected a number",
    ),
]


OWN_WORDS = (
    *("Input should", "Extra inputs", "Field required", "Value error"),
    *("None", "logits_processors", "SamplingParams", "max_model_len"),
)
"""Wording of pydantic, of Python and of settings, which nobody who sends a request knows."""


def ask(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Send a body as the JSON that Python makes, with what only Python takes for JSON."""
    prompt = {"prompt": MARKER} if path == COMPLETIONS else {"messages": user(MARKER)}
    content = json.dumps(
        {"model": server.model, "max_tokens": 3, "temperature": 1, **prompt, **body}
    )
    return server.send(path, content.encode())


def expect_refused(response: Any, field: str | None, message: str) -> None:
    """Expect an error of the client's making, with its field and without anything of the server's inside."""
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert message in error["message"]
    assert not any(words in error["message"] for words in OWN_WORDS)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert "Traceback" not in response.text
    assert "/llama" not in response.text, "the folder of the checkpoint is nobody's business"
    assert response.headers["x-request-id"]


@pytest.fixture(scope="module", autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """Afterwards nothing runs, the cache is free, requests are answered, and no prompt is in the log."""
    yield
    expect_idle(server)
    assert server.complete(max_tokens=2).status_code == 200
    assert not any(MARKER in line for line in server.log)
    assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize(("prompt", "field", "message"), PROMPTS, ids=range(len(PROMPTS)))
def test_prompts(server: Server, prompt: Any, field: str, message: str) -> None:
    """Of a prompt that cannot be taken the error says why."""
    expect_refused(ask(server, COMPLETIONS, {"prompt": prompt}), field, message)


@pytest.mark.parametrize(("messages", "field", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_messages(server: Server, messages: Any, field: str, message: str) -> None:
    """So it does of messages, down to the part that is at fault."""
    expect_refused(ask(server, CHATS, {"messages": messages}), field, message)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(("name", "value", "field", "message"), FIELDS, ids=range(len(FIELDS)))
def test_fields_of_both(
    server: Server, path: str, name: str, value: Any, field: str, message: str
) -> None:
    """A value of the wrong kind or beyond a limit is told with the limit; so is one that this server cannot follow."""
    expect_refused(ask(server, path, {name: value}), field, message)


@pytest.mark.parametrize(
    ("path", "name", "value", "field", "message"),
    [(COMPLETIONS, *row) for row in COMPLETION_FIELDS] + [(CHATS, *row) for row in CHAT_FIELDS],
    ids=range(len(COMPLETION_FIELDS) + len(CHAT_FIELDS)),
)
def test_fields_of_one(
    server: Server, path: str, name: str, value: Any, field: str, message: str
) -> None:
    """So are those that only one of the two paths has."""
    beside = {"max_tokens": None} if name == "max_completion_tokens" else {}
    expect_refused(ask(server, path, {**beside, name: value}), field, message)


@pytest.mark.parametrize(("body", "field", "message"), BODIES, ids=range(len(BODIES)))
def test_bodies(server: Server, body: bytes, field: str | None, message: str) -> None:
    """What is no JSON, or no object, is told as such."""
    expect_refused(server.send(COMPLETIONS, body), field, message)


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "half a surrogate pair"),
        ("/tokenize", {"prompt": ""}, "prompt", "has no tokens"),
        ("/tokenize", {"prompt": "a " * 20000}, "prompt", "this server takes 32768"),
        (
            "/tokenize",
            {"prompt": "a", "messages": user("a")},
            "prompt",
            "either prompt or messages",
        ),
        ("/tokenize", {"messages": []}, "messages", "has no messages"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "use 0 to 399"),
        ("/detokenize", {"tokens": [5] * 513}, "tokens", "maximum context length is 512 tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "expected at least 0"),
        (
            "/tokenize",
            {"messages": user("a"), "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs.tools",
            "",
        ),
        ("/v1/embeddings", {"model": "llama", "input": "a"}, "model", "generates text"),
    ],
)
def test_other_paths(
    server: Server, path: str, body: dict[str, Any], field: str, message: str
) -> None:
    """Texts and tokens have the same limits everywhere."""
    expect_refused(server.send(path, json.dumps(body).encode()), field, message)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_other_kinds_of_content(server: Server, kind: str | None) -> None:
    """A body that does not say that it is JSON is none, whatever it looks like."""
    body = json.dumps({"model": server.model, "prompt": "a"}).encode()
    response = server.send(COMPLETIONS, body, {} if kind is None else {"content-type": kind})
    expect_refused(response, None, "content-type: application/json")


@pytest.mark.parametrize("model", ["\ud800", "x" * 5000, "../../etc/passwd", "llama/"])
def test_other_models(server: Server, model: str) -> None:
    """A model that is not served is not found, whatever its name looks like."""
    response = ask(server, CHATS, {"model": model})
    assert response.status_code == 404
    assert error_of(response)["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
        ("POST", "/v1/models", 405),
        ("BREW", "/health", 400),
        ("GET", "/v1/nothing", 404),
        ("GET", "/health/", 404),
        ("GET", "/%00", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
        ("GET", "/v1/models/%F0%9F%92%A9", 404),
        ("GET", "/docs", 404),
    ],
)
def test_other_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    """They are errors of the same shape, and no redirections."""
    response = server.request(method, path)
    assert response.status_code == status
    where = status in (404, 405) and "/v1/models/" not in path
    assert ("/openapi.json" in error_of(response)["message"]) == where, (
        "who is lost is told where to look"
    )


def test_what_is_too_long_has_the_code_that_clients_know(server: Server) -> None:
    """A prompt alone, a chat, and a prompt with its answer."""
    long = server.complete(prompt=[5] * 600)
    chat = server.chat(messages=[{"role": "user", "content": "the cat " * 300}])
    both = server.complete(prompt=[5] * 500, max_tokens=100)
    assert {error_of(answer)["code"] for answer in (long, chat, both)} == {
        "context_length_exceeded"
    }


def test_a_huge_top_k_keeps_every_token(server: Server) -> None:
    """A number beyond 64 bits fails neither its request nor the step of all others."""
    expected = server.complete(temperature=1, seed=1).json()["choices"]
    assert server.complete(temperature=1, seed=1, top_k=2**70).json()["choices"] == expected
