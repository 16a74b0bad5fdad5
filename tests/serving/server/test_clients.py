"""Clients that others wrote: the official one's structured answers, curl, and that of Hugging Face."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from typing import Any, Literal

import openai
import pydantic
import pytest
from support.servers import Server

CURL = shutil.which("curl")
QUESTION = [{"role": "user", "content": "the cat"}]


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]


def closing(server: Server) -> dict[str, int]:
    """A bias by which a model of random weights closes what it has opened."""
    (token,) = server.post("/tokenize", prompt="}").json()["tokens"]
    return {str(token): 100}


def test_structured_answers_of_the_official_client(server: Server) -> None:
    """A class of pydantic comes back as an object, from the whole answer and from the events of a stream."""
    given: dict[str, Any] = {
        "model": server.model,
        "messages": QUESTION,
        "logit_bias": closing(server),
        "max_tokens": 60,
    }
    with server.openai as client:
        parsed = client.chat.completions.parse(**given, response_format=Pet)
        assert parsed.choices[0].message.parsed in (Pet(kind="cat"), Pet(kind="dog"))
        with client.chat.completions.stream(**given, response_format=Pet) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Pet)


def test_the_official_asynchronous_client(server: Server) -> None:
    """A whole answer and a stream have the same text, and leaving a stream early is no error."""
    given: dict[str, Any] = {
        "model": server.model,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 8,
    }

    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.chat.completions.create(**given)
            parts = [
                part async for part in await client.chat.completions.create(**given, stream=True)
            ]
            async with await client.chat.completions.create(**given, stream=True) as left:
                async for _ in left:
                    break
        return whole.choices[0].message.content, "".join(
            part.choices[0].delta.content or "" for part in parts
        )

    whole, streamed = asyncio.run(ask())
    assert whole == streamed


def curl(server: Server, path: str, *options: str) -> str:
    assert CURL is not None
    command = [
        CURL,
        "--silent",
        "--show-error",
        "--max-time",
        "60",
        *options,
        f"{server.url}{path}",
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
def test_curl(server: Server) -> None:
    """It gets an answer, a stream event by event, and the status of an error."""
    body = json.dumps(
        {"model": server.model, "messages": QUESTION, "temperature": 0, "max_tokens": 4}
    )
    kind = ("--header", "content-type: application/json")
    whole = json.loads(curl(server, "/v1/chat/completions", *kind, "--data", body))
    assert whole["usage"]["completion_tokens"] <= 4
    streamed = json.dumps({**json.loads(body), "stream": True})
    lines = curl(server, "/v1/chat/completions", "--no-buffer", *kind, "--data", streamed).split(
        "\n\n"
    )
    assert lines[-2:] == ["data: [DONE]", ""]
    text = "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines[:-2]
    )
    assert text == whole["choices"][0]["message"]["content"]
    assert curl(server, "/v1/completions", "--data", body, "--write-out", "%{http_code}").endswith(
        "400"
    )


def test_the_client_of_hugging_face(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code for OpenAI's interface reads whole answers, streams, and errors."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)  # it asks this server alone
    given: dict[str, Any] = {"model": server.model, "temperature": 0, "max_tokens": 8}
    # Sockets that stay open would fail a later test.
    with contextlib.ExitStack() as opened:
        opened.callback(hub.close_session)
        client = opened.enter_context(
            hub.InferenceClient(base_url=f"{server.url}/v1", api_key="none")
        )
        whole = client.chat_completion(QUESTION, **given)
        text = whole.choices[0].message.content
        assert whole.usage.completion_tokens <= 8
        streamed = client.chat_completion(QUESTION, **given, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
        with pytest.raises(hub.errors.HfHubHTTPError, match="ask for at most"):
            client.chat_completion(QUESTION, model=server.model, max_tokens=10**9)
