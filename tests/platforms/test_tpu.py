"""The TPU platform: which chips are found, which of two packages serves them, and what is asked of those.

Both packages are stood in for by modules with the calls of the real ones; ``make test-xla`` runs torch_xla itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from opgraft.errors import PlatformError
from opgraft.machine.machine import Machine, TorchBuild
from opgraft.platform import DeviceMemory, effective_chain
from opgraft.platforms.tpu import packages
from opgraft.platforms.tpu.platform import TpuPlatform
from opgraft.platforms.tpu.probe import probe
from opgraft.plugins.selection import decide_platform
from opgraft.registry.state import host_state
from support.machines.build import Tree
from support.machines.google import UNASSIGNED, V2_OR_V3, V4, V6E, V7X, add_vfio_chips, add_vm

TORCH_XLA = {"torch_xla": "2.9.0", "libtpu": "0.0.21"}
TORCH_TPU = {"torch_tpu": "0.2.0", "libtpu": "0.0.50"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def machine(
    tree: Tree,
    installed: dict[str, str] | None = None,
    torch: str | None = "2.13.0",
    **environ: str,
) -> Machine:
    build = TorchBuild(torch, {}) if torch else None
    packages = TORCH_TPU if installed is None else installed
    return Machine(
        tree.root, environ, packages=packages, torch=build, denied=frozenset(tree.denied)
    )


class TestThePackage:
    """One of two packages, or none, fits the installed torch."""

    @pytest.mark.parametrize(
        ("torch_version", "installed", "chosen"),
        [
            ("2.9.0", TORCH_XLA, "torch_xla"),
            ("2.9.1+cu128", TORCH_XLA, "torch_xla"),
            ("2.9.1", {**TORCH_XLA, **TORCH_TPU}, "torch_xla"),
            ("2.11.0", TORCH_TPU, "torch_tpu"),
            ("2.13.0+cpu", {**TORCH_XLA, **TORCH_TPU}, "torch_tpu"),
            ("2.15.0", TORCH_TPU, "torch_tpu"),
            ("2.15.0a0+git1234", TORCH_TPU, "torch_tpu"),
            ("2.15.1", TORCH_TPU, None),
            ("2.16.0", TORCH_TPU, None),
            ("2.10.0", TORCH_TPU, None),
            ("2.10.0", TORCH_XLA, None),
            ("2.13.0", TORCH_XLA, None),
            ("2.9.1", TORCH_TPU, None),
            ("2.9.1", {"torch_xla": "2.8.1"}, None),
            ("2.13.0", {"torch_tpu": "1.0"}, None),
            ("2.13.0", {"torch_tpu": "nonsense"}, None),
            ("unknown", TORCH_TPU, None),
            (None, TORCH_TPU, None),
            ("2.13.0", {}, None),
        ],
    )
    def test_the_torch_decides(
        self, tree: Tree, torch_version: str | None, installed: dict[str, str], chosen: str | None
    ) -> None:
        """The versions of both decide, and every package of the table is in the facts with its reason."""
        choice = packages.choose(machine(tree, installed, torch_version))
        assert (choice.package.name if choice.package else None) == chosen
        facts = {fact.source: fact.value for fact in choice.facts}
        assert facts["package torch"] == (torch_version or "not installed")
        assert (
            (f"package {chosen}" in facts)
            if chosen
            else {"package torch_xla", "package torch_tpu"} <= set(facts)
        )
        assert bool(choice.remedy) == (chosen is None)

    @pytest.mark.parametrize(
        ("torch_version", "remedy"),
        [
            ("2.9.1", "install torch_xla 2.9, which is built for torch 2.9"),
            ("2.13.0", "install torch_tpu 0.2, which is built for torch 2.11 to 2.15.0"),
            (
                "2.10.0",
                "install torch 2.9 with torch_xla 2.9 or torch 2.11 to 2.15.0 with torch_tpu 0.2",
            ),
        ],
    )
    def test_the_remedy_fits_the_torch(self, tree: Tree, torch_version: str, remedy: str) -> None:
        """What to install is what fits the torch that is there, or the pairs where nothing does."""
        assert remedy in packages.choose(machine(tree, {}, torch_version)).remedy


class TestTheProbe:
    """Chips by PCI, nodes by the two drivers' rules, and everything that is in the way."""

    def test_v2_and_v3_differ_in_their_subsystem(self, tree: Tree) -> None:
        """One device id, two generations; with another subsystem it is none."""
        for bus, subsystem in ((4, 0x004E), (5, 0x004F), (6, 0x0001)):
            tree.add_pci(f"0000:00:{bus:02x}.0", 0x1AE0, V2_OR_V3, UNASSIGNED, subsystem=subsystem)
        devices = probe(machine(tree)).devices
        assert [(device.capability, device.memory) for device in devices] == [
            ("v2", 16 * 2**30),
            ("v3", 32 * 2**30),
        ]

    def test_other_functions_of_the_vendor(self, tree: Tree) -> None:
        """Network cards and drives of Google's are no TPUs."""
        add_vm(tree)
        evidence = probe(machine(tree))
        assert (evidence.available, evidence.devices) == (False, ())

    def test_the_facts_of_a_chip(self, tree: Tree) -> None:
        """Generation, memory, address, node and driver of each chip."""
        add_vfio_chips(tree, V7X, 2)
        first, second = probe(machine(tree)).devices
        assert (first.name, first.capability, first.memory) == ("Google TPU", "v7x", 192 * 2**30)
        assert (first.pci_address, first.numa_node, first.driver) == ("0000:00:04.0", 0, "vfio-pci")
        assert second.numa_node == 1

    @pytest.mark.parametrize(
        ("environ", "hidden"),
        [
            ({}, [False] * 4),
            ({"TPU_VISIBLE_CHIPS": ""}, [False] * 4),
            ({"TPU_VISIBLE_CHIPS": "0,2"}, [False, True, False, True]),
            ({"TPU_VISIBLE_CHIPS": " 3 "}, [True, True, True, False]),
            ({"TPU_VISIBLE_DEVICES": "1"}, [True, False, True, True]),
            ({"TPU_VISIBLE_CHIPS": "0", "TPU_VISIBLE_DEVICES": "1"}, [False, True, True, True]),
            ({"TPU_VISIBLE_CHIPS": "0,9"}, [False, True, True, True]),
        ],
    )
    def test_visibility(self, tree: Tree, environ: dict[str, str], hidden: list[bool]) -> None:
        """The newer variable counts where both are set; an empty one is none."""
        add_vfio_chips(tree, V6E, 4)
        evidence = probe(machine(tree, **environ))
        assert evidence.available
        assert [device.hidden for device in evidence.devices] == hidden

    @pytest.mark.parametrize("variable", ["TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"])
    @pytest.mark.parametrize("value", ["4", "-1", "none"])
    def test_all_hidden(self, tree: Tree, variable: str, value: str) -> None:
        """Where no chip is left, the variable that was set is named, with its value."""
        add_vfio_chips(tree, V6E, 4)
        evidence = probe(machine(tree, **{variable: value}))
        assert not evidence.available
        assert f"{variable}={value!r} hides all of them" in evidence.reason
        assert f"unset {variable}" in evidence.remedy

    def test_a_container_with_two_of_four(self, tree: Tree) -> None:
        """Chips without a node are out of reach; the others are used, and the reason says how many."""
        add_vfio_chips(tree, V6E, 4, nodes=False)
        tree.add_nodes("/dev/vfio/11", "/dev/vfio/12", "/dev/vfio/vfio")
        evidence = probe(machine(tree))
        assert evidence.available
        assert [device.pci_address for device in evidence.devices] == [
            "0000:00:05.0",
            "0000:00:06.0",
        ]
        assert "2 of 4 TPU v6e chips within reach" in evidence.reason

    def test_old_images_of_v5e(self, tree: Tree) -> None:
        """A chip from v5e on may be at /dev/accel too, where torch_xla finds it."""
        tree.add_pci("0000:00:04.0", 0x1AE0, 0x0063, UNASSIGNED)
        tree.add_nodes("/dev/accel0")
        assert probe(machine(tree, TORCH_XLA, "2.9.1")).available
        assert "below /dev/vfio only" in probe(machine(tree)).reason

    def test_everything_that_is_missing_is_said(self, tree: Tree) -> None:
        """No driver, all hidden and no package: three reasons, three remedies."""
        tree.add_pci("0000:00:04.0", 0x1AE0, V4, UNASSIGNED)
        evidence = probe(machine(tree, {}, "2.10.0", TPU_VISIBLE_CHIPS="7"))
        for part in (
            "has no driver",
            "TPU_VISIBLE_CHIPS='7' hides",
            "no runtime package fits torch 2.10.0",
        ):
            assert part in evidence.reason
        assert evidence.remedy.count(";") == 2

    def test_a_library_of_ones_own(self, tree: Tree) -> None:
        """TPU_LIBRARY_PATH stands in for the package libtpu, as torch_xla has it."""
        add_vfio_chips(tree, V6E, 1)
        assert not probe(machine(tree, {"torch_tpu": "0.2.0"})).available
        assert probe(
            machine(tree, {"torch_tpu": "0.2.0"}, TPU_LIBRARY_PATH="/opt/libtpu.so")
        ).available

    @pytest.mark.parametrize(
        ("value", "available"), [("TPU", True), ("tpu", True), ("", True), ("CUDA", False)]
    )
    def test_another_client_of_xla(self, tree: Tree, value: str, available: bool) -> None:
        """PJRT_DEVICE may ask torch_xla for another device; torch_tpu does not look at it."""
        add_vfio_chips(tree, V6E, 1)
        assert probe(machine(tree, TORCH_XLA, "2.9.1", PJRT_DEVICE=value)).available == available
        assert probe(machine(tree, PJRT_DEVICE=value)).available


