"""Open WebUI, with the server as its connection, asked through its own API as its pages ask."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.client_questions import (
    CALL_TOKENS,
    MODEL,
    NEXT,
    QUESTION,
    TOKENS,
    TOOL,
    Pet,
    get_weather,
)

PATIENCE = 300.0
"""Seconds until the program answers."""
SETTINGS = {
    "ENABLE_OLLAMA_API": "False",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "OFFLINE_MODE": "True",
    # Otherwise it loads an encoder from the Hugging Face Hub at its start.
    "RAG_EMBEDDING_ENGINE": "openai",
    "WEBUI_AUTH": "False",
}
GIVEN: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS}
CALL: dict[str, Any] = {**GIVEN, "tools": [TOOL], "max_tokens": CALL_TOKENS}
FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}


@pytest.fixture(scope="module")
def webui(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Start ``open-webui serve``, and sign in."""
    folder = tmp_path_factory.mktemp("webui")
    connection = {"OPENAI_API_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
    environment = {**os.environ, **SETTINGS, **connection, "DATA_DIR": str(folder / "data")}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                _wait(client, process)
                account = {"email": "admin@localhost", "password": "admin"}
                signed_in = client.post("/api/v1/auths/signin", json=account).raise_for_status()
                client.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
                yield client
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.seek(0)
            sys.stdout.write(log.read())


def _wait(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            if client.get("/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    pytest.fail("Open WebUI did not start")


def answer(webui: httpx.Client, messages: list[Any], **given: Any) -> dict[str, Any]:
    """Return the choice of an answer in one piece."""
    body = {"messages": messages, **given}
    response = webui.post("/api/chat/completions", json=body)
    assert response.is_success, response.text
    return response.json()["choices"][0]


def chunks(webui: httpx.Client, **body: Any) -> Iterator[dict[str, Any]]:
    """Yield the first choices of a stream."""
    with webui.stream("POST", "/api/chat/completions", json={**body, "stream": True}) as lines:
        assert lines.is_success
        for line in lines.iter_lines():
            text = line.removeprefix("data: ")
            if text.startswith("{") and json.loads(text).get("choices"):
                yield json.loads(text)["choices"][0]


def test_connection(webui: httpx.Client, base_url: str) -> None:
    """The button that checks a connection is content, and the list has the model."""
    given = {"url": base_url, "key": "none"}
    assert webui.post("/openai/verify", json=given).is_success
    listed = webui.get("/api/models").raise_for_status().json()["data"]
    assert MODEL in [model["id"] for model in listed]


def test_two_turns(webui: httpx.Client) -> None:
    """The message of an answer goes back, and a second answer comes."""
    first = answer(webui, [QUESTION], **GIVEN)["message"]
    assert answer(webui, [QUESTION, first, NEXT], **GIVEN)["message"]["content"]


def test_tools(webui: httpx.Client) -> None:
    """A forced call has arguments of the schema, and its result goes back."""
    choice = answer(webui, [QUESTION], tool_choice="required", **CALL)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (call,) = message["tool_calls"]
    result = get_weather(**json.loads(call["function"]["arguments"]))
    told = {"role": "tool", "tool_call_id": call["id"], "content": result}
    given = {**CALL, "max_tokens": TOKENS, "tool_choice": "none"}
    assert answer(webui, [QUESTION, message, told], **given)["message"]["content"]


def test_structured_output(webui: httpx.Client) -> None:
    """A JSON schema is the form of an answer."""
    given = {**GIVEN, "max_tokens": CALL_TOKENS, "response_format": FORM}
    content = answer(webui, [QUESTION], **given)["message"]["content"]
    assert Pet.model_validate_json(content)


def test_streams(webui: httpx.Client) -> None:
    """The parts of a stream are the text of the whole answer."""
    parts = [
        each["delta"].get("content") or "" for each in chunks(webui, messages=[QUESTION], **GIVEN)
    ]
    assert len(parts) > 2
    assert "".join(parts) == answer(webui, [QUESTION], **GIVEN)["message"]["content"]


def test_a_chat_of_the_page(webui: httpx.Client) -> None:
    """A chat that the page starts is answered in the background, and gets a second turn."""
    chat = ""
    parent: str | None = None
    history: list[Any] = []
    for question in (QUESTION, NEXT):
        asked, answered = str(uuid.uuid4()), str(uuid.uuid4())
        history.append(question)
        body = {
            "model": MODEL,
            "messages": history,
            "stream": True,
            "params": {"max_tokens": TOKENS, "temperature": 0},
            "chat_id": chat,
            "id": answered,
            "parent_id": parent,
            "session_id": str(uuid.uuid4()),
            "user_message": {"id": asked, "parentId": parent, "childrenIds": [], **question},
        }
        started = webui.post("/api/chat/completions", json=body)
        assert started.is_success, started.text
        chat = chat or started.json()["chat_id"]
        content = _saved(webui, chat, answered)
        history.append({"role": "assistant", "content": content})
        parent = answered
    assert len(history) == 4


def _saved(webui: httpx.Client, chat: str, message: str) -> str:
    """Wait for the answer in the saved chat, and return its text."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        saved = webui.get(f"/api/v1/chats/{chat}").raise_for_status().json()
        found = saved["chat"]["history"]["messages"].get(message, {})
        assert "error" not in found, found["error"]
        if found.get("done"):
            assert found["content"]
            return str(found["content"])
        time.sleep(1)
    pytest.fail(f"no answer in the chat {saved}")
