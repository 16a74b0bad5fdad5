"""The runner of ``tools/on_gpu.sh``: parts that hang, crash, say nothing or fill the disk, and the report of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

PLANTED = {
    "fine": """
def run(rows, bundle):
    with rows.attempt("a sum") as row:
        row.figures["sum"] = 1 + 1
    rows.measured("a figure", "2 µs", microseconds=2.0)
""",
    "absent": """
def run(rows, bundle):
    rows.no_device("a kernel")
""",
    "wrong": """
from on_gpu.rows import expect_equal
def run(rows, bundle):
    with rows.attempt("first | of two"):
        expect_equal(1, 2, "the number")
    with rows.attempt("second"):
        pass
""",
    "nested": """
from on_gpu.rows import expect_equal
def run(rows, bundle):
    with rows.attempt("a model") as row:
        row.detail = "two layers"
        with rows.attempt("its outputs"):
            expect_equal(1, 2, "the number")
    with rows.attempt("another model"):
        with rows.attempt("its outputs"):
            pass
""",
    "raises": """
def run(rows, bundle):
    rows.measured("before", "it raised")
    raise RuntimeError("CUDA error: an illegal memory access")
""",
    "crashes": """
import os, signal
def run(rows, bundle):
    rows.measured("before", "it crashed")
    os.kill(os.getpid(), signal.SIGSEGV)
""",
    "silent": """
def run(rows, bundle):
    pass
""",
    # A child in a session of its own outlives the process group: it writes to the file until it is killed.
    "hangs": """
import subprocess, sys, time
def run(rows, bundle):
    rows.measured("before", "it hung")
    beat = "import time\\nwhile True: open(%r, 'a').write('x'); time.sleep(0.05)" % str(bundle / "beats")
    subprocess.Popen([sys.executable, "-c", beat], start_new_session=True)
    time.sleep(600)
""",
    "prints": """
def run(rows, bundle):
    rows.measured("before", "it printed")
    while True:
        print("x" * 100_000)
""",
    "fills": """
