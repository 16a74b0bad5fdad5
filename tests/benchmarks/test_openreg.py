"""``benchmarks/openreg``: the platform of torch's own example of a device, as ``make test-openreg`` finds it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import tomllib
from benchmarks.test_engine import BENCHMARKS
from opgraft import Machine
from support.makefile import COMMANDS


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the probe."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "openreg"))
    return importlib.import_module("opgraft_openreg")


def machine(tmp_path: Path, **packages: str) -> Machine:
    return Machine(tmp_path, {}, packages=packages)


def test_the_probe_asks_for_the_example(plugin: Any, tmp_path: Path) -> None:
    """Without torch_openreg there is no device; with it there are two, and its version is a fact."""
    missing = plugin.SPEC.probe(machine(tmp_path))
    assert (missing.available, missing.devices) == (False, ())
    assert missing.reason == "no device: torch_openreg is not installed"
    found = plugin.SPEC.probe(machine(tmp_path, torch_openreg="0.0.1"))
    assert (found.available, found.reason) == (True, "2 simulated devices")
    assert [device.name for device in found.devices] == ["OpenReg", "OpenReg"]
    assert [fact.value for fact in found.facts] == ["0.0.1"]


def test_the_target_installs_the_platform(plugin: Any) -> None:
    """The entry point leads to the probe, and the target installs the folder and asks about its platform."""
    text = (BENCHMARKS / "openreg/pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["opgraft.platforms"]
    ((name, target),) = points.items()
    module, _, spec = target.partition(":")
    assert getattr(importlib.import_module(module), spec) is plugin.SPEC
    command = COMMANDS["test-openreg"]
    assert "./benchmarks/openreg\n" in command
    assert f"opgraft conformance {name} --device-suite" in command
