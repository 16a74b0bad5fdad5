"""The probe of opgraft-jax on machines of all kinds. ``make test-jax`` runs the plugin on JAX itself."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from opgraft import Machine

PLUGIN = Path(__file__).parents[2] / "reference_plugins" / "opgraft-jax"
DEVICE = runpy.run_path(str(PLUGIN / "src" / "opgraft_jax" / "device.py"))
JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}


def evidence(root: Path, packages: dict[str, str], wanted: str | None = None) -> Any:
    environ = {} if wanted is None else {DEVICE["VARIABLE"]: wanted}
    return DEVICE["probe"](Machine(root, environ, packages))


@pytest.mark.parametrize(
    ("packages", "wanted", "reason", "remedy"),
    [
        ({}, "cpu", "jax is not installed", "pip install jax"),
        ({"jax": "0.10.2"}, "cpu", "jaxlib is not installed", "pip install jax"),
        (
            {"jax": "0.11.0", "jaxlib": "0.10.2"},
            "cpu",
            "jax 0.11.0 is installed, and this plugin is for 0.10",
            "<0.11",
        ),
        (
            JAX,
            None,
            "not asked for: JAX_RUNTIME_DEVICE is not set",
            "set JAX_RUNTIME_DEVICE to cpu or tpu",
        ),
        (
            JAX,
            "gpu",
            "JAX_RUNTIME_DEVICE='gpu' is no device that this plugin knows",
            "to cpu or tpu",
        ),
        (JAX, "tpu", "libtpu is not installed", "jax[tpu]"),
        ({**JAX, "libtpu": "0.0.21"}, "tpu", "there is no device node of a chip", "/dev/vfio"),
    ],
)
def test_rejected(
    tmp_path: Path, packages: dict[str, str], wanted: str | None, reason: str, remedy: str
) -> None:
    """The platform is not there, and the evidence says what is missing and what to do."""
    told = evidence(tmp_path, packages, wanted)
    assert (told.available, told.devices) == (False, ())
    assert reason in told.reason
    assert remedy in told.remedy


@pytest.mark.parametrize("node", ["dev/accel0", "dev/vfio/12"])
def test_a_chip(tmp_path: Path, node: str) -> None:
    """A device node of either kind of driver will do; what else lies beside is none."""
    (tmp_path / node).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / node).with_name("vfio" if "accel" in node else "devices").touch()
    told = evidence(tmp_path, {**JAX, "libtpu": "0.0.21"}, "tpu")
    assert not told.available
    (tmp_path / node).touch()
    told = evidence(tmp_path, {**JAX, "libtpu": "0.0.21"}, "tpu")
    assert (told.available, len(told.devices)) == (True, 1)


def test_asked_for_on_the_cpu(tmp_path: Path) -> None:
    """No chip is needed, and none is looked for."""
    told = evidence(tmp_path, JAX, "cpu")
    assert (told.available, told.reason) == (True, "JAX_RUNTIME_DEVICE=cpu: XLA for the CPU")
