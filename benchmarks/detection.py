"""Benchmark of detection on a large machine: ``opgraft detect`` on the fixture machines of tests/support/machines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from timing import Row, ratio, report

BUILDER = Path(__file__).parents[1] / "tests" / "machines" / "build.py"


def machines(folder: Path) -> list[Path]:
    """Return all fixture machines, those with the fewest files first."""
    builder = [sys.executable, str(BUILDER)]
    names = subprocess.run(builder, check=True, capture_output=True, text=True).stdout.split()
    for name in names:
        subprocess.run([*builder, name, str(folder / name)], check=True)
    return sorted(
        (folder / name for name in names), key=lambda machine: sum(1 for _ in machine.rglob("*"))
    )


def measure() -> list[Row]:
    """Measure whole processes, as in ``mechanism.start_up``."""
    command = shutil.which("opgraft", path=str(Path(sys.executable).parent))
    if command is None:
        raise FileNotFoundError(f"no command 'opgraft' beside {sys.executable}: run 'make bench'")
    environ = {**os.environ, "OPGRAFT_PLUGINS": "", "PYTHONDONTWRITEBYTECODE": ""}

    def detect(machine: Path) -> None:
        arguments = [command, "detect", "--root", str(machine)]
        subprocess.run(arguments, env=environ, check=True, stdout=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory() as folder:
        small, *_, large = machines(Path(folder))
        name = f"opgraft detect on {large.name} / on {small.name}"
        return [
            ratio(name, 1.5, partial(detect, large), partial(detect, small), number=1, rounds=15)
        ]


if __name__ == "__main__":
    report("What a large machine costs opgraft detect.", measure)
