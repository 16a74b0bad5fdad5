"""EleutherAI's evaluation harness, as a library and as a command with a task of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from support.client_questions import MODEL

TEXTS = ("The capital of France is", "Two and two")
DOCUMENTS = [
    {"question": TEXTS[0], "choices": ["cucumber", "Paris"], "answer": 1},
    {"question": "The sky is", "choices": ["blue", "seven"], "answer": 0},
]
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "question",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
TEXT_OF_ANSWER = {
    "output_type": "generate_until",
    "doc_to_text": "question",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(params=["remote", "huggingface"])
def model(base_url: str, tokenizer: Path, request: pytest.FixtureRequest) -> LocalCompletionsAPI:
    """The server as a model, with its own tokenizer, or with one that the harness reads."""
    own = {} if request.param == "remote" else {"tokenizer": str(tokenizer)}
    return LocalCompletionsAPI(
        base_url=f"{base_url}/completions",
        model=MODEL,
        tokenizer_backend=request.param,
        max_length=512,
        max_gen_toks=8,
        max_retries=1,
        **own,
    )


def instances(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def evaluated(folder: Path, task: dict[str, Any], *options: str) -> dict[str, Any]:
    """Run the command on a task, and return its metrics."""
    lines = [json.dumps(document) for document in DOCUMENTS]
    (folder / "documents.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = {"data_files": {"test": str(folder / "documents.jsonl")}}
    data = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    # A file of YAML may be JSON.
    text = json.dumps({"task": "facts", **data, **task})
    (folder / "facts.yaml").write_text(text, encoding="utf-8")
    words = [sys.executable, "-m", "lm_eval", "--tasks", "facts", "--include_path", str(folder)]
    words += ["--output_path", str(folder / "results"), *options]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (folder / "results").rglob("results_*.json")
    return json.loads(report.read_text(encoding="utf-8"))["results"]["facts"]


def test_log_probabilities(model: LocalCompletionsAPI) -> None:
    """A likely continuation has a greater log-probability than an unlikely one."""
    likely, unlikely = model.loglikelihood(
        instances("loglikelihood", (TEXTS[0], " Paris"), (TEXTS[0], " cucumber"))
    )
    assert unlikely[0] < likely[0] < 0


def test_generates(model: LocalCompletionsAPI) -> None:
    """Each prompt gets a text, which stops where the harness asks for it."""
    asked = instances("generate_until", *((text, {"until": ["\n"]}) for text in TEXTS))
    answers = model.generate_until(asked)
    assert len(answers) == len(TEXTS)
    assert all("\n" not in answer for answer in answers)


def test_command(base_url: str, tmp_path: Path) -> None:
    """The command of the docs finds the likely choices."""
    settings = f"model={MODEL},base_url={base_url}/completions,tokenizer_backend=remote"
    options = ("--model", "local-completions", "--model_args", settings)
    assert evaluated(tmp_path, CHOICES, *options)["acc,none"] == 1


def test_command_on_chats(base_url: str, tmp_path: Path) -> None:
    """The command asks with a chat template, and gets an answer to each question."""
    settings = f"model={MODEL},base_url={base_url}/chat/completions"
    options = ("--model", "local-chat-completions", "--model_args", settings)
    found = evaluated(tmp_path, TEXT_OF_ANSWER, *options, "--apply_chat_template")
    assert found["exact_match,none"] <= 1