import os
def run(rows, bundle):
    rows.measured("before", "it wrote")
    with open(os.path.join(os.environ["TMPDIR"], "large"), "wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
""",
}
"""Modules of parts by their names."""

DRIVER = """
import os, sys
from pathlib import Path
from on_gpu.report import Report, summary
from on_gpu.runner import Limits, Part, Runner
work = Path(sys.argv[1])
parts = [Part(name, f"shows {name}", 4.0, "planted") for name in sys.argv[3:]]
report = Report(work / "out", {"device": "planted"})
limits = Limits(seconds=120.0, reserve=int(sys.argv[2]))
environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
results = Runner(work / "scratch", work, limits, environment, report.write).run(parts)
print(summary(results))
"""
"""Runs the parts of these names; it is a process of its own, as it adopts and kills what they leave."""


def run_planted(work: Path, *names: str, reserve: int = 0, within: tuple[str, ...] = ()) -> str:
    """Run planted parts below a folder, and return what the run printed."""
    (work / "out").mkdir(parents=True)
    (work / "scratch").mkdir()
    (work / "planted").mkdir()
    for name in names:
        (work / "planted" / f"{name}.py").write_text(PLANTED[name])
    path = os.pathsep.join((str(TOOLS), str(work)))
    command = [*within, sys.executable, "-c", DRIVER, str(work), str(reserve), *names]
    ran = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def parts_of(out: Path) -> dict[str, Any]:
    data = json.loads((out / "results.json").read_text())
    assert data["schema"] == "opgraft.on_gpu/1"
    return {part["name"]: part for part in data["parts"]}


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[dict[str, Any]]]:
    """The parts of a run that is limited in time. The run mostly waits, so others go on beside it."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(run_in_time, tmp_path_factory.mktemp("timed"))


@pytest.mark.usefixtures("timed")
def test_no_part_stops_the_others(tmp_path: Path) -> None:
    """Parts that fail, raise, crash, say nothing or hang are named, with what they reported; the others pass."""
    names = ("wrong", "nested", "raises", "crashes", "silent", "hangs", "absent", "fine")
    printed = run_planted(tmp_path, *names)
    parts = parts_of(tmp_path / "out")
    outcomes = {name: (part["outcome"], part["reason"]) for name, part in parts.items()}
    assert outcomes == {
        "wrong": ("failed", "1 of 2 rows failed"),
        "nested": ("failed", "2 of 4 rows failed"),
        "raises": (
            "failed",
            "ended with exit code 1: RuntimeError: CUDA error: an illegal memory access",
        ),
        "crashes": ("failed", outcomes["crashes"][1]),
        "silent": ("failed", "reported nothing"),
        "hangs": ("out of time", ""),
        "absent": ("no device", ""),
        "fine": ("passed", ""),
    }
    assert outcomes["crashes"][1].startswith("ended with signal 11")
    nested = [(row["what"], row["outcome"], row["detail"]) for row in parts["nested"]["rows"]]
    assert nested[1] == ("a model", "failed", "1 rows within failed. two layers")
    assert [outcome for _, outcome, _ in nested] == ["failed", "failed", "passed", "passed"]
    kept = {name: [row["what"] for row in part["rows"]] for name, part in parts.items()}
    assert kept["hangs"] == kept["crashes"] == kept["raises"] == ["before"]
    assert parts["fine"]["rows"][0]["figures"] == {"sum": 2}
    assert 4.0 <= parts["hangs"]["seconds"] < 30.0
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| wrong | first \\| of two | failed | AssertionError: the number is 1" in table
    assert "| hangs | shows hangs | out of time | 1 measured |" in table
    assert "wrong: first | of two: AssertionError: the number is 1, expected 2" in printed
    logs = (tmp_path / "out" / "logs.txt").read_text()
    assert "Segmentation fault" in logs
    assert 'in run\n  File "' in logs.split("==== hangs")[1]  # where it hung
    assert len(list((tmp_path / "out").iterdir())) == 3
    beats = (tmp_path / "beats").stat().st_size
    assert beats == (tmp_path / "beats").stat().st_size  # its child is dead, too


def test_a_full_disk(tmp_path: Path) -> None:
    """A part that fills the disk, with files or with what it prints, is killed; later parts have room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = 'mount -t tmpfs -o size=48m tmpfs "$1" && cd / && shift && "$@" && cp -r "$DISK/work/out" "$KEPT"'
    within = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh")
    can = (
        shutil.which("unshare")
        and not subprocess.run([*within[:4], "true"], capture_output=True, check=False).returncode
    )
    if not can:
        pytest.skip("needs a user namespace, in which a small disk can be mounted")
    kept = tmp_path / "kept"
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from test_runner import run_planted\n"
        f"print(run_planted(Path({str(disk)!r}) / 'work', 'prints', 'fills', 'fine', reserve=8 << 20))\n"
    )
    ran = subprocess.run(
        [*within, str(disk), sys.executable, str(script)],
        env={**os.environ, "DISK": str(disk), "KEPT": str(kept)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    parts = parts_of(kept)
    outcomes = {name: part["outcome"] for name, part in parts.items()}
    assert outcomes == {"prints": "failed", "fills": "failed", "fine": "passed"}
    for name in ("prints", "fills"):
        assert parts[name]["reason"] == "it filled the disk"
    assert "the middle was left out" in (kept / "logs.txt").read_text()
    assert (kept / "logs.txt").stat().st_size < 4 << 20


BUNDLED = """
import sys
from pathlib import Path
from on_gpu import __main__ as program, table
from on_gpu.runner import Part
table.PARTS = program.PARTS = [Part(name, name, 60.0, "planted") for name in ("hangs", "fine")]
sys.argv = ["on_gpu", *sys.argv[1:]]
program.main()
"""


def run_in_time(work: Path) -> dict[str, Any]:
    """Run parts below a folder, with 20 of 30 seconds left, and return them."""
    for folder in ("planted", "bundle/wheels", "scratch"):
        (work / folder).mkdir(parents=True)
    for name in ("hangs", "fine"):
        (work / "planted" / f"{name}.py").write_text(PLANTED[name])
    options = ["--bundle", str(work / "bundle"), "--scratch", str(work / "scratch")]
    command = [sys.executable, "-c", BUNDLED, str(work / "out"), *options]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(TOOLS), str(work))),
        "ON_GPU_STARTED": str(time.time() - 10),  # as if imports had taken so long
    }
    command += ["--seconds", "30", "--reserve", "0"]
    subprocess.run(command, env=environment, check=False, timeout=120)
    return parts_of(work / "out")


def test_the_run_ends_in_time(timed: Future[dict[str, Any]]) -> None:
    """A part gets what the run has left, counted from its start, but for 8 seconds to kill and report."""
    parts = timed.result()
    outcomes = {name: part["outcome"] for name, part in parts.items()}
    assert outcomes == {"hangs": "out of time", "fine": "not started"}
    # By the clock of the run: the test itself may have to wait for a processor.
    assert 0 < parts["hangs"]["limit"] <= 30 - 10 - 8


def test_the_script_says_when_it_began(tmp_path: Path) -> None:
    """The limit counts from the first line of the script."""
    shown = tmp_path / "python"
    shown.write_text('#!/bin/sh\necho "$ON_GPU_STARTED"\n')
    shown.chmod(0o755)
    before = time.time()
    ran = subprocess.run(
        [TOOLS / "on_gpu.sh", str(tmp_path)],
        env={**os.environ, "PYTHON": str(shown)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert before - 0.1 <= float(ran.stdout) <= time.time()
