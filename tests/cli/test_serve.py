"""``opgraft serve`` before it serves."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

_SHOW = """
import os
from types import SimpleNamespace
from opgraft.cli import serve
from opgraft.cli.output import echo
from opgraft.registry.state import host_state

def show(*_):
    settings = host_state().settings()
    echo(f"{settings.config.cpu_keep_memory} {settings.origins['cpu_keep_memory']}")
    echo(" ".join(os.environ[name] for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")))

serve._server = lambda: SimpleNamespace(serve=show)
serve.command(["minilm"])
"""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "True opgraft serve 64 64"),
        (
            {"OPGRAFT_CPU_KEEP_MEMORY": "0", "LRU_CACHE_CAPACITY": "7"},
            "False OPGRAFT_CPU_KEEP_MEMORY 64 7",
        ),
    ],
)
def test_memory_is_kept_unless_an_operator_says_otherwise(
    warm_python: str, given: dict[str, str], shown: str
) -> None:
    """Freed memory stays, and the shapes that libraries keep are bounded."""
    left = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    environment = {**left, "OPGRAFT_PLUGINS": "", **given}
    result = subprocess.run(
        [warm_python, "-c", _SHOW], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split() == shown.split(), result.stderr


_ADAPTERS = """
import sys
from types import SimpleNamespace
from opgraft.cli import serve
from opgraft.cli.output import echo

def show(model, config, *_):
    echo(f"{config.lora.enabled} {dict(config.server.lora_modules)}")

serve._server = lambda: SimpleNamespace(serve=show)
for given in eval(sys.argv[1]):
    try:
        serve.command(["minilm", *given], standalone_mode=False)
    except Exception as error:
        echo(f"{type(error).__name__}: {error}")
"""


def test_adapters_in_the_spellings_of_vllm(warm_python: str, tmp_path: Path) -> None:
    """Words and objects name adapters, and contradictions are found before the model is loaded."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    written = json.dumps({"name": "a", "path": str(one)})
    missing = str(tmp_path / "missing")
    cases = [
        ["--enable-lora", "--lora-modules", f"a={one}", f"b={other}"],
        ["--lora-modules", written, json.dumps({"b": str(other)}), "--enable-lora"],
        ["--lora-modules", f"a={one}"],
        ["--enable-lora", "--lora-modules", f"a={missing}"],
        ["--enable-lora", "--lora-modules", f"a={one}", "--model-name", "a"],
        ["--enable-lora", "--lora.max_cpu_loras", "3"],
    ]
    result = subprocess.run(
        [warm_python, "-c", _ADAPTERS, repr(cases)],
        env={**os.environ, "OPGRAFT_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    both = f"True {{'a': '{one}', 'b': '{other}'}}"
    words = [both, both, "lora.enabled = false", missing, "both have the name 'a'", "max_loras = 8"]
    lines = result.stdout.splitlines()
    assert len(lines) == len(words), result.stdout + result.stderr
    for line, word in zip(lines, words, strict=True):
        assert word in line
