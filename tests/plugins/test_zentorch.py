"""The plugin opgraft-zentorch where zentorch cannot be used. ``make test-zentorch`` runs it on zentorch itself."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opgraft
import pytest
import torch
from opgraft import load_plugins
from opgraft.ops import RMSNorm
from opgraft.registry.state import PluginStatus, host_state

tomllib = pytest.importorskip("tomllib")  # in the standard library from Python 3.11 on

PLUGIN = Path(__file__).parents[2] / "reference_plugins" / "opgraft-zentorch"
MINOR = ".".join(torch.__version__.split(".")[:2])

Install = Callable[..., None]


@pytest.fixture
def install(site: Any) -> Install:
    """Install the plugin as pip would: its modules, its entry points, its requirements."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    points = project["entry-points"]["opgraft.plugins"]
    files = {
        str(path.relative_to(PLUGIN / "src")): path.read_text("utf-8")
        for path in (PLUGIN / "src").rglob("*.py")
    }
    lines = [f"{name} = {value}" for name, value in points.items()]
    site.install(
        project["name"], files, {"opgraft.plugins": lines}, requires=project["dependencies"]
    )

    def library(version: str) -> None:
        source = "raise SystemExit('zentorch was imported')\n"
        site.install("zentorch", {"zentorch/__init__.py": source}, "", version=version, requires=())

    return library


def reason() -> str:
    load_plugins()
    record = host_state().plugins["zentorch"]
    assert record.status is PluginStatus.VETOED
    assert "opgraft_zentorch.ops" not in sys.modules
    assert RMSNorm(8).op_class is RMSNorm
    return str(record.reason)


@pytest.mark.skipif("zentorch" in sys.modules, reason="zentorch itself is installed here")
def test_without_zentorch(install: Install, cli: Any) -> None:
    """The plugin vetoes itself, and the doctor tells why."""
    assert reason() == "zentorch is not installed"
    result = cli("plugins", "doctor")
    assert "as it vetoed itself: zentorch is not installed" in result.stdout


def test_a_zentorch_for_another_torch_is_not_imported(install: Install) -> None:
    """The versions decide before the import."""
    install("1.9.0.1")
    assert f"zentorch 1.9.0.1 works with torch 1.9 only, this is {MINOR}" in reason()


class Processor:
    """A platform whose processor has these instruction sets."""

    def __init__(self, *features: str) -> None:
        self._features = features

    def capability(self) -> opgraft.DeviceCapability:
        return opgraft.DeviceCapability("a CPU", (torch.float32,), features=self._features)


def test_a_processor_without_avx512(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names what is missing and what the processor has."""
    install(f"{MINOR}.0.2")
    veto = runpy.run_path(str(PLUGIN / "src" / "opgraft_zentorch" / "plugin.py"))["opgraft_veto"]
    assert veto(Processor("avx2", "avx512f")) is None
    told = veto(Processor("avx2"))
    assert told == "zentorch needs a processor with AVX-512 (avx512f), this one has avx2"
    assert "none of these sets" in veto(Processor())
