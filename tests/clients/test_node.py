"""Clients for Node. Each is a script in ``node``, which asks as the other tests of this folder do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

INSTALLED = os.environ["CLIENTS_NODE"]
"""The folder with the scripts and their packages, which ``tools/lane.sh`` makes."""
SCRIPTS = sorted(path.stem for path in Path(__file__).parent.glob("node/*.mjs"))
SHARED = "questions"


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != SHARED])
def test_client(base_url: str, script: str) -> None:
    """Two turns, a tool, and a stream; a structured answer, if the client has them."""
    command = ["node", f"{script}.mjs", base_url]
    done = subprocess.run(command, cwd=INSTALLED, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
