"""The conformance kit finds each planted defect, by op and check, and says what is wrong."""

from __future__ import annotations

import os
import subprocess

import pytest
from opgraft.compat.python_device import why_not
from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.testing.conformance import Conformance, alone
from plugins.planted import BEGINNING, DEFECTS, OF_PLATFORMS, OF_STREAMS, PLATFORM, Defect

STREAMS = """
import sys, opgraft
from opgraft.config import OpgraftConfig, set_config
from opgraft.testing.conformance import PLATFORM, Case, Conformance, alone
for name in sys.argv[1:]:
    with set_config(OpgraftConfig(platform=name)), alone(name):
        outcome = Conformance(name).judge(Case(PLATFORM, "streams"))
        print(outcome.status, outcome.reason)
    opgraft.reset()
"""


def expect_found(plugin: str, defect: Defect) -> None:
    with alone(plugin):
        conformance = Conformance(plugin)
        (case,) = (case for case in conformance.cases if str(case) == defect.found)
        outcome = conformance.judge(case)
    assert (outcome.status, defect.reason in outcome.reason) == ("failed", True), outcome.reason


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_an_op_is_found(site, name: str) -> None:
    """The question that it concerns is asked, and answered by a failure with a reason that tells it."""
    site.plugin("acme", BEGINNING + DEFECTS[name].source)
    expect_found("acme", DEFECTS[name])


@pytest.mark.parametrize("name", OF_PLATFORMS)
def test_a_defect_of_a_platform_is_found(site, name: str) -> None:
    """So is what a platform does wrong."""
    probe = "return Evidence(True, 'a device')"
    site.platform("acme", probe=probe, platform=PLATFORM + OF_PLATFORMS[name].source)
    expect_found("acme", OF_PLATFORMS[name])


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason="this torch takes a device's guard in C++ only")
def test_defects_of_streams_are_found(site, warm_python: str) -> None:
    """Streams that a platform claims must keep what torch's names promise; a device with such streams passes."""
    names = [f"acme{number}" for number in range(len(OF_STREAMS))]
    for name, (source, _) in zip(names, OF_STREAMS.values(), strict=True):
        site.platform(
            name,
            probe="return Evidence(True, 'a device')",
            platform=source.replace("{name!r}", repr(name)),
        )
    environ = {**os.environ, "PYTHONPATH": str(site.folder), SIMULATED_DEVICE: "memory=1MiB"}
    command = [warm_python, "-c", STREAMS, *names]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    told = dict(zip(OF_STREAMS, result.stdout.splitlines(), strict=True))
    assert told.pop("streams in order") == "passed "
    assert {name: line for name, line in told.items() if OF_STREAMS[name][1] not in line} == {}


@pytest.mark.slow
def test_a_whole_run_finds_one_defect_among_ops_that_are_right(site) -> None:
    """Of all answers about a plugin, those fail that the defect concerns, and no others."""
    right = "\n".join(
        [
            DEFECTS["an argument that is left out"].source.replace(
                "None, self.eps", "self.bias, self.eps"
            )
        ]
    )
    site.plugin(
        "acme",
        BEGINNING
        + right
        + DEFECTS["a stale output buffer"].source.replace("class Acme", "class Stale"),
    )
    with alone("acme"):
        conformance = Conformance("acme")
        outcomes = [conformance.judge(case) for case in conformance.cases]
    failed = {str(outcome.case) for outcome in outcomes if outcome.status == "failed"}
    assert "gelu-repetition" in failed
    assert all(name.startswith("gelu-") for name in failed)
    assert sum(outcome.status == "passed" for outcome in outcomes) > 20
