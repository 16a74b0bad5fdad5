"""'opgraft new' makes a plugin that works before a line is changed. Its own tests run on the page of the tutorial."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from opgraft.version import __version__
from packaging.requirements import Requirement


@pytest.mark.parametrize("name", ["acme", "acme-npu", "big_x2-kernels"])
def test_what_is_made_passes_its_own_linters(cli: Any, tmp_path: Path, name: str) -> None:
    """Whatever its name: no placeholder is left, and it asks for the opgraft that made it."""
    report = json.loads(cli("new", name, "--json", "--output", str(tmp_path / "made")).stdout)
    folder = Path(report["folder"])
    assert folder == tmp_path / "made" / f"opgraft-{name.replace('_', '-')}"
    files = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert sorted(files) == report["files"]
    assert ".github/workflows/ci.yml" in files
    for path, text in files.items():
        assert "{{" not in text.replace("${{ matrix.python }}", ""), path
        assert "{%" not in text, path
        assert text.endswith("\n") or not text, path
    for command in (("check",), ("format", "--check")):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", str(folder)]
        checked = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout
    project = tomllib.loads(files["pyproject.toml"])["project"]
    module, platform = f"opgraft_{name.replace('-', '_')}", name.replace("-", "_")
    assert "ini_options" in tomllib.loads(files["pyproject.toml"])["tool"]["pytest"], (
        "pytest would look further up"
    )
    assert project["entry-points"]["opgraft.plugins"] == {platform: f"{module}.plugin"}
    assert f"src/{module}/plugin.py" in files
    assert "pip install -e '.[test]'" in ci_commands(files[".github/workflows/ci.yml"])
    (requirement,) = map(Requirement, project["dependencies"])
    assert requirement.specifier.contains(__version__, prereleases=True)


def ci_commands(workflow: str) -> list[str]:
    """What a workflow runs, of which all but the installations are run above or on the page of the tutorial."""
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-2:] == ["ruff check . && ruff format --check .", "pytest"]
    return commands


@pytest.mark.parametrize(
    "name", ["Acme", "2acme", "acme--npu", "acme/npu", "../acme", "acme npu", "a" * 41, "\x1b[31m"]
)
def test_names_that_cannot_be(cli: Any, tmp_path: Path, name: str) -> None:
    """Nothing is written, and the message says which names can be."""
    told = cli("new", name, "--output", str(tmp_path / "made"))
    assert told.returncode == 2
    assert "cannot be the name of a plugin: use up to 40 lower-case letters" in told.stderr
    assert "\x1b" not in told.stderr
    assert not (tmp_path / "made").exists()


def test_nothing_is_overwritten(cli: Any, site: Any, tmp_path: Path) -> None:
    """Neither a folder that is there nor the name of an installed platform or plugin is taken; a file is no folder."""
    (tmp_path / "opgraft-acme").mkdir()
    told = cli("new", "acme", "--output", str(tmp_path))
    assert (told.returncode, "is there already" in told.stderr) == (2, True)
    site.platform("brix", probe="return Evidence(True, 'found')")
    site.plugin("dune-x1", "raise OSError('imported')")
    for name in ("brix", "dune-x1"):
        told = cli("new", name, "--output", str(tmp_path))
        taken = f"an installed platform or plugin is called '{name.replace('-', '_')}'"
        assert (told.returncode, taken in told.stderr) == (2, True)
    (tmp_path / "file").write_text("")
    assert cli("new", "cedar", "--output", str(tmp_path / "file")).returncode == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"opgraft-acme", "file"}
    assert not list((tmp_path / "opgraft-acme").iterdir())


def test_without_copier_the_extra_is_named(cli: Any, site: Any, tmp_path: Path) -> None:
    """The library is optional, as operators need none."""
    (site.folder / "copier.py").write_text("raise ImportError('no module named copier')")
    told = cli("new", "acme", "--output", str(tmp_path / "made"))
    assert (told.returncode, "pip install 'opgraft[new]'" in told.stderr) == (2, True)
