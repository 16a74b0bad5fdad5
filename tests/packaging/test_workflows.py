"""Jobs of CI, and hooks of a commit: their commands exist, and they cover what they should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from support.makefile import COMMANDS

pytestmark = pytest.mark.source

REPOSITORY = Path(__file__).parents[2]
PLUGINS = REPOSITORY / "reference_plugins"


def jobs(workflow: str = "plugins") -> dict[str, Any]:
    text = (REPOSITORY / f".github/workflows/{workflow}.yml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["jobs"]
    return found


def test_ci_covers_the_supported_versions() -> None:
    """CI runs .ci/run, the oldest Python and torch that are supported, and the newest torch."""
    found = jobs("ci")
    assert any(step.get("run") == "bash .ci/run" for step in found["run"]["steps"])
    rows = found["versions"]["strategy"]["matrix"]["include"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    oldest_python = project["requires-python"].removeprefix(">=")
    (oldest_torch,) = (
        needed.removeprefix("torch>=")
        for needed in project["dependencies"]
        if needed.startswith("torch>=")
    )
    assert {"python": oldest_python, "torch": f"{oldest_torch}.0"} in rows
    assert "" in [row["torch"] for row in rows], "the newest torch"


def test_hooks_of_a_commit_are_linters_of_make_check() -> None:
    """Each hook runs a command that 'make check' runs too, with the changed files for all files."""
    settings = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text("utf-8"))
    commands = COMMANDS["check"].replace("$(BIN)", ".venv/bin").splitlines()
    hooks = [hook for repo in settings["repos"] for hook in repo["hooks"]]
    assert len(hooks) == 3
    for hook in hooks:
        names_files = hook.get("pass_filenames", True)
        assert (f"{hook['entry']} ." if names_files else hook["entry"]) in commands


def test_each_reference_plugin_has_a_job() -> None:
    """Each is tested by a target of the Makefile, and those that have tests of the kit by one that runs them."""
    rows = jobs()["plugin"]["strategy"]["matrix"]["include"]
    assert sorted(row["plugin"] for row in rows) == sorted(
        path.name for path in PLUGINS.iterdir() if path.is_dir()
    )
    for row in rows:
        target, *settings = row["target"].split()
        assert target in COMMANDS, target
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
    assert "mkdocs build --strict" in COMMANDS["docs"]


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
