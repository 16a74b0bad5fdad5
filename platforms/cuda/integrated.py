"""NVIDIA GPUs without a PCI address: in a Jetson, and under the Windows Subsystem for Linux."""

from __future__ import annotations

import re

from opgraft.machine.evidence import Device
from opgraft.machine.machine import Machine
from opgraft.platforms.cuda.chips import TEGRA
from opgraft.platforms.cuda.gpus import node_obstacle
from opgraft.platforms.obstacles import FoundDevice, Obstacle

RELEASE = "/etc/nv_tegra_release"
DEVICE_TREE = "/proc/device-tree"
WSL_NODE = "/dev/dxg"
WSL_LIBRARY = "/usr/lib/wsl/lib/libcuda.so.1"
_JETSON_NODES = ("/dev/nvhost-gpu", "/dev/nvgpu", "/dev/nvidia0")


def jetson(machine: Machine) -> list[FoundDevice]:
    """Find the GPU of a Jetson. The GPU uses the memory of the machine."""
    # The file begins "# R36 (release), REVISION: 4.3, …".
    pattern = r"# R(\d{1,3}) \(release\), REVISION: ([\d.]{1,10})"
    release = re.match(pattern, machine.read(RELEASE) or "")
    chips = _chips(machine)
    if not release and not chips:
        return []
    model = machine.read(f"{DEVICE_TREE}/model") or ""
    known = [TEGRA[chip] for chip in chips if chip in TEGRA]
    device = Device(
        name=model[:100].rstrip("\0\n") or "NVIDIA Jetson",
        capability=known[0] if known else None,
        memory=_memory(machine),
        driver=f"L4T {release.group(1)}.{release.group(2)}" if release else None,
    )
    return [FoundDevice(device, obstacle=_obstacle_of_jetson(machine))]


def _chips(machine: Machine) -> list[str]:
    """Return the chips in the device tree, such as ``tegra234`` for ``nvidia,tegra234``."""
    compatible = machine.read(f"{DEVICE_TREE}/compatible") or ""
    chips = []
    # A zero byte ends each name.
    for name in compatible[:1000].split("\0"):
        vendor, _, chip = name.partition(",")
        if vendor == "nvidia" and chip.startswith("tegra"):
            chips.append(chip)
    return chips


def _memory(machine: Machine) -> int | None:
    text = machine.read("/proc/meminfo") or ""
    pattern = r"^MemTotal:\s{0,20}(\d{1,15}) kB$"
    total = re.search(pattern, text[:1000], re.MULTILINE)
    if total is None:
        return None
    return int(total.group(1)) * 1024


def _obstacle_of_jetson(machine: Machine) -> Obstacle | None:
    # Releases of the driver have different nodes. One is enough.
    for node in _JETSON_NODES:
        if machine.exists(node):
            return node_obstacle(machine, (node,))
    return Obstacle(
        f"there is none of the device nodes {', '.join(_JETSON_NODES)}",
        "in a container: start it with the GPU (docker run --runtime nvidia)",
    )


def under_wsl(machine: Machine) -> list[FoundDevice]:
    """Find a GPU of the Windows host. No file tells the number or the models of the GPUs."""
    # The node alone may be of any vendor. NVIDIA's driver mounts libcuda, too.
    if not machine.exists(WSL_NODE):
        return []
    if not machine.exists(WSL_LIBRARY):
        return []
    device = Device("NVIDIA GPU of the Windows host", driver="dxgkrnl")
    obstacle = node_obstacle(machine, (WSL_NODE,))
    return [FoundDevice(device, obstacle=obstacle)]
