"""The command-line tool llm, with the server as an extra model of its file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, Pet

FUNCTION = """
def get_weather(city: str) -> str:
    "Return the weather of a city."
    return f"It is sunny in {city}."
"""
OPTIONS = ("-o", "max_tokens", str(TOKENS), "-o", "temperature", "0")


@pytest.fixture(autouse=True)
def _models(base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "- model_id: served",
        f"  model_name: {MODEL}",
        f"  api_base: {base_url}",
        "  api_key_name: served",
        "  supports_schema: true",
        "  supports_tools: true",
    )
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(lines))
    (tmp_path / "keys.json").write_text(json.dumps({"served": "none"}))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def ask(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_turns() -> None:
    """A prompt streams its answer, and a chat goes on."""
    first = ask("-m", "served", TEXT, *OPTIONS)
    assert first.strip()
    assert ask("-c", "And in Rome?", *OPTIONS).strip()


def test_a_stream_and_a_whole_answer() -> None:
    """Both have the same text."""
    assert ask("-m", "served", TEXT, *OPTIONS) == ask("-m", "served", "--no-stream", TEXT, *OPTIONS)


def test_tools() -> None:
    """A tool is called and runs, and the server takes its result.

    llm cannot force a call. An answer that must be JSON repeats the call of the question, and so
    does the answer to the result, so that llm stops at its limit.
    """
    question = 'Answer with {"name": "get_weather", "arguments": {"city": "Paris"}}'
    options = (
        "-o",
        "json_object",
        "1",
        "-o",
        "max_tokens",
        str(CALL_TOKENS),
        "-o",
        "temperature",
        "0",
    )
    tools = ("--functions", FUNCTION, "--tools-debug", "--chain-limit", "2")
    done = run("-m", "served", *tools, question, *options)
    assert "Tool call: get_weather({'city': 'Paris'})\n  It is sunny in Paris." in done.stderr
    assert done.returncode == 0 or "Chain limit of 2 exceeded" in done.stderr, done.stderr


def test_structured_output() -> None:
    """A JSON schema is the form of an answer."""
    schema = json.dumps(Pet.model_json_schema())
    answer = ask("-m", "served", "--no-stream", "--schema", schema, TEXT, "-o", "temperature", "0")
    assert Pet.model_validate_json(answer)
