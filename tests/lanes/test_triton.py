"""The Triton kernels by Triton's interpreter, in a process that asks for it. Run by ``make test-triton``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", reason="Triton is not installed here; make test-triton runs this test"
)

KERNELS = Path(__file__).parents[1] / "ops" / "triton"


FILES = (
    "test_interpreted.py",
    "test_interpreted_attention.py",
    "test_interpreted_experts.py",
    "test_interpreted_latents.py",
    "test_interpreted_states.py",
)


@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str) -> None:
    """Every kernel computes what the specs ask for; none of these tests is skipped where Triton is installed."""
    parallel = ["--numprocesses", "2", "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "--quiet", *parallel, str(KERNELS / file)]
    ran = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    summary = ran.stdout.strip().splitlines()[-1:]
    assert ran.returncode == 0, ran.stdout
    assert re.match(r"\d{2,} passed in", "".join(summary)), summary
