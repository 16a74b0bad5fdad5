"""Requests drawn from the published OpenAPI document, and bent: never a 500, never a crash, never a stall."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.servers import OpenClient, Server, error_of, expect_idle, worked

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
OTHERS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/score", "/rerank")
SHORT = {
    "/v1/completions": {"max_tokens": 2},
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
}
"""What keeps an answer short, by path."""

MANY = 60
STALL_SECONDS = 3.0
"""Of the server's processor time, which other work on the machine does not change."""

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "\x00",
            "\ud800",
            "llama",
            "user",
            "system",
            "json_schema",
            "function",
            "required",
            "the cat",
        ]
    ),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module", autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """Afterwards nothing runs and the cache is free."""
    yield
    expect_idle(server)
    assert server.complete(max_tokens=2).status_code == 200


def bodies(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema of the document, one of ten of which is anything at all."""
    right = _right(schema, document)
    return st.integers(0, 9).flatmap(lambda number: ANYTHING if number == 0 else right)


def _right(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return _right(
            document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document
        )
    if "anyOf" in schema:
        return st.one_of([bodies(each, document) for each in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        parts = {name: bodies(each, document) for name, each in schema["properties"].items()}
        required = {name: parts.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=parts)
    if kind == "object":
        return st.dictionaries(st.text(max_size=6), ANYTHING, max_size=3)
    if kind == "array":
        items = bodies(schema["items"], document) if schema.get("items") else ANYTHING
        return st.builds(_many, st.lists(items, max_size=3), st.sampled_from([1, 1, 1, 5000]))
    return {
        "string": st.sampled_from(
            ["llama", "the cat", "", "a" * 300, "the cat " * 30_000, "\ud800"]
        )
        | st.text(max_size=20),
        "integer": st.integers(-1, 600) | st.integers(),
        "number": st.floats(0, 2) | st.floats(),
        "boolean": st.booleans(),
        "null": st.none(),
    }.get(str(kind), ANYTHING)


def _many(items: list[Any], times: int) -> list[Any]:
    """Repeat items, but for large ones: lists of lists of long texts would fill the memory of the test."""
    return items * times if len(json.dumps(items)) < 200 else items


@pytest.mark.parametrize("path", [*PATHS, *OTHERS])
def test_no_body_harms(server: Server, document: dict[str, Any], path: str) -> None:
    """Every answer is one that is documented: 200, or an error of the client's making in the published shape."""
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]

    @settings(
        max_examples=MANY, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(bodies(schema, document), st.booleans())
    def ask(body: Any, served: bool) -> None:
        if served and isinstance(body, dict) and path in SHORT:
            body = {**body, "model": server.model, **SHORT[path]}
        before = worked(server)
        response = client.post(f"{server.url}{path}", content=json.dumps(body), headers=kind)
        assert worked(server) - before < STALL_SECONDS, f"a stall for {json.dumps(body)[:300]}"
        assert response.status_code in (200, 400, 404), (
            f"{response.status_code}: {response.text}, for {body!r}"
        )
        if response.status_code != 200:
            told = response.json()["error"] if "/messages" in path else error_of(response)
            assert told["message"]
            assert "4XX" in operation["responses"]

    kind = {"content-type": "application/json"}
    with OpenClient(timeout=60) as client:
        ask()


HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "content-type",
            "accept",
            "authorization",
            "origin",
            "x-request-id",
            "expect",
            "cookie",
            "range",
        ]
    )
    | st.from_regex("[a-z][a-z-]{0,20}", fullmatch=True),
    st.sampled_from(
        [
            "application/json",
            "text/event-stream",
            "application/json; charset=utf-16",
            "Bearer x",
            "*/*",
        ]
    )
    | st.from_regex("[ -~]{0,60}", fullmatch=True),
    max_size=5,
).map(
    lambda found: {name: value.strip() for name, value in found.items() if name not in OWN_HEADERS}
)
OWN_HEADERS = (
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
)
"""Those that change how a request is sent; test_sockets.py has them."""


def test_no_head_harms(server: Server) -> None:
    """Whatever method, path, query and headers are sent, the answer is one of those that are documented."""

    @settings(
        max_examples=MANY, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"]),
        st.sampled_from(
            [
                *PATHS,
                "/",
                "/health",
                "/v1/models",
                "/v1/models/x",
                "/metrics",
                "/v1/decisions",
                "/x",
            ]
        ),
        st.text(max_size=30),
        HEADERS,
        st.sampled_from([b"", b"{}", b"[]", b"\xff"]),
    )
    def ask(method: str, path: str, query: str, headers: dict[str, str], body: bytes) -> None:
        url = httpx.URL(f"{server.url}{path}", params={"q": query, query[:5]: "1"})
        response = client.request(method, url, headers=headers, content=body)
        assert response.status_code < 500, f"{response.status_code}: {response.text}"
        if (
            response.status_code >= 400
            and method != "HEAD"
            and response.headers["content-type"] == "application/json"
        ):
            assert error_of(response)["message"]

    with OpenClient(timeout=60) as client:
        ask()
