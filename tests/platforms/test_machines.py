"""What ``opgraft detect`` says about each fixture machine, compared with the files in tests/support/machines/snapshots.

After a change that is meant to be seen: ``UPDATE_SNAPSHOTS=1 pytest tests/platforms/test_machines.py``, and read the
difference as a user would.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import opgraft
import pytest
from click.testing import CliRunner
from opgraft.cli import cli as command_line
from opgraft.machine.evidence import Evidence
from opgraft.machine.machine import Machine
from opgraft.machine.recording import RecordingMachine
from support.machines.build import build, machines

SNAPSHOTS = Path(__file__).parents[1] / "support" / "machines" / "snapshots"
UPDATE = os.environ.get("UPDATE_SNAPSHOTS") == "1"
each_machine = pytest.mark.parametrize("name", sorted(machines()))


def compare(file: str, text: str) -> None:
    """Hold a text to its snapshot, or write it where snapshots are being renewed."""
    path = SNAPSHOTS / file
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"no snapshot {path}: see the head of this file"
    assert text == path.read_text(encoding="utf-8")


def detect(*arguments: str) -> str:
    """What the command prints, without the version of opgraft."""
    result = CliRunner().invoke(
        command_line, ["detect", *arguments], env={"COLUMNS": "80"}, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output.replace(opgraft.__version__, "VERSION")


@each_machine
def test_the_text(name: str, machine_folder) -> None:
    """The short form names the machine, the platform, its devices, and what is missing for the others."""
    folder = machine_folder(name)
    first, _, text = detect("--root", str(folder)).partition("\n")
    assert first == f"of the machine that is recorded in {folder}, not of this one:"
    compare(f"{name}.txt", text)


@each_machine
def test_the_json(name: str, machine_folder) -> None:
    """The JSON holds every candidate with its evidence."""
    text = detect("--root", str(machine_folder(name)), "--json")
    assert json.loads(text)["schema"] == "opgraft.detect/2"
    compare(f"{name}.json", text)


def test_every_snapshot_has_its_machine() -> None:
    """No snapshot is left over from a machine that is gone."""
    expected = {f"{name}.{kind}" for name in machines() for kind in ("txt", "json")}
    assert {path.name for path in SNAPSHOTS.iterdir()} == expected


@each_machine
def test_probes_are_pure(name: str, machine_folder, built_in_probes) -> None:
    """Asked twice about the same files, in a machine of its own each time, a probe says the same."""
    for probe in built_in_probes.values():
        assert probe(Machine.recorded(machine_folder(name))) == probe(
            Machine.recorded(machine_folder(name))
        )


@each_machine
def test_probes_are_fast(name: str, machine_folder, built_in_probes) -> None:
    """No probe takes 50 ms of a processor, on the largest machine either; the best of five, as machines may be busy."""
    for probe in built_in_probes.values():
        assert min(seconds(probe, machine_folder(name)) for _ in range(5)) < 0.05


def seconds(probe, folder: Path) -> float:
    machine = Machine.recorded(folder)
    start = time.process_time()
    probe(machine)
    return time.process_time() - start


@each_machine
def test_a_recording_decides_the_same(
    name: str, machine_folder, built_in_probes, tmp_path: Path
) -> None:
    """What the probes read of a machine, written down, gives the evidence of the machine itself."""
    recording = RecordingMachine(Machine.recorded(machine_folder(name)))
    evidence = [probe(recording) for probe in built_in_probes.values()]
    recording.write(tmp_path / "recorded")
    replayed = Machine.recorded(tmp_path / "recorded")
    again = [probe(replayed) for probe in built_in_probes.values()]
    assert [without_uuids(one) for one in again] == [without_uuids(one) for one in evidence]


def without_uuids(evidence: Evidence) -> str:
    """The evidence as text; a recording has other UUIDs than the machine."""
    return re.sub(
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", json.dumps(evidence.to_dict())
    )


def test_building_is_repeatable(tmp_path: Path) -> None:
    """The same name gives the same files each time; the largest machine has more than a thousand."""
    first, second = (
        build("nvidia-8-h100-mig", tmp_path / "a"),
        build("nvidia-8-h100-mig", tmp_path / "b"),
    )
    assert tree(first) == tree(second)
    assert len(tree(first)) > 1000


def tree(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_text()
        for p in paths
    }
