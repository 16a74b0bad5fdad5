"""promptfoo, which tests prompts, with a file of settings as its users write it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml
from support.client_docs import block
from support.client_questions import CALL_TOKENS, MODEL, TEXT, TOKENS, TOOL, Pet

CHAT = """[
{% for turn in _conversation %}
  {"role": "user", "content": {{ turn.input | dump }}},
  {"role": "assistant", "content": {{ turn.output | dump }}},
{% endfor %}
  {"role": "user", "content": {{ question | dump }}}
]"""
"""A prompt of all turns before, as promptfoo's own examples write it."""
PROGRAM = Path(os.environ["CLIENTS_NODE"], "node_modules", ".bin", "promptfoo")
SCHEMA = {**Pet.model_json_schema(), "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def provider(kind: str, base_url: str, label: str, **settings: Any) -> dict[str, Any]:
    config = {"apiBaseUrl": base_url, "apiKey": "none", "temperature": 0, **settings}
    return {"id": f"openai:{kind}:{MODEL}", "label": label, "config": config}


def asked(label: str, *checks: dict[str, Any], question: str = TEXT) -> dict[str, Any]:
    metadata = {"conversationId": label}
    return {
        "providers": [label],
        "vars": {"question": question},
        "metadata": metadata,
        "assert": list(checks),
    }


def evaluated(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the evaluation, and return its results in the order of the tests."""
    # A file of YAML may be JSON.
    (folder / "promptfooconfig.yaml").write_text(json.dumps(settings), encoding="utf-8")
    command = [PROGRAM, "eval", "--no-cache", "--no-progress-bar", "--output", "results.json"]
    environment = {**os.environ, "PROMPTFOO_CONFIG_DIR": str(folder / "state")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    return sorted(results["results"], key=lambda result: result["testIdx"])


def test_chats(base_url: str, tmp_path: Path) -> None:
    """Two turns, a forced call that fits its tool, and a form."""
    results = evaluated(
        tmp_path,
        {
            "prompts": [CHAT],
            "providers": [
                provider("chat", base_url, "talk", max_tokens=TOKENS),
                provider(
                    "chat",
                    base_url,
                    "call",
                    max_tokens=CALL_TOKENS,
                    tools=[TOOL],
                    tool_choice="required",
                ),
                provider("chat", base_url, "form", max_tokens=CALL_TOKENS, response_format=FORM),
            ],
            "tests": [
                asked("talk", {"type": "javascript", "value": "output.length > 0"}),
                asked("talk", question="And in Rome?"),
                asked("call", {"type": "is-valid-openai-tools-call"}),
                asked("form", {"type": "is-json", "value": SCHEMA}),
            ],
        },
    )
    outputs = [result["response"]["output"] for result in results]
    sent = json.loads(results[1]["prompt"]["raw"])
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == outputs[0]
    assert outputs[1]


def test_responses(base_url: str, tmp_path: Path) -> None:
    """The newer endpoint answers, with a form too."""
    results = evaluated(
        tmp_path,
        {
            "prompts": ["{{ question }}"],
            "providers": [
                provider("responses", base_url, "talk", max_output_tokens=CALL_TOKENS),
                provider(
                    "responses",
                    base_url,
                    "form",
                    max_output_tokens=CALL_TOKENS,
                    response_format=FORM,
                ),
            ],
            "tests": [asked("talk"), asked("form", {"type": "is-json", "value": SCHEMA})],
        },
    )
    assert all(result["response"]["output"] for result in results)


def test_completions(base_url: str, tmp_path: Path) -> None:
    """The older endpoint answers."""
    settings = {
        "prompts": ["{{ question }}"],
        "providers": [provider("completion", base_url, "talk", max_tokens=TOKENS)],
        "tests": [asked("talk", question="The capital of France is")],
    }
    (result,) = evaluated(tmp_path, settings)
    assert result["response"]["output"]


def test_the_settings_of_the_page(server: str, tmp_path: Path) -> None:
    """The provider of the docs answers."""
    settings = yaml.safe_load(block("providers:", server))
    settings |= {"prompts": ["{{ question }}"], "tests": [{"vars": {"question": TEXT}}]}
    (result,) = evaluated(tmp_path, settings)
    assert result["response"]["output"]
