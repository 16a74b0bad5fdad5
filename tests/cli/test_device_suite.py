"""``opgraft conformance --device-suite``: the tests of TorchCTS on a torch device."""

from __future__ import annotations

import json
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from opgraft.cli import conformance
from opgraft.cli.evidence import ConformanceEvidence
from opgraft.compat.python_device import why_not
from opgraft.errors import InputError

needs_suite = pytest.mark.skipif(
    find_spec(conformance.SUITE) is None,
    reason="TorchCTS is not installed: pip install --no-deps torchcts expecttest",
)

CRASH = """
import os, opgraft, pytest
platforms = "any"
runtest = pytest.Function.runtest

@opgraft.hookimpl
def opgraft_register_ops():
    pass

def crash(self):
    if self.name.endswith("[dtype1-add]"):
        os._exit(3)
    runtest(self)

pytest.Function.runtest = crash
"""


@needs_suite
@pytest.mark.skipif(bool(why_not()), reason="this torch takes a device's guard in C++ only")
def test_a_part_of_the_suite_on_the_simulated_device(cli, tmp_path: Path) -> None:
    """Each test is an answer; the claims, the score and the tests left out stand beside them."""
    file = tmp_path / "evidence.json"
    command = ["conformance", "simulated", "--device-suite", "--json", str(file)]
    part = "device_api/test_device_module.py"
    level = ["--suite-level", "6", "--suite-part", part]
    result = cli(*command, *level, OPGRAFT_SIMULATED_DEVICE="dtypes=float32,memory=64MiB")
    answer = json.loads(file.read_text())
    validator = runpy.run_path(str(Path(__file__).with_name("test_schemas.py")))["validator"]
    assert list(validator("opgraft.conformance/1").iter_errors(answer)) == []
    suite = answer["device_suite"]
    assert (suite["device_type"], suite["level"], suite["score"]) == ("simulated", 6, 0.8333)
    integers = ["bool", "uint8", "int8", "int16", "int32", "int64"]
    assert suite["dtypes"] == ["float32", *integers]
    # The simulated device has streams that torch does not know, and no compiler.
    claims = ["inference", "training", "serialization", "rng", "device_api"]
    assert suite["capabilities"] == claims
    assert (answer["counts"], answer["complete"]) == (
        {"passed": 6, "failed": 1, "skipped": 0},
        True,
    )
    failure, count, score = result.stdout.splitlines()
    test = f"{part}::test_device_module_methods[standard]"
    reason = "torch.simulated is missing synchronize()"
    assert failure.startswith(f"failed: (device) {test}: {reason}")
    assert (result.returncode, count.endswith("6 passed, 1 failed, 0 skipped")) == (1, True)
    assert score.startswith("device suite: 83.3% of 6 tests passed (torchcts ")


def of_device(check: str, status: str, reason: str = "") -> dict[str, object]:
    figures = {"error": None, "speed": None, "seconds": 0.1}
    return {
        "op": "(device)",
        "check": check,
        "dtype": None,
        "status": status,
        "reason": reason,
        **figures,
    }


def test_the_score_counts_tests_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a skipped test nor an answer of the kit counts; a failure stands before the score."""
    about = {
        "plugin": "acme",
        "provider": {"version": "1.0"},
        "platform": "npu",
        "device": "An NPU",
    }
    left_out = {"rng": {"capability_not_declared": 2}, "memory": {"capability_not_declared": 1}}
    suite = {"name": "torchcts", "version": "0.4.1", "level": 2, "left_out": left_out}
    found = ConformanceEvidence(about, device_suite=suite)
    found.add({**of_device("values", "failed", "not close"), "op": "gelu"})
    for number, status in enumerate(("passed", "passed", "failed", "skipped")):
        found.add(of_device(f"rng/test_a.py::test_{number}", status, "so"))
    conformance.report(found, None)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "failed: (device) rng/test_a.py::test_2: so",
        "acme 1.0 on npu (An NPU): 2 passed, 2 failed, 1 skipped",
        "device suite: 66.7% of 3 tests passed (torchcts 0.4.1, level 2); left out: 3 "
        "capability_not_declared",
    ]
    assert found.to_dict()["device_suite"] == {**suite, "score": 0.6667}


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TorchCTS the error says how to install it; an unknown part is named."""
    monkeypatch.setattr(conformance, "SUITE", "no_such_suite")
    command = ["cpu", "--device-suite"]
    with pytest.raises(InputError, match=r"pip install 'opgraft\[device-suite\]'"):
        CliRunner().invoke(conformance.command, command, catch_exceptions=False)
    # Another package that is there stands for the suite.
    monkeypatch.setattr(conformance, "SUITE", "pytest")
    with pytest.raises(InputError, match="TorchCTS has no part 'rgn': name a folder"):
        CliRunner().invoke(
            conformance.command, [*command, "--suite-part", "rgn"], catch_exceptions=False
        )
    with pytest.raises(InputError, match="--suite-part names parts of TorchCTS"):
        CliRunner().invoke(
            conformance.command, ["cpu", "--suite-part", "rng"], catch_exceptions=False
        )


@needs_suite
@pytest.mark.slow
def test_a_test_that_ends_the_process_has_failed(cli, site, tmp_path: Path) -> None:
    """The next process goes on behind the test, and every other test is answered."""
    site.plugin("acme", CRASH)
    file = tmp_path / "evidence.json"
    command = ["conformance", "acme", "--device-suite", "--json", str(file)]
    part = "operators/test_binary.py::test_binary_float_op"
    level = ["--suite-level", "2", "--suite-part", part]
    result = cli(*command, *level)
    answer = json.loads(file.read_text())
    failed = {
        each["check"]: each["reason"] for each in answer["outcomes"] if each["status"] == "failed"
    }
    assert list(failed) == [f"{part}[dtype1-add]"]
    assert failed[f"{part}[dtype1-add]"].startswith(
        "a test of torchcts ended the process with status 3"
    )
    assert (answer["cases"], answer["counts"]["passed"], answer["complete"]) == (25, 24, True)
    assert result.returncode == 1
