"""The verdicts of the benchmark that kills processes."""

from __future__ import annotations

import subprocess

from benchmarks.test_engine import BENCHMARKS

QUESTIONS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from interruptions import fault_of, fault_of_loss

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
"""


def test_a_fault_is_told_in_words(warm_python: str) -> None:
    """A check that crashes, and open requests that end with wrong tokens or another error."""
    command = [warm_python, "-c", QUESTIONS, str(BENCHMARKS)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert told.returncode == 0, told.stderr