class TestTheClientForTests:
    """PJRT_DEVICE=CPU runs XLA on the processor."""

    def test_it_is_available_where_it_was_asked_for(self, tree: Tree) -> None:
        """With torch_xla that fits, the variable makes the platform available without a chip; with torch_tpu not."""
        evidence = probe(machine(tree, TORCH_XLA, "2.9.1", PJRT_DEVICE="CPU"))
        assert (evidence.available, evidence.devices) == (True, ())
        assert evidence.reason == "PJRT_DEVICE=CPU: XLA's CPU client, for tests"
        assert not probe(machine(tree, TORCH_XLA, "2.9.1")).available
        assert not probe(machine(tree, TORCH_XLA, "2.13.0", PJRT_DEVICE="CPU")).available
        assert not probe(machine(tree, TORCH_TPU, "2.13.0", PJRT_DEVICE="CPU")).available

    @pytest.mark.parametrize(
        ("gpu", "environ", "chosen"),
        [
            (False, {"PJRT_DEVICE": "CPU"}, "tpu"),
            (False, {}, "cpu"),
            (True, {"PJRT_DEVICE": "CPU"}, "xpu"),
        ],
    )
    def test_it_comes_before_the_cpu_and_after_gpus(
        self, tree: Tree, gpu: bool, environ: dict[str, str], chosen: str
    ) -> None:
        """Who sets the variable gets it instead of the CPU platform, not instead of a GPU."""
        if gpu:
            tree.add_pci("0000:29:00.0", 0x8086, 0x0BD5, 0x038000, driver="xe")
            tree.write("/sys/bus/pci/devices/0000:29:00.0/drm/renderD128/dev", "226:128\n")
            tree.add_nodes("/dev/dri/renderD128")
        build = TorchBuild("2.9.1+xpu", {"xpu": "20250100"})
        _, decision = decide_platform(
            host_state().settings(), Machine(tree.root, environ, packages=TORCH_XLA, torch=build)
        )
        assert decision.chosen == chosen


