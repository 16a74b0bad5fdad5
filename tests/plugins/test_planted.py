"""The conformance kit finds each planted defect, by op and check, and says what is wrong."""

from __future__ import annotations

import pytest
from opgraft.testing.conformance import Conformance, alone
from plugins.planted import BEGINNING, DEFECTS, OF_PLATFORMS, PLATFORM, Defect


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
def test_a_whole_run_finds_one_defect_among_ops_that_are_right(site) -> None:
    """Of all answers about a plugin, those fail that the defect concerns, and no others."""
    right = "\n".join([DEFECTS["an argument that is left out"].source.replace("None, self.eps", "self.bias, self.eps")])
    site.plugin(
        "acme", BEGINNING + right + DEFECTS["a stale output buffer"].source.replace("class Acme", "class Stale")
    )
    with alone("acme"):
        conformance = Conformance("acme")
        outcomes = [conformance.judge(case) for case in conformance.cases]
    failed = {str(outcome.case) for outcome in outcomes if outcome.status == "failed"}
    assert "gelu-repetition" in failed
    assert all(name.startswith("gelu-") for name in failed)
    assert sum(outcome.status == "passed" for outcome in outcomes) > 20
