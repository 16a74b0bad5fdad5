"""The environments of the real stacks, as far as they can be judged without building them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from support.makefile import COMMANDS, NEEDS

REPOSITORY = Path(__file__).parents[2]
LANES = sorted(path.stem for path in (REPOSITORY / "environments").glob("*.in"))
PROGRAMS = sorted(path.stem for path in (REPOSITORY / "environments/clients").glob("*.in"))
"""Clients of the server with an environment of their own."""
MACHINE = "gpu"
"""The lane that stands for a machine: a bundle brings what opgraft needs beyond its packages."""
CLIENTS = "clients"
"""The lane of clients of the server. It has no opgraft."""


def lines(path: str) -> list[str]:
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(environment: str) -> dict[str, str]:
    pinned = [line.split("==") for line in lines(f"environments/{environment}.txt")]
    return {normalized(name): version for name, version in pinned}


@pytest.mark.parametrize("lane", LANES)
def test_every_requirement_is_pinned(lane: str) -> None:
    """The pins hold a fitting version of all that an environment is asked for and that opgraft and its tests need."""
    pins = pins_of(lane)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = lines(f"environments/{lane}.in")
    if lane not in (MACHINE, CLIENTS):
        wanted += [*project["dependencies"], *extras["demo"], *extras["test"]]
    for line in wanted:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[normalized(requirement.name)]), line


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_is_pinned(program: str) -> None:
    """A client with an environment of its own is the only one there, pinned, with a test of its name."""
    (wanted,) = lines(f"environments/clients/{program}.in")
    requirement = Requirement(wanted)
    assert normalized(requirement.name) == program
    assert pins_of(f"clients/{program}")[program]
    assert (REPOSITORY / f"tests/clients/test_{program.replace('-', '_')}.py").is_file()


def test_every_lane_has_a_target_and_a_test() -> None:
    """'make test-<lane>' exists for each environment and runs a test file of its own."""
    assert LANES == [CLIENTS, MACHINE, "hosts", "ipex", "jax", "triton", "xla"]
    assert NEEDS["test-gpu-rehearsal"] == "gpu-bundle"
    assert NEEDS["test-clients"] == ".venv/opgraft"
    assert COMMANDS["test-clients"].endswith("tools/lane.sh clients")
    for lane in set(LANES) - {MACHINE, CLIENTS}:
        assert f"tools/lane.sh {lane}" in COMMANDS[f"test-{lane}"]
        assert (Path(__file__).parent / f"test_{lane}.py").is_file()
