"""NVIDIA GPUs: what the probe reads, the management library, and the platform."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from opgraft.machine.evidence import Device
from opgraft.machine.machine import Machine
from opgraft.platforms.cuda import nvml
from opgraft.platforms.cuda.chips import BLOCKS, chip
from opgraft.platforms.cuda.platform import CudaPlatform
from opgraft.platforms.cuda.probe import probe, visible_count
from support.machines.build import Tree
from support.machines.nvidia import H100, add_driver, add_gpus, add_mig, h100, uuid


def machine(folder: Path, build, **environ: str) -> Machine:
    """The machine that a function builds, with these variables."""
    tree = Tree(folder / "machine")
    build(tree)
    tree.environ.update(environ)
    tree.save()
    return Machine.recorded(tree.root)


def test_a_device_in_full(tmp_path: Path) -> None:
    """Model, compute capability, address, memory node and driver come from files; memory is in none of them."""
    evidence = probe(machine(tmp_path, h100()))
    assert evidence.available
    assert evidence.devices[3] == Device(
        name="NVIDIA H100 80GB HBM3",
        capability="sm_90",
        pci_address="0000:48:00.0",
        numa_node=1,
        driver="nvidia 570.124.06",
    )


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        (0x1DB6, "sm_70"),  # Tesla V100
        (0x1EB8, "sm_75"),  # Tesla T4
        (0x20B5, "sm_80"),  # A100 80GB PCIe
        (0x2184, "sm_75"),  # GeForce GTX 1660
        (0x2236, "sm_86"),  # A10
        (0x2335, "sm_90"),  # H200
        (0x2684, "sm_89"),  # GeForce RTX 4090
        (0x27B8, "sm_89"),  # L4
        (0x2901, "sm_100"),  # B200
        (0x2B85, "sm_120"),  # GeForce RTX 5090
        (0x31C2, "sm_103"),  # GB300
        (0x0FF0, None),
        (0xFFFF, None),
    ],
)
def test_compute_capability_by_pci_id(device: int, capability: str | None) -> None:
    """The chips in use are known by their PCI id; others are left open rather than guessed."""
    assert chip(device)[1] == capability


def test_the_blocks_of_ids_do_not_overlap() -> None:
    """Each PCI id belongs to one chip, and the table is in order."""
    edges = [edge for first, last, *_ in BLOCKS for edge in (first, last)]
    assert edges == sorted(set(edges))


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("0,2", {0, 2}),
        ("3", {3}),
        ("0,9,1", {0}),
        ("0,2,-1,1", {0, 2}),
        ("1,1", set()),
        ("", set()),
        ("-1", set()),
        ("none", set()),
        ("NoDevFiles", set()),
        (uuid(2), {2}),
        ("GPU-00000002", {2}),
        ("GPU-0000000", set()),  # the first characters of four
        ("MIG-7d3e5b1c-0000-5c4e-8a3f-0123456789ab", set()),  # there is no MIG device
    ],
)
def test_visible_devices(tmp_path: Path, value: str, visible: set[int]) -> None:
    """CUDA_VISIBLE_DEVICES hides devices by CUDA's rules; all hidden means unavailable, with the variable as remedy."""
    evidence = probe(machine(tmp_path, h100(), CUDA_VISIBLE_DEVICES=value))
    assert {index for index, device in enumerate(evidence.devices) if not device.hidden} == visible
    assert evidence.available == bool(visible)
    assert visible_count(evidence) == len(visible)
    assert ("CUDA_VISIBLE_DEVICES" in evidence.remedy) == (not visible)


class TestMig:
    """GPUs that are cut into MIG devices."""

    @staticmethod
    def build(tree: Tree) -> None:
        tree.add_torch("2.8.0+cu128", cuda="12.8")
        add_driver(tree)
        add_gpus(tree, 2, H100)
        add_mig(tree, 1, 3, 12)

    def test_each_is_a_device(self, tmp_path: Path) -> None:
        """A MIG device has the address of its GPU; one process sees one of them at most."""
        evidence = probe(machine(tmp_path, self.build))
        assert [device.pci_address for device in evidence.devices] == [
            "0000:18:00.0",
            *["0000:28:00.0"] * 3,
        ]
        assert visible_count(evidence) == 1

    @pytest.mark.parametrize(
        ("value", "visible"),
        [
            (f"MIG-{uuid(1)}/8/0", {2}),
            (uuid(0), {0}),
            ("MIG-7d3e5b1c-0000-5c4e-8a3f-0123456789ab", {1, 2, 3}),  # no file says which of them
        ],
    )
    def test_they_can_be_named(self, tmp_path: Path, value: str, visible: set[int]) -> None:
        """By instance numbers exactly; by a UUID of its own a MIG device is known to be one, not which."""
        evidence = probe(machine(tmp_path, self.build, CUDA_VISIBLE_DEVICES=value))
        assert {
            index for index, device in enumerate(evidence.devices) if not device.hidden
        } == visible


