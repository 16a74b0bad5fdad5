"""The verdicts of the benchmark that kills processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.test_engine import BENCHMARKS

QUESTIONS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from interruptions import fault_of, fault_of_loss, keep

def raises(error):
    def answer():
        raise error
    return answer

begin = time.monotonic()
assert fault_of(lambda: None) == ""
assert fault_of(raises(ValueError("x"))) == "ValueError: x"
assert fault_of(lambda: os._exit(3)) == "it crashes with the exit code 3"
assert time.monotonic() - begin < 60
whole = [("length", [1, 2])]
assert fault_of_loss(lambda: whole, whole) == ""
assert fault_of_loss(lambda: [("error", [1])], whole) == ""
for wrong in (("error", [2]), ("length", [1]), ("abort", [1]), ("length", [1, 3])):
    assert "an open request ends with" in fault_of_loss(lambda: [wrong], whole), wrong
assert fault_of_loss(raises(KeyError(1)), whole) == "the open requests raise KeyError: 1"
import json
from pathlib import Path
path = Path(sys.argv[2])
for seed, scene in ((2, "a worker"), (1, "a lockfile"), (1, "a worker"), (2, "a worker")):
    keep(path, {"scene": scene, "seed": seed}, {"commit": f"c{seed}"})
found = json.loads(path.read_text())
assert found["commit"] == "c2"
told = [(row["scene"], row["seed"]) for row in found["scenes"]]
assert told == [("a lockfile", 1), ("a worker", 1), ("a worker", 2)], told
"""


def test_a_fault_is_told_in_words(warm_python: str, tmp_path: Path) -> None:
    """A crash, wrong tokens and another error are faults. A file keeps a row for each seed."""
    command = [warm_python, "-c", QUESTIONS, str(BENCHMARKS), str(tmp_path / "rows.json")]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert told.returncode == 0, told.stderr
