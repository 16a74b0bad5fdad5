"""guidellm, a benchmark of servers, as its users start it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.client_docs import command
from support.client_questions import CALL_TOKENS, MODEL, TOKENS, TOOL, Pet

PROMPT = 16
FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}


def started(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def benchmark(server: str, tokenizer: Path, tmp_path: Path) -> Any:
    """A function that runs a benchmark, and returns the requests that were answered."""

    def run(data: dict[str, Any], requests: int, **backend: Any) -> list[dict[str, Any]]:
        given = {"kind": "openai_http", "target": server, "model": MODEL, **backend}
        report = tmp_path / "report.json"
        data = {"kind": "synthetic_text", "prompt_tokens": PROMPT, **data}
        words = [
            "guidellm",
            "run",
            "--disable-console-interactive",
            f"--backend={json.dumps(given)}",
            f"--tokenizer=kind=huggingface_auto,model={tokenizer}",
            f"--data={json.dumps(data)}",
            "--profile=kind=synchronous",
            f"--constraint=kind=max_requests,count={requests}",
            f"--output=kind=json,path={report}",
        ]
        started(words, tmp_path)
        (measured,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
        assert not measured["requests"]["errored"], measured["requests"]["errored"]
        return measured["requests"]["successful"]

    return run


def test_two_turns_of_streams(benchmark: Any) -> None:
    """A conversation streams two answers of the length that is asked for."""
    answers = benchmark({"turns": 2, "output_tokens": TOKENS}, requests=2)
    assert [answer["output_metrics"]["text_tokens"] for answer in answers] == [TOKENS, TOKENS]
    first, second = (answer["input_metrics"]["text_tokens"] for answer in answers)
    assert first > PROMPT
    assert second > first + TOKENS
    assert all(answer["info"]["timings"]["token_iterations"] > 2 for answer in answers)


def test_whole_answers(benchmark: Any) -> None:
    """A benchmark without streams gets the same lengths."""
    (answer,) = benchmark({"output_tokens": TOKENS}, requests=1, stream=False)
    assert answer["output_metrics"]["text_tokens"] == TOKENS
    assert answer["output"]


def test_completions(benchmark: Any) -> None:
    """The older endpoint streams as well."""
    (answer,) = benchmark({"output_tokens": TOKENS}, 1, request_format="/v1/completions")
    assert answer["output_metrics"]["text_tokens"] == TOKENS


def test_two_turns_of_responses(benchmark: Any) -> None:
    """The server keeps the first turn of a conversation."""
    given = {"request_format": "/v1/responses", "server_history": True}
    first, second = benchmark({"turns": 2, "output_tokens": TOKENS}, 2, **given)
    before = first["input_metrics"]["text_tokens"] + TOKENS
    assert second["input_metrics"]["text_tokens"] > before


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_tools(benchmark: Any, path: str) -> None:
    """A forced call has arguments of the schema, and its result goes back."""
    data = {"tool_call_turns": 1, "tools": [TOOL], "output_tokens": TOKENS}
    called, answered = benchmark(data, requests=2, request_format=path)
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert answered["output"]


def test_structured_output(benchmark: Any) -> None:
    """A JSON schema is the form of each answer."""
    extras = {"body": {"response_format": FORM, "temperature": 0}}
    (answer,) = benchmark({}, requests=1, max_tokens=CALL_TOKENS, extras=extras)
    assert Pet.model_validate_json(answer["output"])


def test_the_command_of_the_page(server: str, tokenizer: Path, tmp_path: Path) -> None:
    """The command of the docs measures all its requests."""
    started(command("guidellm run", server, tokenizer), tmp_path)
    (measured,) = json.loads((tmp_path / "benchmarks.json").read_text("utf-8"))["benchmarks"]
    assert len(measured["requests"]["successful"]) == 8
    assert not measured["requests"]["errored"]
