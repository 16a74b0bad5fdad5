"""Three folders, one import package: the traps of that mapping, and what may be imported when."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
FOLDERS = {"core": "opgraft", "platforms": "opgraft.platforms", "plugins": "opgraft.plugins"}
TESTS = REPOSITORY / "tests"
OF_OTHERS = {
    "benchmarks": "the programs of benchmarks/",
    "clients": "clients that others wrote, against one server",
    "cpu_kernels": "the reference plugin opgraft-cpu-kernels",
    "docs": "the pages of docs/",
    "families": "every family of transformers, a target of its own",
    "faults": "the matrix of planted faults, through all parts",
    "gpu_runs": "the programs of tools/on_gpu/",
    "lanes": "other stacks, in environments of their own",
    "packaging": "the repository as a whole",
    "porting": "the porting of the reference plugin opgraft-vllm-bridge",
    "support": "helpers of tests",
}
"""Folders of tests without a folder of the package, each with its subject."""
WITHOUT_TESTS = {
    "compat": "private parts of torch, tested where they are used",
    "kernels": "names of other modules, held by tests/packaging/test_public_imports.py",
}
"""Folders of the package without a folder of tests, each with its reason."""


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_every_module_lies_in_a_package() -> None:
    """No folder of modules lacks its __init__.py: it would work from the source tree and be missing from the wheel."""
    sources = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    assert {path.parent for path in sources if not (path.parent / "__init__.py").is_file()} == set()


def test_folders_map_to_packages(pyproject: dict[str, Any]) -> None:
    """The folders that this file and the house-style tests walk are those that setuptools maps."""
    mapped = pyproject["tool"]["setuptools"]["package-dir"]
    assert mapped == {package: folder for folder, package in FOLDERS.items()}


def test_tests_mirror_the_package() -> None:
    """Each folder of the package has a folder of tests, and the other way round, or stands in a table with a reason."""
    mirrored = {path.parent.name for path in (REPOSITORY / "core").glob("*/__init__.py")}
    mirrored |= FOLDERS.keys() - {"core"}
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert sorted(folders - mirrored - OF_OTHERS.keys()) == []
    assert sorted(OF_OTHERS.keys() & mirrored) == []
    assert sorted(mirrored - folders) == sorted(WITHOUT_TESTS)


def test_helpers_of_tests_live_in_one_folder() -> None:
    """Beside tests and fixtures, modules of tests lie in tests/support."""
    found = {path.relative_to(TESTS) for path in TESTS.rglob("*.py")}
    helpers = [path for path in found if not path.name.startswith("test_")]
    others = [path for path in helpers if path.name != "conftest.py"]
    assert [str(path) for path in sorted(others) if path.parts[0] != "support"] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_not_importable_under_its_own_name(folder: str) -> None:
    """Importing a source folder as a top-level package fails: it would be a second copy of every registry."""
    child = python(f"import {folder}", REPOSITORY)
    assert child.returncode == 1
    message = f"ImportError: this package is {FOLDERS[folder]}, imported as '{folder}': run from an installed opgraft"
    assert child.stderr.strip().splitlines()[-1] == message


@pytest.mark.parametrize(
    "module",
    [
        "opgraft",
        "opgraft.engine.schedule.scheduler",
        "opgraft.config.environment",
        "opgraft.errors",
        "opgraft.platform",
        "opgraft.plugins.discovery",
        "opgraft.plugins.selection",
        "opgraft.cli.detect",
        "opgraft.cli.env",
        "opgraft.cli.plugins",
    ],
)
def test_import_without_torch(module: str, tmp_path: Path) -> None:
    """What 'opgraft detect' and a plugin's probe import does not import torch, which takes ten times as long."""
    child = python(f"import sys, {module}; sys.exit('torch' in sys.modules)", tmp_path)
    assert child.returncode == 0, child.stderr


def test_public_names_resolve(tmp_path: Path) -> None:
    """Each public name of the lazy facade can be imported, and dir() shows it."""
    code = (
        "import opgraft\n"
        "for name in opgraft.__all__: getattr(opgraft, name)\n"
        "assert set(opgraft.__all__) <= set(dir(opgraft))\n"
        "opgraft.functional.silu, opgraft.ops.SiluAndMul, opgraft.errors.LayerError, opgraft.testing"
    )
    child = python(code, tmp_path)
    assert child.returncode == 0, child.stderr


def test_every_requirement_is_pinned(pyproject: dict[str, Any]) -> None:
    """constraints.txt pins a fitting version of everything that make installs into .venv, build tools included."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    normalized = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    project = pyproject["project"]
    extras = [
        line
        for name in ("demo", "serve", "new", "device-suite", "test", "clients", "lint", "docs")
        for line in project["optional-dependencies"][name]
    ]
    for line in (*pyproject["build-system"]["requires"], *project["dependencies"], *extras):
        requirement = Requirement(line)
        assert requirement.specifier.contains(normalized[requirement.name]), line
