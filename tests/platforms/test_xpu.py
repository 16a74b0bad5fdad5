"""The XPU platform: which Intel GPUs are devices, what hides them, and what it asks of torch.xpu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import opgraft
import pytest
import torch
from opgraft.machine.machine import Machine, TorchBuild
from opgraft.ops import RMSNorm, SiluAndMul
from opgraft.platform import DeviceMemory, effective_chain
from opgraft.platforms.xpu.cards import CARDS
from opgraft.platforms.xpu.platform import XpuPlatform
from opgraft.platforms.xpu.probe import probe
from support.machines.build import Tree
from support.machines.intel import ALDER_LAKE, ARC_A770, ARC_B580, MAX_1550, OTHER_DISPLAY, add_gpu

XPU_BUILD = TorchBuild("2.8.0+xpu", {"xpu": "20250100"})


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def look(tree: Tree, torch_build: TorchBuild | None = XPU_BUILD, **environ: str):
    return probe(
        Machine(tree.root, environ, packages={}, torch=torch_build, denied=frozenset(tree.denied))
    )


def hidden(evidence) -> list[bool]:
    return [device.hidden for device in evidence.devices]


def test_nothing_of_intel(tree: Tree) -> None:
    """Without a display function of the vendor there is nothing to say about devices."""
    tree.add_pci("0000:00:1f.6", 0x8086, 0x15FB, 0x020000)  # a network function
    evidence = look(tree)
    assert (evidence.available, evidence.devices, evidence.reason) == (False, (), "no Intel GPU")


def test_the_facts_of_a_card(machine_folder) -> None:
    """Name, memory, address, node and driver come from the id, the driver's files and PCI."""
    (arc,) = probe(Machine.recorded(machine_folder("intel-arc-beside-integrated"))).devices
    assert (arc.name, arc.capability, arc.memory) == ("Intel Arc B580", "Xe2-HPG", 12 * 2**30)
    assert (arc.pci_address, arc.numa_node, arc.driver, arc.hidden) == (
        "0000:03:00.0",
        0,
        "xe",
        False,
    )


@pytest.mark.parametrize(
    ("hierarchy", "mask", "expected"),
    [
        ("", "", [False] * 4),
        ("FLAT", "0", [False, True, True, True]),
        ("FLAT", "2,1", [True, False, False, True]),
        ("COMBINED", " 3 ,", [True, True, True, False]),
        ("FLAT", "0,7", [False, True, True, True]),
        ("COMPOSITE", "", [False] * 2),
        ("composite", "1", [True, False]),
        ("COMPOSITE", "0.1", [False, True]),
        ("COMPOSITE", "0.0,1.1", [False, False]),
    ],
)
def test_the_mask_hides_tiles_or_cards(
    tree: Tree, hierarchy: str, mask: str, expected: list[bool]
) -> None:
    """The mask counts what the hierarchy makes a device: each tile, or each card."""
    for number in range(2):
        add_gpu(tree, f"0000:{0x29 + number:02x}:00.0", MAX_1550, number, code=OTHER_DISPLAY)
    evidence = look(tree, ZE_FLAT_DEVICE_HIERARCHY=hierarchy, ZE_AFFINITY_MASK=mask)
    assert evidence.available
    assert hidden(evidence) == expected
    assert sum(device.memory or 0 for device in evidence.devices) == 2 * 128 * 2**30


@pytest.mark.parametrize("mask", ["4", "-1", "x", "1 0", "\uff19"])
def test_a_mask_that_names_no_device(tree: Tree, mask: str) -> None:
    """Where the mask leaves none, the evidence names the variable and its value."""
    add_gpu(tree, "0000:29:00.0", MAX_1550, 0)
    evidence = look(tree, ZE_AFFINITY_MASK=mask)
    assert not evidence.available
    assert f"ZE_AFFINITY_MASK={mask!r} hides all of them" in evidence.reason
    assert "unset ZE_AFFINITY_MASK" in evidence.remedy


def test_tiles_as_the_driver_counts_them(tree: Tree) -> None:
    """The driver's tiles count, where it shows them, not the table's; so does its memory."""
    add_gpu(tree, "0000:29:00.0", MAX_1550, 0, tiles=(61 * 2**30, 61 * 2**30))
    evidence = look(tree)
    assert [device.memory for device in evidence.devices] == [61 * 2**30] * 2
    add_gpu(tree, "0000:3a:00.0", ARC_A770, 1)  # nothing tells its memory
    assert [device.memory for device in look(tree).devices][2:] == [None]


@pytest.mark.parametrize("device", [ALDER_LAKE, 0x7D55, 0x64A0, 0xB080, 0x3E92])
def test_integrated_gpus_are_no_xpus(tree: Tree, device: int) -> None:
    """GPUs of processors, Meteor Lake's and Lunar Lake's too, are not the platform, with either driver."""
    assert device not in CARDS
    add_gpu(tree, "0000:00:02.0", device, 0, driver="xe")
    evidence = look(tree)
    assert (evidence.available, evidence.devices) == (False, ())
    assert "part of the processor" in evidence.reason


