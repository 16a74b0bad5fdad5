"""The common code of the benchmarks: a file of figures names the run that made it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.test_engine import BENCHMARKS

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")
IDENTITY = ("user.name=a", "user.email=a@b", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    settings = [word for setting in IDENTITY for word in ("-c", setting)]
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_file_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures without a command, a date and a commit cannot be measured again."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    path = tmp_path / "figures.json"
    script = BENCHMARKS / "fused.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--json", str(path), "--rounds", "3", "--rows"])
    with pytest.raises(SystemExit, match="False"):
        importlib.import_module("fused").main()
    expect_run(json.loads(path.read_text()), f"benchmarks/fused.py --json {path} --rounds 3 --rows")


def test_each_row_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a later run stand beside the others, each with the run and the machine that measured it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    compiling = importlib.import_module("compile")
    path = tmp_path / "figures.json"
    earlier = [{"name": "recompilations", "date": "old"}, {"name": "another", "date": "old"}]
    path.write_text(json.dumps({"rows": earlier}))

    def measure(_: object) -> Iterator[Any]:
        yield compiling.Finding("recompilations", 0, "graphs", most=0)

    monkeypatch.setattr(compiling, "PARTS", {"recompilations": measure})
    arguments = [str(BENCHMARKS / "compile.py"), "--json", str(path), "--rows", "recompilations"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="False"):
        compiling.main()
    other, row = json.loads(path.read_text())["rows"]
    assert other == earlier[1]
    assert row["machine"]["torch"] == torch.__version__
    expect_run(row, f"benchmarks/compile.py --json {path} --rows recompilations")


def expect_run(found: dict[str, Any], command: str) -> None:
    assert found["command"] == command
    assert abs(date.fromisoformat(found["date"]) - date.today()) <= timedelta(days=1)
    commit, _, mark = found["commit"].partition(" ")
    assert commit == git(BENCHMARKS, "rev-parse", "HEAD")
    assert mark in ("", "with changes")


def test_changed_code_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code than that of the commit is told. A figure of an earlier run is no code."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    timing = importlib.import_module("timing")
    monkeypatch.setattr(timing, "REPOSITORY", tmp_path)
    assert timing.this_run()["commit"] == "unknown"
    (tmp_path / "docs/figures").mkdir(parents=True)
    figure, code = tmp_path / "docs/figures/a.json", tmp_path / "a.py"
    for path in (figure, code):
        path.write_text("1")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Add a figure")
    commit = git(tmp_path, "rev-parse", "HEAD")
    figure.write_text("2")
    assert timing.this_run()["commit"] == commit
    code.write_text("2")
    assert timing.this_run()["commit"] == f"{commit} with changes"