# The calls of torch_xla 2.9.0: torch_xla.py, core/xla_model.py, debug/metrics.py, runtime.py.
FAKE_XLA = {
    "torch_xla/__init__.py": """
import torch
CALLS = []
def device(index: int = None) -> torch.device:
    return torch.device("xla", index or 0)
def device_count() -> int:
    return 2
def sync(wait: bool = False, reset_scope: bool = True):
    CALLS.append(("sync", wait))
def manual_seed(seed, device=None):
    CALLS.append(("seed", seed, str(device)))
""",
    "torch_xla/core/__init__.py": "",
    "torch_xla/core/xla_model.py": """
import torch_xla
def get_memory_info(device=None):
    return {"bytes_used": 100 + device.index, "bytes_limit": 1000, "peak_bytes_used": 500}
def wait_device_ops(devices=[]):
    torch_xla.CALLS.append(("wait", list(devices)))
""",
    "torch_xla/debug/__init__.py": "",
    "torch_xla/debug/metrics.py": """
METRICS = {}
def metric_data(name):
    return METRICS.get(name)
""",
    "torch_xla/runtime.py": """
import os
def device_type():
    device = os.environ.get("PJRT_DEVICE")
    return device.split("_")[0] if device else device
""",
}

# torch_tpu 0.2.0 puts its device behind torch.accelerator when it is imported.
FAKE_TPU = {
    "torch_tpu/__init__.py": """
import torch
CALLS = []
torch.accelerator.device_count = lambda: 4
torch.accelerator.synchronize = lambda device=None, /: CALLS.append(("sync", device))
torch.accelerator.get_memory_info = lambda device_index=None, /: (30 + device_index, 32)
"""
}


@pytest.fixture
def serve(site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], TpuPlatform]]:
    """Install the stand-in for a package, for whatever torch is installed here, and create the platform on it."""
    for name in ("torch_xla", "torch_tpu"):
        if importlib.util.find_spec(name):
            pytest.skip(f"{name} itself is installed here")
    for name in ("device_count", "synchronize", "get_memory_info"):
        monkeypatch.setattr(
            torch.accelerator, name, None, raising=False
        )  # so that it is put back afterwards

    def install(name: str) -> TpuPlatform:
        rows = [package for package in packages.PACKAGES if package.name == name]
        monkeypatch.setattr(
            packages, "PACKAGES", [replace(row, oldest=(2, 8), newest=(3,)) for row in rows]
        )
        files, version = {"torch_xla": (FAKE_XLA, "2.9.0"), "torch_tpu": (FAKE_TPU, "0.2.0")}[name]
        site.install(name, files, "", version=version, requires=())
        return TpuPlatform()

    yield install
    for row in packages.PACKAGES:  # the runtime holds on to what it imported
        sys.modules.pop(row.runtime.partition(":")[0], None)


