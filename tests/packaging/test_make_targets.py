"""Each target of the Makefile starts in a bare clone, with what it installs itself and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.makefile import COMMANDS

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
STAGES = (".demo/installed", ".venv/opgraft")
"""What most targets need first. Each is made once, and copied for the targets that make it."""

INSTALLED = (".venv", ".demo")
LANES = [target for target, command in COMMANDS.items() if "tools/lane.sh" in command]
"""Targets with an environment of their own, gigabytes, which say first that they build it."""

ARGUMENTS = {"test-torch": ["VERSION=2.13.0"]}
OF_PIP = re.compile(r"WARNING: |DEPRECATION: |\[notice\]|\s*$")
OF_MAKE = re.compile(r"==> |\s*$")
FAULT = re.compile(r"Traceback|make.*\*\*\*|ERROR|.*Error\b|.*No module named")
SECONDS = 1800


class Clone:
    """A bare clone of the repository at one path, since environments know their paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self._kept = folder / "kept"
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, self.folder], check=True)
        self.make(".venv/base")
        self._keep("bare")

    def make(self, *targets: str) -> None:
        subprocess.run(["make", "--silent", *targets], cwd=self.folder, check=True, env=bare())

    def before(self, target: str) -> None:
        """Bring the clone into the state in which the target starts on its own work."""
        self._restore("bare")
        planned = subprocess.run(
            ["make", "--dry-run", target, *ARGUMENTS.get(target, [])],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
            env=bare(),
        ).stdout
        stages = [stage for stage in STAGES if re.search(rf"^touch .*{stage}$", planned, re.M)]
        if not stages:
            return
        name = "+".join(stages).replace("/", "-")
        if not (self._kept / name).exists():
            self.make(*stages)
            self._keep(name)
        self._restore(name)

    def _keep(self, name: str) -> None:
        _copy(self.folder, self._kept / name)

    def _restore(self, name: str) -> None:
        shutil.rmtree(self.folder)
        _copy(self._kept / name, self.folder)


def bare() -> dict[str, str]:
    """The environment of somebody who has activated nothing."""
    left = ("VIRTUAL_ENV", "PYTHONPATH", "PYTEST_CURRENT_TEST")
    return {name: value for name, value in os.environ.items() if name not in left}


def _copy(source: Path, target: Path) -> None:
    """Copy a clone. What is installed is linked, as it has gigabytes and nobody writes into its files."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*INSTALLED))
    for name in INSTALLED:
        if (source / name).exists():
            subprocess.run(["cp", "-al", source / name, target / name], check=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    folder = tmp_path_factory.mktemp("clone")
    yield Clone(folder)
    shutil.rmtree(folder)


def first_line(target: str, folder: Path, cache: Path) -> tuple[str, int | None]:
    """Start a target, and stop it after the first line of its program; return that line, or how the target ended."""
    variables = {**bare(), "PYTHONUNBUFFERED": "1"}
    if target in LANES:
        variables["XDG_CACHE_HOME"] = str(cache)  # half an environment is of no use to anybody
    command = ["timeout", str(SECONDS), "make", "--silent", target, *ARGUMENTS.get(target, [])]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            for line in started.stdout or ():
                words = line.rpartition("\r")[2].strip()
                passed = OF_PIP.match(words) or (target not in LANES and OF_MAKE.match(words))
                if not passed:
                    return words, None
            return "", started.wait()
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.parametrize("target", ["help", *COMMANDS])
def test_a_target_starts_in_a_bare_clone(target: str, clone: Clone, tmp_path: Path) -> None:
    """The program of the target prints a first line, which tells of no missing package, or ends well."""
    clone.before(target)
    line, status = first_line(target, clone.folder, tmp_path)
    assert status in (None, 0), f"{target} printed nothing and ended with {status}"
    assert not FAULT.match(line), f"{target}: {line}"
