"""aiperf, a benchmark of servers, as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.client_docs import command
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, TOOL, Pet

FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}
CALL = {"tools": [TOOL], "tool_choice": "required"}
CONVERSATIONS: list[dict[str, Any]] = [
    {
        "session_id": "talk",
        "turns": [
            {"text": TEXT, "output_length": TOKENS},
            {"text": "And in Rome?", "output_length": TOKENS},
        ],
    },
    {
        "session_id": "call",
        "turns": [{"text": TEXT, "output_length": CALL_TOKENS, "extra": CALL}],
    },
    {
        "session_id": "form",
        "turns": [{"text": TEXT, "output_length": CALL_TOKENS, "extra": {"response_format": FORM}}],
    },
]
"""What is asked by conversation: two turns, a tool, and a form."""


def started(words: list[str], folder: Path) -> Path:
    """Run a benchmark, and return its folder of results."""
    results = folder / "results"
    words = [*words, f"--artifact-dir={results}", "--ui=none"]
    # Offline, aiperf takes no folder for a tokenizer.
    environment = {key: text for key, text in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return results


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
def test_conversations(server: str, tokenizer: Path, tmp_path: Path, streaming: bool) -> None:
    """Two turns, a call and a form are answered, in streams and in one piece."""
    asked = tmp_path / "conversations.jsonl"
    lines = [json.dumps(conversation) for conversation in CONVERSATIONS]
    asked.write_text("\n".join(lines), encoding="utf-8")
    words = [
        "aiperf",
        "profile",
        f"--model={MODEL}",
        f"--url={server}",
        "--endpoint-type=chat",
        f"--tokenizer={tokenizer}",
        f"--input-file={asked}",
        "--custom-dataset-type=multi_turn",
        f"--num-sessions={len(CONVERSATIONS)}",
        "--extra-inputs=temperature:0",
        "--export-outputs-json",
        *(["--streaming"] if streaming else []),
    ]
    results = started(words, tmp_path)
    answers = json.loads((results / "outputs.json").read_text(encoding="utf-8"))["data"]
    texts: dict[str, list[str]] = {}
    for answer in answers:
        texts.setdefault(answer["conversation_id"], []).append(answer["response_text"])
    assert sorted(texts) == ["call", "form", "talk"]
    assert all(texts["talk"])
    assert len(texts["talk"]) == 2
    assert any(city in texts["call"][0] for city in ("Paris", "Rome"))
    assert Pet.model_validate_json(texts["form"][0])


def test_the_command_of_the_page(server: str, tokenizer: Path, tmp_path: Path) -> None:
    """The command of the docs measures answers, and reads the counters of the server."""
    results = started(command("aiperf profile", server, tokenizer), tmp_path)
    measured = json.loads((results / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert measured["request_count"]["avg"] == 8
    assert measured["output_sequence_length"]["avg"] == 64
    assert measured["time_to_first_token"]["avg"] > 0
    counters = (results / "server_metrics_export.json").read_text(encoding="utf-8")
    assert "opgraft" in counters
