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


@pytest.mark.parametrize("target", ["test-slow", "bench-loading", "soak-serve", "docs"])
def test_a_target_runs_the_commands_of_its_row(target: str) -> None:
    """The last planned command of a target is the one of the table."""
    planned = make("--dry-run", target).stdout.splitlines()
    command = re.sub(r"\$\(.*?\)", "", COMMANDS[target]).split()
    assert command[-1] in planned[-1]


@pytest.mark.parametrize("target", ["test-nothing", "bench-nothing", "soak-nothing", "nothing"])
def test_a_target_without_a_row_is_refused(target: str) -> None:
    """A pattern matches no target that the table lacks."""
    refused = make("--dry-run", target)
    assert refused.returncode == 2
    assert "No rule to make target" in refused.stderr
