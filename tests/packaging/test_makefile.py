"""The table of the Makefile is complete, and ``make`` follows it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.makefile import COMMANDS, HELP, NEEDS

pytestmark = pytest.mark.source

REPOSITORY = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_every_target_has_a_line_of_help() -> None:
    """Each target with commands has a line, and nothing else has one."""
    assert HELP.keys() == COMMANDS.keys()
    assert NEEDS.keys() <= COMMANDS.keys()


def test_help_prints_the_table() -> None:
    """``make`` and ``make help`` print each target with its text, in the order of the table."""
    printed = make("help").stdout
    rows = re.findall(r"^make ([\w-]+) +(.*)$", printed, re.M)
    assert rows == list(HELP.items())
    assert make().stdout == printed


FIGURES = [".venv/bin/python tools/figures.py", ".venv/bin/python tools/figure_tables.py"]
PLANNED = {
    "test-slow": ["OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 --dist worksteal -m slow"],
    "bench-loading": ["OMP_NUM_THREADS=1 .venv/bin/python benchmarks/loading.py"],
    "soak-serve": [".venv/bin/python benchmarks/serve.py --rows soak --minutes 20"],
    "docs": [".venv/bin/mkdocs build --strict"],
    "figures": FIGURES,
    "charts": FIGURES,
}


@pytest.mark.parametrize(("target", "commands"), PLANNED.items())
def test_a_target_runs_the_commands_of_its_row(target: str, commands: list[str]) -> None:
    """The last planned commands of a target are those of the table, with all variables."""
    planned = make("--dry-run", target).stdout.splitlines()
    assert planned[-len(commands) :] == commands


def test_a_wheel_that_is_installed_in_part_is_installed_again(tmp_path: Path) -> None:
    """A vendor's wheel is there if the file 'complete' says so, not if there is a folder."""
    partial, whole = "pace-vllm==1.3.0", "vllm-spyre-next==0.1.0"
    folders = {name: tmp_path / "opgraft/vendor-wheels" / name for name in (partial, whole)}
    for folder in folders.values():
        folder.mkdir(parents=True)
    (folders[whole] / "complete").touch()
    plan = make("--dry-run", "test-vendor-wheels", f"XDG_CACHE_HOME={tmp_path}").stdout
    assert f"rm -rf {folders[partial]}\n" in plan
    assert f"--target {folders[partial]} {partial}\n" in plan
    assert str(folders[whole]) not in plan


@pytest.mark.parametrize("target", ["test-nothing", "bench-nothing", "soak-nothing", "nothing"])
def test_a_target_without_a_row_is_refused(target: str) -> None:
    """A pattern matches no target that the table lacks."""
    refused = make("--dry-run", target)
    assert refused.returncode == 2
    assert "No rule to make target" in refused.stderr
