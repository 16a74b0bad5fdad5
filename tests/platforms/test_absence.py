"""Reasons of the probes of GPUs and TPUs: hardware that is not there is told apart from what could not be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from opgraft.machine.evidence import Evidence
from opgraft.machine.machine import Machine
from opgraft.machine.recording import RecordingMachine
from opgraft.platforms.cpu.probe import probe as cpu
from opgraft.platforms.cuda.probe import probe as cuda
from opgraft.platforms.obstacles import torch_obstacle
from opgraft.platforms.pci import FOLDER
from opgraft.platforms.rocm.probe import probe as rocm
from opgraft.platforms.tpu.probe import probe as tpu
from opgraft.platforms.xpu.probe import probe as xpu
from support.machines.build import Tree

Probe = Callable[[Machine], Evidence]
PROBES = {
    cuda: ("NVIDIA GPU", 0x10DE),
    rocm: ("AMD GPU", 0x1002),
    xpu: ("Intel GPU", 0x8086),
    tpu: ("TPU", 0x1AE0),
}


def nothing(tree: Tree) -> None:
    """A container without /sys."""


def no_folder(tree: Tree) -> None:
    tree.write("/sys/bus/pci")
    tree.write("/sys/bus/usb/devices")


def a_file(tree: Tree) -> None:
    tree.write(FOLDER)


def out_of_the_tree(tree: Tree) -> None:
    tree.link(FOLDER, "/tmp")  # noqa: S108  # nothing is written there


def no_vendor(tree: Tree) -> None:
    tree.folder(f"{FOLDER}/0000:01:00.0/vendor")


UNREAD = {
    nothing: "it does not exist",
    no_folder: "Not a directory",
    a_file: "Not a directory",
    out_of_the_tree: f"{FOLDER} leads out of ",
    no_vendor: "0000:01:00.0/vendor",
}


def other_buses(tree: Tree) -> None:
    tree.folder("/sys/bus/usb/devices")


def empty_bus(tree: Tree) -> None:
    tree.folder(FOLDER)


def other_vendors(tree: Tree) -> None:
    tree.add_other_functions(3)


ABSENT = (other_buses, empty_bus, other_vendors)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("make", UNREAD)
def test_what_could_not_be_read(probe: Probe, make: Callable[[Tree], None], tmp_path: Path) -> None:
    """The reason and the fact name the file and why it could not be read, and do not say that nothing is there."""
    make(Tree(tmp_path))
    found = probe(Machine(tmp_path, environ={}, packages={}))
    name, _ = PROBES[probe]
    assert found.reason.startswith(f"no {name} found, as {FOLDER} could not be read: ")
    assert UNREAD[make] in found.reason
    (fact,) = found.facts
    assert fact.value.startswith("could not be read: ")


@pytest.mark.parametrize("probe", PROBES)
def test_a_function_whose_kind_could_not_be_read(probe: Probe, tmp_path: Path) -> None:
    """It counts only for the probe of its vendor."""
    _, vendor = PROBES[probe]
    tree = Tree(tmp_path)
    tree.write(f"{FOLDER}/0000:01:00.0/vendor", f"{vendor:#06x}")
    tree.write(f"{FOLDER}/0000:01:00.0/device", "0x0001")
    machine = Machine(tmp_path, environ={}, packages={})
    assert "0000:01:00.0/class" in probe(machine).reason
    others = {other for other in PROBES if other is not probe}
    assert {other(machine).reason for other in others} == {f"no {PROBES[o][0]}" for o in others}


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("make", ABSENT)
def test_what_is_not_there(probe: Probe, make: Callable[[Tree], None], tmp_path: Path) -> None:
    """A machine whose /sys can be read has no such hardware; a recording of it says the same."""
    make(Tree(tmp_path / "machine"))
    recording = RecordingMachine(Machine(tmp_path / "machine", environ={}, packages={}))
    found = probe(recording)
    assert found.reason == f"no {PROBES[probe][0]}"
    recording.write(tmp_path / "recorded")
    assert probe(Machine.recorded(tmp_path / "recorded")) == found


def test_files_of_the_processor(tmp_path: Path) -> None:
    """A file that is not there is told apart from one that cannot be read."""
    (absent,) = cpu(Machine(tmp_path, environ={}, packages={})).facts
    assert absent.value == "could not be read: it does not exist"
    (tmp_path / "proc/cpuinfo").mkdir(parents=True)
    (unread,) = cpu(Machine(tmp_path, environ={}, packages={})).facts
    assert unread.value == "could not be read"


def test_a_torch_whose_build_could_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed torch without a readable version file is not said to be missing."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    from importlib.util import spec_from_file_location

    from opgraft.machine import machine

    spec = spec_from_file_location("torch", tmp_path / "torch/__init__.py")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec)
    machine._installed_torch.cache_clear()
    try:
        obstacle = torch_obstacle(Machine(), "cuda", "reinstall it")
    finally:
        machine._installed_torch.cache_clear()
    assert obstacle is not None
    assert obstacle.missing == "what the installed torch is built for could not be read"


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (nothing, f"no TPU found, as {FOLDER} could not be read: it does not exist"),
        (no_vendor, f"no TPU found, as {FOLDER} could not be read: 0000:01:00.0/vendor"),
        (other_buses, "no TPU"),
    ],
)
def test_no_tpu_under_the_variable_for_tests(
    tmp_path: Path, fill: Callable[[Tree], None], reason: str
) -> None:
    """With PJRT_DEVICE=CPU the reason still tells chips that are missing from those that could not be read."""
    tree = Tree(tmp_path)
    fill(tree)
    evidence = tpu(Machine(tree.root, environ={"PJRT_DEVICE": "CPU"}))
    assert not evidence.available
    asks = "; PJRT_DEVICE=CPU asks for XLA's CPU client, for tests, but no torch_xla fits "
    assert evidence.reason.startswith(f"{reason}{asks}")
    places = [fact.source for fact in evidence.facts]
    assert places[:2] == [FOLDER, "PJRT_DEVICE"]
