"""The jobs of CI for the reference plugins: each has one, and each command of theirs is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

pytestmark = pytest.mark.source

REPOSITORY = Path(__file__).parents[2]
PLUGINS = REPOSITORY / "reference_plugins"


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (REPOSITORY / ".github/workflows/plugins.yml").read_text("utf-8")
    )["jobs"]
    return found


def test_each_reference_plugin_has_a_job() -> None:
    """Each is tested by a target of the Makefile, and those that have tests of the kit by one that runs them."""
    rows = jobs()["plugin"]["strategy"]["matrix"]["include"]
    assert sorted(row["plugin"] for row in rows) == sorted(
        path.name for path in PLUGINS.iterdir() if path.is_dir()
    )
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for row in rows:
        target, *settings = row["target"].split()
        assert re.search(rf"^{target}:", makefile, re.M), target
        assert settings in ([], [f"PLUGIN={row['plugin'].removeprefix('opgraft-')}"])
    assert {row["target"] for row in rows if "PLUGIN" in row["target"]} == {
        f"test-conformance PLUGIN={name}" for name in ("toy-npu", "cpu-kernels")
    }
    assert all(
        (PLUGINS / f"opgraft-{name}/tests/test_conformance.py").is_file()
        for name in ("toy-npu", "cpu-kernels")
    )


def test_a_change_builds_the_documentation() -> None:
    """What a change must pass builds the site, and a warning of the build ends it."""
    assert "\nmake docs\n" in (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    assert "mkdocs build --strict" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")


def test_wheels_are_built_of_what_is_there() -> None:
    """The folder that is built has the settings, and the paths in these lead to files."""
    (built,) = [
        step["run"].split()[1]
        for step in jobs()["wheels"]["steps"]
        if "cibuildwheel r" in step.get("run", "")
    ]
    project = tomllib.loads((REPOSITORY / built / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["cibuildwheel"]
    commands = " ".join(settings[name] for name in ("before-build", "before-test", "test-command"))
    paths = commands.replace("{project}", str(REPOSITORY)).replace(
        "{package}", str(REPOSITORY / built)
    )
    for path in re.findall(rf"{re.escape(str(REPOSITORY))}[\w./-]*", paths):
        assert Path(path).exists(), path