class TestTheRuntimes:
    """The platform on each of the two packages."""

    def test_torch_xla_on_chips(self, serve) -> None:
        """Every member calls torch_xla as release 2.9 wants to be called."""
        platform = serve("torch_xla")
        torch_xla = importlib.import_module("torch_xla")
        assert (platform.name, platform.device_type, platform.compile_backend) == (
            "tpu",
            "xla",
            "openxla",
        )
        assert platform.distributed_backend == "xla"
        assert platform.device_count() == 2
        assert platform.memory(1) == DeviceMemory(total=1000, free=899)
        platform.synchronize(1)
        platform.manual_seed(5)
        made = torch_xla.CALLS
        assert made == [("sync", True), ("wait", []), ("seed", 5, "xla:0"), ("seed", 5, "xla:1")]
        assert torch.bfloat16 in platform.capability().dtypes

    def test_torch_xla_on_the_cpu(self, serve, monkeypatch: pytest.MonkeyPatch) -> None:
        """XLA's CPU client tells no memory; the host's is taken, and the capability says what runs."""
        platform = serve("torch_xla")
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        assert platform.memory().total >= platform.memory().free > 0
        assert platform.capability().name == "XLA on the CPU"
        assert torch.float64 in platform.capability().dtypes

    def test_compilations_are_counted(self, serve) -> None:
        """The counter reads the metric that torch_xla keeps, which is absent before the first compilation."""
        platform = serve("torch_xla")
        metrics = importlib.import_module("torch_xla.debug.metrics")
        assert platform.compilations() == 0
        metrics.METRICS["CompileTime"] = (3, 1.5e9, ((0.0, 5e8),) * 3)
        assert platform.compilations() == 3

    def test_torch_tpu(self, serve) -> None:
        """Every member goes through torch.accelerator, which torch_tpu asks its callers to use."""
        platform = serve("torch_tpu")
        torch_tpu = importlib.import_module("torch_tpu")
        assert (platform.device_type, platform.compile_backend) == ("tpu", "tpu")
        assert platform.distributed_backend == "cpu:gloo,tpu:tpu_dist"
        assert platform.device_count() == 4
        assert platform.memory(1) == DeviceMemory(total=32, free=31)
        platform.synchronize(3)
        platform.manual_seed(5)
        assert torch_tpu.CALLS == [("sync", 3)]
        with pytest.raises(PlatformError, match="no public count"):
            platform.compilations()

    @pytest.mark.parametrize("name", ["torch_xla", "torch_tpu"])
    def test_what_both_have_in_common(self, serve, name: str) -> None:
        """Dispatch chain and visibility do not depend on the package; the seed holds for the host too."""
        platform = serve(name)
        assert effective_chain(platform) == ("oot", "tpu", "native")
        assert platform.visibility_variable == "TPU_VISIBLE_CHIPS"
        assert platform.graph_class is None
        platform.manual_seed(7)
        first = torch.randn(3)
        platform.manual_seed(7)
        assert torch.equal(torch.randn(3), first)

    def test_the_capability_names_the_generation(
        self, serve, tree: Tree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On chips the capability is what the probe found, for every device of a chip."""
        platform = serve("torch_tpu")
        add_vfio_chips(tree, V6E, 2)
        monkeypatch.setattr("opgraft.platforms.tpu.platform.Machine", lambda: machine(tree))
        assert platform.capability(3).features == ("v6e",)
        assert platform.capability().name == "Google TPU"


def test_without_a_package_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Creating the platform by hand where no package fits says which packages there are and what to install."""
    rows = [replace(package, oldest=(1, 0), newest=(1, 0)) for package in packages.PACKAGES]
    monkeypatch.setattr(packages, "PACKAGES", rows)
    with pytest.raises(PlatformError, match=r"no package for TPUs fits torch .*install"):
        TpuPlatform()


def test_asked_for_on_a_machine_without(cli) -> None:
    """The command line says why the platform that was asked for cannot be used, and ends with 3."""
    result = cli("detect", "--json", OPGRAFT_PLATFORM="tpu", PJRT_DEVICE="")
    assert result.returncode == 3
    assert "'tpu'" in result.stderr
    assert "no TPU" in result.stderr
