"""``opgraft serve`` before it serves."""

from __future__ import annotations

import os
import subprocess
import sys

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
    given: dict[str, str], shown: str
) -> None:
    """Freed memory stays, and the shapes that libraries keep are bounded."""
    left = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    environment = {**left, "OPGRAFT_PLUGINS": "", **given}
    result = subprocess.run(
        [sys.executable, "-c", _SHOW], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split() == shown.split(), result.stderr