def test_what_stands_in_the_way_is_said_together(tree: Tree) -> None:
    """A missing driver and a torch without XPUs are both named, each with its remedy."""
    add_gpu(tree, "0000:29:00.0", MAX_1550, 0, driver=None)
    evidence = look(tree, TorchBuild("2.8.0+cpu", {}))
    assert "0000:29:00.0 has no driver" in evidence.reason
    assert "torch 2.8.0+cpu is built without xpu" in evidence.reason
    assert "modprobe" in evidence.remedy
    assert "whl/xpu" in evidence.remedy


@pytest.mark.parametrize("torch_build", [None, TorchBuild("2.8.0+cu128", {"cuda": "12.8"})])
def test_torch_must_have_xpus(tree: Tree, torch_build: TorchBuild | None) -> None:
    """Without torch, or with one for another device, the GPU is found and cannot be used."""
    add_gpu(tree, "0000:29:00.0", ARC_B580, 0)
    evidence = look(tree, torch_build)
    assert not evidence.available
    assert len(evidence.devices) == 1


def test_one_of_two_within_reach(tree: Tree) -> None:
    """A container that was handed one of two cards uses that one, and says so."""
    add_gpu(tree, "0000:03:00.0", ARC_B580, 0, node=False)
    add_gpu(tree, "0000:04:00.0", ARC_B580, 1)
    evidence = look(tree)
    assert evidence.available
    assert [device.pci_address for device in evidence.devices] == ["0000:04:00.0"]
    assert "1 of 2 Intel GPUs within reach" in evidence.reason


def test_a_card_given_to_a_virtual_machine(tree: Tree) -> None:
    """A card that vfio-pci holds is named with the driver that holds it."""
    add_gpu(tree, "0000:29:00.0", MAX_1550, 0, driver="vfio-pci")
    assert "0000:29:00.0 is bound to the driver vfio-pci" in look(tree).reason


def test_the_platform_starts_nothing() -> None:
    """Creating the platform, and asking what it is, initialises no device."""
    platform = XpuPlatform()
    assert (platform.name, platform.device_type) == ("xpu", "xpu")
    assert effective_chain(platform) == ("oot", "xpu", "native")
    assert (platform.distributed_backend, platform.compile_backend) == ("xccl", "inductor")
    assert platform.visibility_variable == "ZE_AFFINITY_MASK"
    assert platform.graph_class is getattr(torch.xpu, "XPUGraph", None)
    assert {"Stream", "Event", "current_stream", "stream"} <= set(dir(platform.streams))
    assert not torch.xpu.is_initialized()


def test_what_it_asks_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member asks torch.xpu for the device that was named."""
    asked: list[object] = []
    properties = SimpleNamespace(
        name="Intel(R) Arc(TM) B580 Graphics",
        has_fp16=True,
        has_fp64=False,
        has_subgroup_matrix_multiply_accumulate=True,
    )
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.xpu, "get_device_properties", lambda index: asked.append(index) or properties
    )
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda index: asked.append(index) or (5, 12))
    monkeypatch.setattr(torch.xpu, "synchronize", asked.append)
    platform = XpuPlatform()
    capability = platform.capability(2)
    assert platform.device_count() == 3
    assert capability.name == "Intel(R) Arc(TM) B580 Graphics"
    assert capability.dtypes == (torch.float32, torch.bfloat16, torch.float16)
    assert (capability.features, capability.fp8_dtype) == (("dpas",), None)
    properties.has_fp64, properties.has_subgroup_matrix_multiply_accumulate = True, False
    assert torch.float64 in platform.capability(1).dtypes
    assert platform.capability(1).features == ()
    assert platform.memory(1) == DeviceMemory(total=12, free=5)
    platform.synchronize(1)
    assert asked == [2, 1, 1, 1, 1]


def test_seeding() -> None:
    """The seed holds for the host's generator, and for those of XPUs where there are any."""
    XpuPlatform().manual_seed(7)
    first = torch.randn(3)
    XpuPlatform().manual_seed(7)
    assert torch.equal(torch.randn(3), first)


def test_kernels_for_xpus_are_bound(site) -> None:
    """On its dispatch chain a replacement's forward_xpu runs, and a kernel for another device does not."""
    site.platform(
        "card",
        probe="return Evidence(True, 'found')",
        platform="from opgraft.platforms.xpu.platform import XpuPlatform\n"
        "class Device(XpuPlatform):\n    name = 'card'\n",
        plugin="import opgraft\nfrom opgraft.ops import RMSNorm, SiluAndMul\n"
        "@opgraft.CustomOp.register_oot('RMSNorm')\nclass Norm(RMSNorm):\n"
        "    def forward_xpu(self, x, residual=None):\n        return x * 3\n"
        "@opgraft.CustomOp.register_oot('SiluAndMul')\nclass Gate(SiluAndMul):\n"
        "    def forward_cuda(self, x):\n        return x\n",
    )
    assert opgraft.current_platform().device_type == "xpu"
    assert RMSNorm(4).decision.chosen == "Norm.forward_xpu"
    assert torch.equal(RMSNorm(4)(torch.ones(2, 4)), torch.full((2, 4), 3.0))
    own = SiluAndMul().decision.chosen
    assert own in (
        "SiluAndMul.forward_native",
        "SiluAndMul.forward_xpu",
    )  # the latter where Triton is installed
