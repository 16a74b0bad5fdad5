"""``benchmarks/device_suite.py``: the summary of the device suite, and failures that are new."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.test_engine import BENCHMARKS


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "device_suite.py"))


def answer(check: str, status: str) -> dict[str, Any]:
    return {"op": "(device)", "check": check, "status": status, "reason": f"{check} is {status}"}


def evidence(*answers: dict[str, Any]) -> dict[str, Any]:
    """Answers of the device suite about two parts, and an answer of the kit."""
    left_out = {"rng": {"device_count": 2, "ieee754": 1}, "errors": {}}
    suite = {"score": 0.5, "level": 8, "left_out": left_out}
    of_kit = {"op": "gelu", "check": "rng", "status": "failed", "reason": "not close"}
    about = {
        "plugin": "acme",
        "date": "2026-11-30",
        "device": "An NPU",
        "versions": {"torch": "2.13"},
        "device_suite": suite,
    }
    return {**about, "outcomes": [of_kit, *answers]}


def test_each_part_is_counted(script: dict[str, Any]) -> None:
    """A part has its answers by status, and the number of its tests that were left out."""
    statuses = ("passed", "failed", "skipped", "passed")
    answers = [answer(f"rng/test_a.py::{name}", name) for name in statuses]
    summary = script["summed"](evidence(*answers, answer("errors/test_b.py::b", "passed")))
    rng, errors = summary["parts"]
    assert rng == {"part": "rng", "passed": 2, "failed": 1, "skipped": 1, "left_out": 3}
    assert errors == {"part": "errors", "passed": 1, "failed": 0, "skipped": 0, "left_out": 0}
    asked = "opgraft conformance acme --device-suite --suite-level 8"
    assert summary["command"] == f"{asked} --suite-part rng --suite-part errors"
    assert summary["date"] == "2026-11-30"
    assert summary["commit"]
    name = "rng/test_a.py::failed"
    assert summary["failed"] == {name: f"{name} is failed"}


def test_a_new_failure_is_an_error(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failure that the former summary has is none; one that it lacks is named, with exit code 1."""
    given, summary = tmp_path / "evidence.json", tmp_path / "summary.json"
    monkeypatch.setattr(sys, "argv", ["device_suite.py", str(given), "--json", str(summary)])
    known = answer("rng/test_a.py::known", "failed")
    given.write_text(json.dumps(evidence(known)))
    # The first summary has nothing to compare with.
    assert [script["main"](), script["main"]()] == [0, 0]
    assert "new" not in capsys.readouterr().out.splitlines()[-1]
    given.write_text(json.dumps(evidence(known, answer("rng/test_a.py::later", "failed"))))
    assert script["main"]() == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "new: rng/test_a.py::later: rng/test_a.py::later is failed"
    ]
