"""Fields of OpenAI, Anthropic, vLLM and llama.cpp: none that would change an answer is ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import http_fields
import pytest
from pydantic import ValidationError
from support.servers import Server, error_of

USER = {"role": "user", "content": "the cat"}

IGNORED = {
    "of billing and routing": {"priority", "request_id", "session_id", "workspace_id"},
    "of caches and slots": {"cache_salt", "cache_prompt", "id_slot", "n_cache_reuse"},
    "of caches that servers exchange": {"ec_transfer_params", "kv_transfer_params"},
    "of images and sounds, which no request has": {
        *("media_io_kwargs", "mm_payload", "mm_processor_kwargs", "return_mm_kwargs"),
    },
    "of a context that is cut while an answer grows": {"n_discard", "n_keep"},
    "of samplers that another field switches on, which is refused": {
        *("adaptive_decay", "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold"),
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
    },
    "of reports about the work": {"return_progress", "timings_per_token"},
    "of the pace of a stream": {"sse_ping_interval", "stream_interval"},
    "of llama.cpp's own paths": {"response_fields"},
}
"""By reason, the fields of others that this server ignores and names in a header."""


def test_ignored_fields_change_no_answer() -> None:
    """Each field of another server is known here, unless the field is in the list above."""
    ignored = {field for _, field, *_, own in http_fields.rows() if field and not own}
    listed = {f"`{field}`" for fields in IGNORED.values() for field in fields}
    assert ignored == listed


def default_only() -> Iterator[tuple[str, str]]:
    for path, body in http_fields.bodies().items():
        statuses = {} if body is None else http_fields.statuses(body)
        for field, status in statuses.items():
            if status == "default only":
                yield path, field


@pytest.mark.parametrize(("path", "field"), [*default_only()])
def test_other_values_than_the_default_are_refused(path: str, field: str) -> None:
    """The error is about this field."""
    body = http_fields.bodies()[path]
    assert body is not None
    with pytest.raises(ValidationError, match="not supported") as refused:
        body.model_validate({field: {"another": "value"}})
    found = {each["loc"] for each in refused.value.errors() if each["type"] == "not_followed"}
    assert found == {(field,)}


DEFAULTS = {
    "dry_multiplier": 0.0,
    "grammar": "",
    "mirostat": 0,
    "n_cmpl": 1,
    "n_predict": -1,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "repetition_detection": None,
    "samplers": [
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p"),
        *("top_p", "min_p", "xtc", "temperature"),
    ],
    "top_n_sigma": -1.0,
    "truncation_side": "left",
    "typical_p": 1,
    "vllm_xargs": {},
    "watermarking": False,
}


def test_default_values_are_accepted(server: Server) -> None:
    """They change no answer, and no header names them."""
    response = server.chat(**DEFAULTS)
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == server.chat().json()["choices"]
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("typical_p", 0.5, "typical_p is 0.5, which is not supported: leave it out"),
        ("repeat_penalty", 1.1, "is 1.1, which is not supported: use repetition_penalty"),
        ("truncation_side", "right", 'is "right", which is not supported: truncate_prompt_tokens'),
        ("logprob_token_ids", [5], "is a list, which is not supported: use top_logprobs"),
        ("vllm_xargs", {"a": 1}, "is an object, which is not supported: leave it out"),
        ("watermarking", True, "is true, which is not supported: leave it out"),
        ("typical_p", True, "is true, which is not supported: leave it out"),
    ],
    ids=range(7),
)
def test_a_refusal_names_the_value_and_the_next_step(
    server: Server, field: str, value: Any, message: str
) -> None:
    """So a client sees which part of a request to change."""
    for response in (server.chat(**{field: value}), server.complete(**{field: value})):
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == (field, "unsupported_value")
        assert message in error["message"]


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"grammar": 'root ::= "a" [0-9]'}, "a[0-9]"),
        ({"json_schema": {"enum": ["on", "off"]}}, '"on"|"off"'),
    ],
    ids=range(2),
)
def test_forms_by_the_names_of_llama_cpp(
    server: Server, form: dict[str, Any], pattern: str
) -> None:
    """Answers of both paths have the form."""
    chat = server.chat(**form, n_predict=40, max_tokens=None)
    assert chat.status_code == 200, chat.text
    completion = server.complete(**form, n_predict=40, max_tokens=None)
    texts = [
        chat.json()["choices"][0]["message"]["content"],
        completion.json()["choices"][0]["text"],
    ]
    for text in texts:
        assert re.fullmatch(pattern, text), text


def test_names_of_the_most_tokens(server: Server) -> None:
    """Both paths take each name, and refuse two that differ."""
    for field in ("n_predict", "max_completion_tokens"):
        asked = {"max_tokens": None, field: 3, "ignore_eos": True}
        for response in (server.chat(**asked), server.complete(**asked)):
            assert response.json()["usage"]["completion_tokens"] == 3
    assert error_of(server.chat(n_predict=3, max_tokens=4))["param"] == "n_predict"
    assert server.chat(n_predict=3, max_tokens=3).status_code == 200
    too_many = error_of(server.complete(n_predict=10**9, max_tokens=None))
    assert too_many["message"].startswith("n_predict is 1000000000 after a prompt of")


def test_tokens_of_a_chat_that_goes_on(server: Server) -> None:
    """They are those of the chat's own prompt, and the answer has the text of each on request."""
    chat = {"messages": [USER, {"role": "assistant", "content": "a cat"}]}
    going_on = {**chat, "continue_final_message": True}
    answer = server.post("/tokenize", **going_on, return_token_strs=True).json()
    asked = server.chat(**going_on, return_token_ids=True).json()
    assert answer["tokens"] == asked["prompt_token_ids"]
    assert answer["tokens"] != server.post("/tokenize", **chat).json()["tokens"]
    assert len(answer["token_strs"]) == len(answer["tokens"])
    assert all(isinstance(text, str) and text for text in answer["token_strs"])
    assert "token_strs" not in server.post("/tokenize", **chat).json()


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"messages": [USER], "chat_template": "a"}, "chat_template", "the operator of the server"),
        ({"prompt": "a", "chat_template": "a"}, "chat_template", "needs messages"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message", "needs"),
        ({"content": "a"}, "content", "use prompt"),
        ({"prompt": "a", "with_pieces": True}, "with_pieces", "use return_token_strs"),
    ],
    ids=range(5),
)
def test_fields_that_tokenize_cannot_follow(
    server: Server, body: dict[str, Any], field: str, message: str
) -> None:
    """The error names the field and the next step."""
    response = server.post("/tokenize", **body)
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert message in error_of(response)["message"]


def test_the_documented_versions_are_those_compared() -> None:
    """The table of versions has each of the compared servers with the version in the file of facts."""
    facts = json.loads(http_fields.FACTS.read_text("utf-8"))
    assert [version for _, version in http_fields.versions()] == [
        f"`{each['version']}`" for each in facts.values()
    ]
