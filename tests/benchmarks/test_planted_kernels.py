"""``benchmarks/planted_kernels.py``: what it counts, and a planted kernel of each kind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from benchmarks.test_engine import BENCHMARKS

QUESTIONS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import planted_kernels as script

path = Path(sys.argv[2])

def row(plant, kind, whole=(), brief=()):
    return {"name": plant.name, "kind": kind, "whole": list(whole), "brief": list(brief)}

every = [(kind, plant) for kind, plants in script.KINDS.items() for plant in plants]
wrong = [row(plant, kind, ["a: b"], ["a: b"]) for kind, plant in every if kind != "correct"]
correct = [row(plant, kind) for kind, plant in every if kind == "correct"]
assert (len(wrong), len(correct)) == (60, 60)
assert {len({each["name"] for each in rows}) for rows in (wrong, correct)} == {60}
whole = script.counted(wrong + correct)["whole"]
assert whole == {"corner": 20, "cheat": 10, "subtle": 30, "correct": 0, "kernelbench": 0}
assert list(script.faults_of_the_kit(wrong + correct)) == []
assert script.is_whole(wrong + correct)
assert not script.is_whole(wrong + correct[1:])

# 57 of the whole form and 45 of the short one are enough, and one less is not.
for form, enough in (("whole", 57), ("brief", 45)):
    missed = [{**each, form: []} for each in wrong[enough:]]
    assert list(script.faults_of_the_kit(wrong[:enough] + missed + correct)) == []
    missed.append({**wrong[0], form: []})
    (told,) = script.faults_of_the_kit(wrong[1:enough] + missed + correct)
    assert told == f"the {form} kit finds {enough - 1} wrong kernels, expected {enough} or more"

accused = {**correct[0], "brief": ["gelu-values: 1 of 1"]}
(told,) = script.faults_of_the_kit([*wrong, accused, *correct[1:]])
assert told == f"the brief kit accuses correct kernels: {accused['name']}"
# A correct kernel that is accused is no wrong one that is found.
missed = [{**each, "whole": []} for each in wrong[56:]]
accused = {**correct[0], "whole": ["gelu-values: 1 of 1"]}
assert len(list(script.faults_of_the_kit(wrong[:56] + missed + [accused]))) == 2

# A later run of a plant takes the place of its row, and the others stay in their order.
first, second = (row(plant, kind) for kind, plant in every[:2])
script.keep(path, [second, first], {"commit": "c1"})
later = script.together(path, [{**second, "whole": ["x: y"]}])
assert [each["name"] for each in later] == [first["name"], second["name"]]
assert later[1]["whole"] == ["x: y"]
kept = json.loads(path.read_text())
assert (kept["commit"], kept["counts"]["whole"]["corner"]) == ("c1", 0)
"""

CHOSEN = {
    "double_as_float": "corner",
    "results_by_samples": "cheat",
    "groups_ignored": "subtle",
    "tail_of_seven": "corner",
    "largest_of_both_ends": "correct",
}
"""Kernels that the short form judges quickly. One is written in C++."""


def test_what_is_counted(warm_python: str, tmp_path: Path) -> None:
    """The limits are those of the issue, and an accused kernel counts against the kit."""
    command = [warm_python, "-c", QUESTIONS, str(BENCHMARKS), str(tmp_path / "planted.json")]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert told.returncode == 0, told.stderr


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ to build a kernel with")
def test_the_short_form_judges_a_kernel_of_each_kind(warm_python: str) -> None:
    """The wrong ones are found, and the correct one is not accused."""
    script = str(BENCHMARKS / "planted_kernels.py")
    command = [warm_python, script, "--brief", *CHOSEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    told = {}
    for line in done.stdout.splitlines()[:-1]:
        plant, _, checks = line.partition(": brief: ")
        told[plant] = checks != "-"
    assert told == {f"{kind} {name}": kind != "correct" for name, kind in CHOSEN.items()}
