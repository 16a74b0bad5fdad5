"""The table of hardware that no built-in platform serves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from opgraft.machine.machine import Machine
from opgraft.machine.recording import RecordingMachine
from opgraft.plugins.discovery import PLATFORM_GROUP, scan
from opgraft.plugins.hardware import unclaimed_hardware
from opgraft.registry.decision import Decision
from support.machines.build import Tree, machines
from support.machines.google import UNASSIGNED, V4

SPECS = [offer.load() for offer in scan().of_group(PLATFORM_GROUP) if offer.built_in]
(sightings,) = [spec.sightings for spec in SPECS if spec.sightings]

SEEN = {
    "other-ascend-910b": ("Huawei Ascend 910B", 8),
    "other-ascend-container": ("Huawei Ascend", 2),
    "other-gaudi2": ("Intel Gaudi 2", 8),
    "other-gaudi3": ("Intel Gaudi 3", 1),
    "other-intel-npu": ("Intel NPU", 1),
    "other-hygon-k100-ai": ("Hygon DCU", 2),
    "other-metax": ("MetaX GPU", 2),
    "other-moore-threads": ("Moore Threads GPU", 1),
    "other-cambricon": ("Cambricon MLU", 1),
    "other-iluvatar": ("Iluvatar GPU", 1),
    "other-apple": ("Apple GPU", 1),
    "other-hygon-dcu": ("Hygon DCU", 1),  # it passes for an AMD GPU
    "other-impostor": ("MetaX GPU", 1),  # it passes for an NVIDIA GPU
}


@pytest.mark.parametrize("name", sorted(machines()))
def test_what_is_seen(name: str, machine_folder) -> None:
    """Each machine shows its own kind and no other; processors and controllers of the same vendors show nothing."""
    seen = [
        (sighting.kind, sighting.count)
        for sighting in sightings(Machine.recorded(machine_folder(name)))
    ]
    assert seen == ([SEEN[name]] if name in SEEN else [])


@pytest.mark.parametrize("name", SEEN)
def test_a_recording_shows_the_same(name: str, machine_folder, tmp_path: Path) -> None:
    """What the table reads is written down like what probes read."""
    recording = RecordingMachine(Machine.recorded(machine_folder(name)))
    seen = list(sightings(recording))
    recording.write(tmp_path / "recorded")
    assert list(sightings(Machine.recorded(tmp_path / "recorded"))) == seen


def test_accel_nodes_tell_nothing(machine_folder, built_in_probes, tmp_path: Path) -> None:
    """Nodes named accel belong to TPUs, to Gaudi and to NPUs: PCI decides which, and nodes alone are nothing."""
    gaudi, npu = (
        Machine.recorded(machine_folder(name)) for name in ("other-gaudi2", "other-intel-npu")
    )
    assert not built_in_probes["tpu"](gaudi).devices
    assert not built_in_probes["tpu"](npu).devices
    tree = Tree(tmp_path / "tpu")
    tree.add_pci("0000:00:04.0", 0x1AE0, V4, UNASSIGNED)
    tree.add_nodes("/dev/accel0")
    assert built_in_probes["tpu"](Machine(tree.root, {}, packages={})).devices
    assert not list(sightings(Machine(tree.root, {}, packages={})))
    alone = Tree(tmp_path / "alone")
    alone.add_nodes("/dev/accel0", "/dev/accel/accel0", "/dev/accel/accel_controlD0")
    machine = Machine(alone.root, {}, packages={})
    assert not built_in_probes["tpu"](machine).devices
    assert not list(sightings(machine))


def test_several_kinds_of_one_vendor(tmp_path: Path) -> None:
    """Generations are told apart, each with its own addresses."""
    tree = Tree(tmp_path)
    for bus, device in ((1, 0x1000), (2, 0x1020), (3, 0x1021), (4, 0x1063), (5, 0x1FFF)):
        tree.add_pci(f"0000:{bus:02x}:00.0", 0x1DA3, device, 0x120000)
    tree.add_pci("0000:06:00.0", 0x1DA3, 0x1020, 0x020000)  # some other function
    seen = {
        sighting.kind: sighting.addresses
        for sighting in sightings(Machine(tmp_path, {}, packages={}))
    }
    assert seen == {
        "Intel Gaudi": ("0000:01:00.0", "0000:05:00.0"),
        "Intel Gaudi 2": ("0000:02:00.0", "0000:03:00.0"),
        "Intel Gaudi 3": ("0000:04:00.0",),
    }


def test_what_a_platform_claims_is_not_reported(machine_folder) -> None:
    """Hardware that a platform's probe lists among its devices is served; without one it is reported."""
    machine = Machine.recorded(machine_folder("other-metax"))
    (reported,) = unclaimed_hardware(machine, Decision("platform", "cpu", "", (), ""))
    assert reported.kind == "MetaX GPU"
    assert str(reported).startswith("hardware found, no plugin installed: 2 x MetaX GPU")


DAMAGE = {
    "folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
    "binary": lambda path: path.write_bytes(b"\xff\0\xfe"),
    "huge": lambda path: path.write_bytes(b"x" * (3 << 20)),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("file", ["vendor", "device", "class"])
def test_damaged_functions_are_left_out(kind: str, file: str, tmp_path: Path) -> None:
    """A function whose files are damaged is not seen, and the others are."""
    tree = Tree(tmp_path)
    for bus in (1, 2):
        tree.add_pci(f"0000:{bus:02x}:00.0", 0x9999, 0x4001, 0x038000)
    damaged = tmp_path / "sys/bus/pci/devices/0000:01:00.0" / file
    damaged.unlink()
    DAMAGE[kind](damaged)
    (sighting,) = sightings(Machine(tmp_path, {}, packages={}))
    assert sighting.addresses == ("0000:02:00.0",)


@pytest.mark.parametrize("root", ["missing", "file"])
def test_a_root_that_is_no_folder(root: str, tmp_path: Path) -> None:
    """A root that does not exist, or is a file, shows nothing."""
    (tmp_path / "file").touch()
    assert list(sightings(Machine(tmp_path / root, {}, packages={}))) == []


@pytest.mark.parametrize("name", ["nvidia-8-h100-mig", "other-gaudi2"])
def test_the_table_is_fast(name: str, machine_folder) -> None:
    """Asking for every row takes less than a probe may, 50 ms."""

    def seconds() -> float:
        machine = Machine.recorded(machine_folder(name))
        start = time.process_time()
        list(sightings(machine))
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.05
