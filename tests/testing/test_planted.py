"""The conformance kit finds each planted defect, by op and check, and says what is wrong."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import torch
from opgraft.compat.python_device import why_not
from opgraft.config.environment import SIMULATED_DEVICE
from opgraft.testing import drawn_checks
from opgraft.testing.conformance import Conformance, alone
from support.defective_plugins import BEGINNING, DEFECTS, OF_PLATFORMS, OF_STREAMS, PLATFORM, Defect
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.usefixtures("warm_children")

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
def test_a_defect_of_an_op_is_found(site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question that it concerns is asked, and answered by a failure with a reason that tells it."""
    # Beside other work, the kit would draw fewer inputs.
    monkeypatch.setattr(drawn_checks, "PATIENCE", 120.0)
    site.plugin("acme", BEGINNING + DEFECTS[name].source)
    expect_found("acme", DEFECTS[name])


class Bare(Tensor):
    """A tensor of a class that no compiler follows."""


class Followed(Tensor):
    """A tensor of a class that describes its parts, which a compiler follows."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Tensor:
        raise NotImplementedError


class MadeOf(TorchFunctionMode):
    """Makes empty tensors of another class, as a device in Python does."""

    def __init__(self, kind: type[Tensor]) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.as_subclass(self.kind) if func is torch.empty else made


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        (Tensor, "failed", "item"),
        (Followed, "failed", "item"),
        (Bare, "skipped", "torch.compile follows no tensors of class Bare"),
    ],
)
def test_compilation_on_a_device_in_python(
    site, kind: type[Tensor], status: str, words: str
) -> None:
    """Tensors of a device's own class excuse a graph break only if no compiler follows them."""
    site.plugin("acme", BEGINNING + DEFECTS["a graph break"].source)
    with alone("acme"):
        conformance = Conformance("acme")
        (case,) = (case for case in conformance.cases if str(case) == "gelu-compilation")
        with MadeOf(kind):
            outcome = conformance.judge(case)
    assert (outcome.status, words in outcome.reason) == (status, True), outcome.reason


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
