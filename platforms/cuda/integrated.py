"""NVIDIA GPUs that have no PCI address here: in a Jetson, and under the Windows Subsystem for Linux."""

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
    """Find the GPU of a Jetson, whose release begins ``# R36 (release), REVISION: 4.3, …``; memory is the machine's."""
    release = re.match(
        r"# R(\d{1,3}) \(release\), REVISION: ([\d.]{1,10})", machine.read(RELEASE) or ""
    )
    # Such as nvidia,tegra234.
    compatible = (machine.read(f"{DEVICE_TREE}/compatible") or "")[:1000].split("\0")
    chips = [name.partition(",")[2] for name in compatible if name.startswith("nvidia,tegra")]
    if not release and not chips:
        return []
    memory = re.search(
        r"^MemTotal:\s{0,20}(\d{1,15}) kB$",
        (machine.read("/proc/meminfo") or "")[:1000],
        re.MULTILINE,
    )
    device = Device(
        name=(machine.read(f"{DEVICE_TREE}/model") or "")[:100].rstrip("\0\n") or "NVIDIA Jetson",
        capability=next((TEGRA[chip] for chip in chips if chip in TEGRA), None),
        memory=int(memory.group(1)) * 1024 if memory else None,
        driver=f"L4T {release.group(1)}.{release.group(2)}" if release else None,
    )
    present = [node for node in _JETSON_NODES if machine.exists(node)]
    missing = Obstacle(
        f"there is none of the device nodes {', '.join(_JETSON_NODES)}",
        "in a container: start it with the GPU (docker run --runtime nvidia)",
    )
    return [
        FoundDevice(
            device, obstacle=node_obstacle(machine, tuple(present[:1])) if present else missing
        )
    ]


def under_wsl(machine: Machine) -> list[FoundDevice]:
    """Find a GPU of the Windows host. The node alone may be any vendor's; NVIDIA's driver mounts its libcuda beside it.

    No file tells how many there are, nor which.
    """
    if not machine.exists(WSL_NODE) or not machine.exists(WSL_LIBRARY):
        return []
    device = Device("NVIDIA GPU of the Windows host", driver="dxgkrnl")
    return [FoundDevice(device, obstacle=node_obstacle(machine, (WSL_NODE,)))]