def test_everything_that_is_missing_is_said(tmp_path: Path) -> None:
    """Two obstacles give two reasons and two remedies, so that the user need not come back for the second."""

    def build(tree: Tree) -> None:
        h100(denied=True)(tree)
        tree.add_torch("2.8.0+cpu")

    evidence = probe(machine(tmp_path, build))
    assert (
        "may not open /dev/nvidia0; the installed torch 2.8.0+cpu is built without cuda"
        in evidence.reason
    )
    assert "group" in evidence.remedy
    assert "pip install" in evidence.remedy


def test_no_torch_at_all(tmp_path: Path) -> None:
    """Where torch is missing the reason says so."""
    evidence = probe(machine(tmp_path, lambda tree: (h100()(tree), tree.add_torch(None))))
    assert evidence.reason == "4 NVIDIA GPUs, but torch is not installed"


FAKE_NVML = """
import os, time
from types import SimpleNamespace as Value
class NVMLError(Exception): pass
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetPciInfo(handle): return Value(busId=b"00000000:18:00.0")
def nvmlDeviceGetCudaComputeCapability(handle): return [9, 0]
def nvmlDeviceGetMemoryInfo(handle): {memory}
def nvmlDeviceGetName(handle): return "NVIDIA H100 80GB HBM3"
"""


class TestNvml:
    """NVIDIA's management library, asked in a child process; here a stand-in for its Python package."""

    LIVE = Machine(environ={}, packages={nvml.PACKAGE: "13.580.82"})
    FOUND = Device("GPU", pci_address="0000:18:00.0")

    @staticmethod
    def install(site, init: str, memory: str = "return Value(total=85520809984)") -> None:
        (site.folder / "pynvml.py").write_text(FAKE_NVML.format(init=init, memory=memory))

    def test_it_adds_what_files_leave_open(self, site) -> None:
        """Memory and capability are filled in, by address; the name of the files stays."""
        self.install(site, "pass")
        other = Device("other", pci_address="0000:99:00.0")
        devices, (fact,) = nvml.with_detail(self.LIVE, [self.FOUND, other])
        assert devices == [Device("GPU", "sm_90", 85520809984, "0000:18:00.0"), other]
        assert fact.value == "answered"

    def test_files_come_first(self, site) -> None:
        """What a file said is not overruled."""
        self.install(site, "pass")
        known = Device("GPU", "sm_75", 1, "0000:18:00.0")
        assert nvml.with_detail(self.LIVE, [known])[0] == [known]

    def test_a_gpu_without_memory_of_its_own(self, site) -> None:
        """Where the library has no answer for memory, the rest of what it says counts."""
        self.install(site, "pass", "raise NVMLError('Not Supported')")
        assert nvml.with_detail(self.LIVE, [self.FOUND])[0] == [
            Device("GPU", "sm_90", None, "0000:18:00.0")
        ]

    def test_it_tells_the_devices_of_a_windows_host(self, site) -> None:
        """Where the only file is a node without address, the library's list is the better one."""
        self.install(site, "pass")
        devices, _ = nvml.with_detail(self.LIVE, [Device("a GPU", driver="dxgkrnl")])
        assert [(d.name, d.driver) for d in devices] == [("NVIDIA H100 80GB HBM3", "dxgkrnl")]

    @pytest.mark.parametrize(
        ("init", "reason"),
        [
            ("raise RuntimeError('Driver/library version mismatch')", "version mismatch"),
            ("os.abort()", "ended with status -6"),
            ("os._exit(0)", "ended with status 0"),
            ("time.sleep(60)", "no answer within"),
        ],
    )
    def test_its_failure_is_a_fact(self, site, monkeypatch, init: str, reason: str) -> None:
        """Whatever becomes of the child, the devices stay as files have them, and the evidence says what happened."""
        self.install(site, init)
        monkeypatch.setattr(nvml, "TIME_LIMIT", 0.5 if "sleep" in init else 30)
        start = time.monotonic()
        devices, (fact,) = nvml.with_detail(self.LIVE, [self.FOUND])
        assert devices == [self.FOUND]
        assert reason in fact.value
        assert time.monotonic() - start < 50

    def test_it_is_asked_of_the_live_machine_only(self, site, tmp_path: Path) -> None:
        """A recorded machine, or one without the package, is left to its files."""
        self.install(site, "raise RuntimeError('asked')")
        recorded = Machine(tmp_path, {}, packages={nvml.PACKAGE: "13"})
        for machine in (recorded, Machine(environ={}, packages={})):
            assert nvml.with_detail(machine, [self.FOUND]) == ([self.FOUND], ())


@pytest.mark.parametrize(
    ("level", "bfloat16", "fp8"),
    [
        ((7, 5), False, None),
        ((8, 6), True, None),
        ((8, 9), True, torch.float8_e4m3fn),
        ((10, 0), True, torch.float8_e4m3fn),
    ],
)
def test_capability(
    monkeypatch, level: tuple[int, int], bfloat16: bool, fp8: torch.dtype | None
) -> None:
    """The dtypes follow from the compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: level)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    capability = CudaPlatform().capability(1)
    assert (capability.name, capability.features) == ("GPU 1", (f"sm_{level[0]}{level[1]}",))
    assert (torch.bfloat16 in capability.dtypes, capability.fp8_dtype) == (bfloat16, fp8)
    assert {torch.float32, torch.float16} <= set(capability.dtypes)
