"""Adapters of a server: chosen by the field ``model``, loaded and unloaded while it serves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import adapters
from support.servers import Server, error_of, serving, until

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore::UserWarning")

PROMPT = [5, 17, 30, 3, 41]


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters for the model of the server."""
    root = tmp_path_factory.mktemp("adapters")
    return [adapters.saved_adapter(checkpoint, root / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def answers(checkpoint: Path, folders: list[Path]) -> list[list[int]]:
    """The answers of PEFT to the prompt: of the model, and with each adapter."""
    found = [adapters.expected(checkpoint, each, [PROMPT]) for each in (None, *folders)]
    tokens = [answer[0] for answer in found]
    assert tokens[0] != tokens[1] != tokens[2]
    return tokens


@pytest.fixture(scope="module")
def running(checkpoint: Path, folders: list[Path]) -> Iterator[Server]:
    """A server with the first adapter, whose adapters may be changed."""
    options = ["--lora-modules", f"first={folders[0]}", "--lora.enabled", "true"]
    # One stays in memory, so that adapters are read again.
    options += [
        "--server.lora_updates",
        "true",
        "--lora.max_cpu_loras",
        "1",
        "--lora.max_loras",
        "1",
    ]
    with serving(checkpoint, *options) as found:
        yield found


def answer(running: Server, model: str | None) -> dict[str, Any]:
    """Ask for the answer of a model, and return it."""
    response = running.post(
        "/v1/completions",
        model=model,
        prompt=PROMPT,
        temperature=0,
        max_tokens=adapters.LENGTH,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert response.status_code == 200, response.text
    return response.json()


def tokens(running: Server, model: str | None) -> list[int]:
    return answer(running, model)["choices"][0]["token_ids"]


def names(running: Server) -> list[str]:
    return [card["id"] for card in running.get("/v1/models").json()["data"]]


def test_adapters_are_models(running: Server, answers: list[list[int]]) -> None:
    """An adapter of the command line is listed under its name, and its name chooses it."""
    base, adapter = running.get("/v1/models").json()["data"]
    assert adapter == {**base, "id": "first", "parent": base["id"]}
    assert running.get("/v1/models/first").json() == adapter
    assert tokens(running, None) == tokens(running, base["id"]) == answers[0]
    assert tokens(running, "first") == answers[1]
    assert answer(running, "first")["model"] == "first"
    message = {"role": "user", "content": "Hello"}
    chat = running.chat(model="first", messages=[message], max_tokens=2).json()
    assert chat["model"] == "first"
    body = {"model": "first", "messages": [message], "max_tokens": 2}
    assert running.post("/v1/messages", **body).json()["model"] == "first"
    asked = running.post("/v1/responses", model="first", input="Hello", max_output_tokens=2)
    assert asked.json()["model"] == "first"


def test_adapters_come_and_go(
    running: Server, folders: list[Path], answers: list[list[int]], tmp_path: Path
) -> None:
    """A loaded adapter answers at once; an unloaded one is not found; a name may be used again."""
    load = {"lora_name": "second", "lora_path": str(folders[1])}
    loaded = running.post("/v1/load_lora_adapter", **load)
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'second' added successfully."
    assert names(running)[1:] == ["first", "second"]
    assert tokens(running, "second") == answers[2]
    again = running.post("/v1/load_lora_adapter", **load)
    assert again.status_code == 400
    assert "the name 'second' is taken" in error_of(again)["message"]
    other = {**load, "lora_path": str(folders[0]), "load_inplace": True}
    assert running.post("/v1/load_lora_adapter", **other).status_code == 200
    assert tokens(running, "second") == answers[1]
    gone = running.post("/v1/unload_lora_adapter", lora_name="second", lora_int_id=2)
    assert gone.text == "Success: LoRA adapter 'second' removed successfully."
    assert names(running)[1:] == ["first"]
    for path in ("/v1/unload_lora_adapter", "/v1/completions"):
        response = running.post(path, lora_name="second", model="second", prompt=PROMPT)
        assert response.status_code == 404, response.text
    broken = running.post("/v1/load_lora_adapter", lora_name="third", lora_path=str(tmp_path))
    assert broken.status_code == 400
    assert "has no adapter_config.json" in error_of(broken)["message"]
    assert names(running)[1:] == ["first"]
    assert tokens(running, None) == answers[0]


def test_an_adapter_that_requests_use_is_unloaded(
    running: Server, folders: list[Path], answers: list[list[int]]
) -> None:
    """Requests that run go on with their adapter while it is unloaded."""
    load = {"lora_name": "short", "lora_path": str(folders[1])}
    assert running.post("/v1/load_lora_adapter", **load).status_code == 200
    body = {"model": "short", "prompt": PROMPT, "max_tokens": 400, "return_token_ids": True}
    undisturbed = running.complete(ignore_eos=True, **body).json()["choices"][0]["token_ids"]
    assert undisturbed[: adapters.LENGTH] == answers[2]
    later = [running.later(lambda: running.complete(ignore_eos=True, **body)) for _ in range(3)]
    until(lambda: running.metric("num_requests_running") > 0)
    assert running.post("/v1/unload_lora_adapter", lora_name="short").status_code == 200
    for each in later:
        found = each.result().json()["choices"][0]["token_ids"]
        assert found == undisturbed


def test_an_adapter_that_cannot_be_read_again(
    running: Server, folders: list[Path], answers: list[list[int]], tmp_path: Path
) -> None:
    """A client of an adapter whose files are gone does not learn where they were; the log tells."""
    folder = tmp_path / "secret"
    shutil.copytree(folders[1], folder)
    load = {"lora_name": "moved", "lora_path": str(folder)}
    assert running.post("/v1/load_lora_adapter", **load).status_code == 200
    assert tokens(running, "first") == answers[1]
    folder.rename(tmp_path / "elsewhere")
    response = running.post("/v1/completions", model="moved", prompt=PROMPT)
    assert response.status_code == 503
    assert "secret" not in response.text
    assert error_of(response)["code"] == "adapter_unusable"
    assert str(folder) in running.logged(response)["cause"]
    (tmp_path / "elsewhere").rename(folder)
    assert tokens(running, "moved") == answers[2]
    assert running.post("/v1/unload_lora_adapter", lora_name="moved").status_code == 200


def test_an_adapter_that_is_gone_while_a_request_waits(
    running: Server, folders: list[Path], tmp_path: Path
) -> None:
    """The request gets the answer of one that comes later, and the others are served."""
    folder = tmp_path / "secret"
    shutil.copytree(folders[1], folder)
    for name, path in (("moved", folder), ("second", folders[1])):
        load = {"lora_name": name, "lora_path": str(path)}
        assert running.post("/v1/load_lora_adapter", **load).status_code == 200
    body = {"prompt": PROMPT, "ignore_eos": True}
    first = running.later(lambda: running.complete(model="first", max_tokens=400, **body))
    until(lambda: running.metric("num_requests_running") > 0)
    waiting = running.later(lambda: running.complete(model="moved", max_tokens=2, **body))
    until(lambda: running.metric("num_requests_waiting") > 0)
    folder.rename(tmp_path / "elsewhere")
    # This adapter takes the place of the waiting one in memory, which then is read again.
    other = running.later(lambda: running.complete(model="second", max_tokens=2, **body))
    response = waiting.result()
    assert response.status_code == 503
    assert "secret" not in response.text
    assert error_of(response)["code"] == "adapter_unusable"
    assert first.result().status_code == other.result().status_code == 200
    for name in ("moved", "second"):
        assert running.post("/v1/unload_lora_adapter", lora_name=name).status_code == 200


def test_a_server_keeps_its_adapters(server: Server, folders: list[Path]) -> None:
    """Without the operator's permission nobody changes the adapters."""
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        response = server.post(path, lora_name="first", lora_path=str(folders[0]))
        assert response.status_code == 403
        assert "unless server.lora_updates allows" in error_of(response)["message"]
