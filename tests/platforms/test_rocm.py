"""AMD GPUs: what the probe reads, and the platform."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from opgraft.machine.evidence import Device
from opgraft.machine.machine import Machine
from opgraft.platforms.rocm.kfd import Node
from opgraft.platforms.rocm.platform import RocmPlatform
from opgraft.platforms.rocm.probe import probe, visible_count
from support.machines.amd import GIB, MI300X, add_card, add_gpu_node, mi300x
from support.machines.build import Tree


def machine(folder: Path, build, **environ: str) -> Machine:
    """The machine that a function builds, with these variables."""
    tree = Tree(folder / "machine")
    build(tree)
    tree.environ.update(environ)
    tree.save()
    return Machine.recorded(tree.root)


def test_a_device_in_full(tmp_path: Path) -> None:
    """Model, target, memory, address, memory node and driver come from files."""
    assert probe(machine(tmp_path, mi300x(8))).devices[7] == Device(
        name="AMD Instinct MI300X OAM",
        capability="gfx942",
        memory=192 * GIB,
        pci_address="0000:e5:00.0",
        numa_node=1,
        driver="amdgpu 6.12.12",
    )


@pytest.mark.parametrize(
    ("version", "target"),
    [
        (90010, "gfx90a"),  # of a real MI210: ROCm/k8s-device-plugin, testdata/topo-mi210-xgmi-pcie
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
        (0, None),  # kernels before 5.16 do not say
    ],
)
def test_targets(version: int, target: str | None) -> None:
    """The decimal version becomes the name that compilers use, whose stepping is hexadecimal."""
    assert Node("1", {"gfx_target_version": version}, None, None).target == target


def test_partitions_share_a_card(tmp_path: Path) -> None:
    """In CPX mode each of the eight partitions is a device, at the address of its card."""
    evidence = probe(machine(tmp_path, mi300x(1, 8)))
    assert [device.pci_address for device in evidence.devices] == ["0000:05:00.0"] * 8
    assert {device.memory for device in evidence.devices} == {24 * GIB}
    assert evidence.reason == "1 AMD GPU in 8 partitions"


def test_partition_numbers_in_the_upper_bits(tmp_path: Path) -> None:
    """Some kernels put the partition into bits 28 to 31 of the location, some into its lowest."""

    def build(tree: Tree) -> None:
        tree.add_torch("2.8.0+rocm6.4", hip="6.4")
        tree.add_nodes("/dev/kfd")
        add_card(tree, 0, 1)
        add_gpu_node(tree, 3, 128, location=3 << 28 | 0x0500)

    assert [device.pci_address for device in probe(machine(tmp_path, build)).devices] == [
        "0000:05:00.0"
    ] * 2


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, {2, 3}),
        ({"HIP_VISIBLE_DEVICES": "1"}, {1}),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {0}),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, {1}),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, {3}),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2"}, set()),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4d1c4f6e9a2b0001"}, {1}),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4D1C4F6E9A2B0001,0"}, {0, 1}),
        ({"ROCR_VISIBLE_DEVICES": ""}, set()),
        ({"HIP_VISIBLE_DEVICES": "-1"}, set()),
    ],
)
def test_visible_devices(tmp_path: Path, environ: dict[str, str], visible: set[int]) -> None:
    """ROCr's list is applied first; HIP's, or CUDA's where HIP has none, chooses among what it leaves."""
    evidence = probe(machine(tmp_path, mi300x(4), **environ))
    assert {index for index, device in enumerate(evidence.devices) if not device.hidden} == visible
    assert evidence.available == bool(visible)
    assert visible_count(evidence) == len(visible)
    assert all(name in evidence.remedy for name in environ if not visible)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: (root / "dev/kfd").unlink(), "there is no device node /dev/kfd"),
        (
            lambda root: (root / "dev/dri/renderD128").unlink(),
            "there is no device node /dev/dri/renderD128",
        ),
        (
            lambda root: (root / "sys/class/kfd").rename(root / "away"),
            "the driver offers no compute device",
        ),
    ],
)
def test_what_is_missing(tmp_path: Path, change, reason: str) -> None:
    """Hardware without a device node, or without the compute side of its driver, is there and cannot be used."""
    live = machine(tmp_path, mi300x(1))
    change(live.root)
    evidence = probe(live)
    assert not evidence.available
    assert reason in evidence.reason
    assert len(evidence.devices) == 1
    assert evidence.remedy


def test_a_sandbox_without_pci(tmp_path: Path) -> None:
    """Where /sys shows no PCI at all, the topology's own vendor id is what there is to go by."""

    def build(tree: Tree) -> None:
        tree.add_torch("2.8.0+rocm6.4", hip="6.4")
        add_gpu_node(tree, 1, 128, location=0x0500)
        tree.add_nodes("/dev/kfd", "/dev/dri/renderD128")

    (device,) = probe(machine(tmp_path, build)).devices
    assert (device.name, device.pci_address) == ("AMD Instinct MI300X", None)


def test_a_topology_that_pci_contradicts(tmp_path: Path) -> None:
    """A node of the topology that says AMD, at an address where PCI has another vendor, is not AMD's."""

    def build(tree: Tree) -> None:
        tree.add_pci("0000:05:00.0", 0x1D94, MI300X, 0x120000)
        add_gpu_node(tree, 1, 128, location=0x0500)
        tree.add_nodes("/dev/kfd", "/dev/dri/renderD128")

    assert probe(machine(tmp_path, build)).devices == ()


@pytest.mark.parametrize(
    ("architecture", "fp8"),
    [
        ("gfx90a:sramecc+:xnack-", None),
        ("gfx942:sramecc+:xnack-", torch.float8_e4m3fnuz),
        ("gfx950", torch.float8_e4m3fn),
        ("gfx1100", None),
    ],
)
def test_capability(monkeypatch, architecture: str, fp8: torch.dtype | None) -> None:
    """The kind of fp8 follows from the target."""
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "AMD GPU")
    capability = RocmPlatform().capability()
    assert (capability.features, capability.fp8_dtype) == (tuple(architecture.split(":")), fp8)
