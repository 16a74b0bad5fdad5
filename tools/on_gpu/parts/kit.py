"""The conformance kit's short form for the platform, the tests that need a GPU, and kernels under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from opgraft.testing.conformance import FAILED as CHECK_FAILED
from opgraft.testing.conformance import Conformance, alone

from on_gpu.device import DEVICE, ON_GPU
from on_gpu.rows import FAILED, Row, Rows, expect_equal

REPOSITORY = Path(__file__).parents[3]
TESTS = ("tests/ops/triton/test_gpu.py", "tests/platforms/test_torch_cuda.py")
ANOTHER_PART = "not test_values and not test_strides"
"""Leaves out the tests that the part ``kernels`` stands for."""

SANITIZED = ("paged_attention", "mla_paged_attention", "fused_experts")
SECONDS = 60.0
"""The limit of one process."""

FOUND = 9
"""Exit code by which compute-sanitizer says that it has found something."""


def run(rows: Rows, bundle: Path) -> None:
    _conformance(rows)
    if not ON_GPU:
        rows.no_device("tests that need a GPU")
        rows.no_device("compute-sanitizer")
        return
    _tests(rows)
    _sanitize(rows)


def _conformance(rows: Rows) -> None:
    """Ask every question of the short form; a row for each that fails, and one for all others."""
    platform = DEVICE  # the platforms are called like the devices of torch
    with rows.attempt(f"conformance of {platform}, short form") as row, alone(platform):
        judged = Conformance(platform, brief=True)
        counts = Counter[str]()
        for case in judged.cases:
            outcome = judged.judge(case)
            counts[outcome.status] += 1
            if outcome.status == CHECK_FAILED:
                rows.add(Row(f"conformance of {platform}: {case}", FAILED, outcome.reason))
        row.detail = ", ".join(f"{count} {status}" for status, count in counts.items())


def _tests(rows: Rows) -> None:
    """Run the tests that need a GPU; a row for each that fails, and one for all others."""
    report = Path(os.environ["TMPDIR"]) / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # Warnings of other versions of torch are no errors here.
    command += ["-o", "filterwarnings=default", "-k", ANOTHER_PART, f"--junitxml={report}", *TESTS]
    with rows.attempt("tests that need a GPU") as row:
        answer = subprocess.run(command, cwd=REPOSITORY, timeout=2 * SECONDS, check=False)
        counts = Counter[str]()
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # pytest wrote it
            problem = case.find("failure") if case.find("error") is None else case.find("error")
            counts["passed" if problem is None else "failed"] += 1
            if problem is not None:
                detail = problem.get("message", "")
                rows.add(Row(f"test {case.get('name')}", FAILED, detail))
        row.detail = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        expect_equal(answer.returncode in (0, 1), True, "whether pytest came to its end")


def _sanitize(rows: Rows) -> None:
    """Run kernels where every access of memory is checked; each allocation is torch's own, so that none hides."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name in SANITIZED:
        with rows.attempt(f"compute-sanitizer over {name}") as row:
            options = ["--tool", "memcheck", "--error-exitcode", str(FOUND)]
            command = [sanitizer, *options, sys.executable, "-m", "on_gpu.sanitized", name]
            answer = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            print(answer.stdout[-20_000:], answer.stderr[-20_000:])
            told = [line for line in answer.stdout.splitlines() if "ERROR SUMMARY" in line]
            row.detail = told[-1] if told else answer.stdout[-200:]
            expect_equal(answer.returncode, 0, "the exit code")
