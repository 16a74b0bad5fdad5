"""What the tests of the real stacks share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REFERENCE_PLUGINS = Path(__file__).parents[2] / "reference_plugins"


@pytest.fixture(scope="session")
def built_plugin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Install a reference plugin by pip, without its dependencies, into a folder of its own; once per plugin."""
    folder = tmp_path_factory.mktemp("plugins")

    def install(name: str) -> Path:
        target = folder / name
        if not target.exists():
            source = shutil.copytree(REFERENCE_PLUGINS / name, folder / "sources" / name)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
            ]
            subprocess.run([*pip, "--target", str(target), str(source)], check=True)
        return target

    return install


@pytest.fixture
def plugin(
    built_plugin: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Put a reference plugin on ``sys.path``; its modules are forgotten after the test."""
    before = set(sys.modules)

    def use(name: str) -> None:
        monkeypatch.syspath_prepend(str(built_plugin(name)))

    yield use
    for name in set(sys.modules) - before:
        if name.startswith("opgraft_"):
            del sys.modules[name]


@pytest.fixture
def whole_kit(built_plugin: Callable[[str], Path]) -> Callable[[str], str]:
    """Run a plugin's own test file, where every check of the kit must pass; returns the last line."""

    def run(name: str) -> str:
        folders = [str(built_plugin(name)), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        tests = str(REFERENCE_PLUGINS / name / "tests")
        command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", tests]
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout
        return ran.stdout.splitlines()[-1]

    return run
