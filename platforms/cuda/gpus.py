"""NVIDIA GPUs by the files of PCI and of NVIDIA's driver.

The files of the driver are described by kernel-open/nvidia/nv-procfs.c of NVIDIA/open-gpu-kernel-modules, the folder
``capabilities`` by the chapter "Device Nodes and Capabilities" of NVIDIA's MIG user guide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from opgraft.machine.evidence import Device
from opgraft.machine.machine import Machine
from opgraft.platforms.cuda.chips import chip
from opgraft.platforms.obstacles import FoundDevice, Obstacle
from opgraft.platforms.pci import FOLDER, PciFunction, pci_functions

VENDOR = 0x10DE
DISPLAY = 0x03
DRIVER = "/proc/driver/nvidia"
CONTROL = "/dev/nvidiactl"
MIG = " MIG device"
"""The end of the name of a partition."""

_NO_DRIVER = Obstacle(
    "NVIDIA's driver is not loaded",
    "install it (https://docs.nvidia.com/datacenter/tesla/driver-installation-guide) and check with nvidia-smi",
)


def driver_version(machine: Machine) -> str | None:
    """Return a version such as 550.54.15, "" where the driver does not say, ``None`` where it is not loaded."""
    text = machine.read(f"{DRIVER}/version")
    if text is None:
        return None
    found = re.search(
        r"Kernel Module[^\d\n]{0,20}(?:x86_64|aarch64)?[ ]{0,4}(\d[\d.]{2,20})", text[:1000]
    )
    return found.group(1) if found else ""


def gpus(machine: Machine) -> list[FoundDevice]:
    """List the GPUs of the machine, in the order of their addresses."""
    version = driver_version(machine)
    if machine.names(FOLDER):
        functions = [
            function for function in pci_functions(machine, VENDOR) if function.kind == DISPLAY
        ]
        return [_gpu(machine, version, function.address, function) for function in functions]
    # A sandbox without /sys: the driver's own files cannot be cross-checked, but there is nothing else to go by.
    if version is None:
        return list(_nodes_alone(machine))
    return [_gpu(machine, version, address, None) for address in machine.names(f"{DRIVER}/gpus")]


def partitions(machine: Machine, gpu: FoundDevice) -> list[FoundDevice]:
    """Return the MIG devices of a GPU, or the GPU itself where it has none. No file tells how much memory each has."""
    minor = _minor(_information(machine, gpu.device.pci_address or ""))
    folder = f"{DRIVER}/capabilities/gpu{minor}/mig"
    pairs = [
        (instance, part)
        for instance in (_numbered(machine, folder, "gi") if minor is not None else ())
        for part in _numbered(machine, f"{folder}/gi{instance}", "ci")
    ]
    device = replace(gpu.device, name=f"{gpu.device.name}{MIG}", memory=None)
    return [
        replace(
            gpu, device=device, identities=tuple(f"MIG-{uuid}/{gi}/{ci}" for uuid in gpu.identities)
        )
        for gi, ci in pairs
    ] or [gpu]


def _numbered(machine: Machine, folder: str, prefix: str) -> list[int]:
    """Return the numbers of the entries that are called ``prefix`` and a number."""
    matches = (re.fullmatch(rf"{prefix}(\d{{1,4}})", name) for name in machine.names(folder))
    return sorted(int(match.group(1)) for match in matches if match)


def _gpu(
    machine: Machine, version: str | None, address: str, function: PciFunction | None
) -> FoundDevice:
    information = _information(machine, address)
    name, capability = chip(function.device) if function else ("NVIDIA GPU", None)
    uuid = information.get("GPU UUID", "")
    driver = f"nvidia {version}".strip() if version is not None else None
    device = Device(
        name=information.get("Model") or name,
        capability=capability,
        pci_address=address,
        numa_node=function.numa_node if function else None,
        driver=driver
        if function is None or function.driver in (None, "nvidia")
        else function.driver,
    )
    return FoundDevice(
        device, (uuid,) if uuid else (), _obstacle_of_gpu(machine, version, function, information)
    )


def _obstacle_of_gpu(
    machine: Machine,
    version: str | None,
    function: PciFunction | None,
    information: Mapping[str, str],
) -> Obstacle | None:
    if function and function.driver not in (None, "nvidia"):
        missing = f"{function.address} is bound to the driver {function.driver}"
        return Obstacle(f"{missing}, not to NVIDIA's", _NO_DRIVER.remedy)
    if version is None:
        return _NO_DRIVER
    if information.get("GPU Excluded") == "Yes":
        return Obstacle(
            "the driver was told to exclude it",
            "remove it from the driver's option NVreg_ExcludedGpus",
        )
    minor = _minor(information)
    if minor is None:
        return _no_node(f"{DRIVER}/gpus does not list it")
    return node_obstacle(machine, (f"/dev/nvidia{minor}", CONTROL))


def node_obstacle(machine: Machine, nodes: tuple[str, ...]) -> Obstacle | None:
    """Name the first of the device nodes that is missing or may not be opened."""
    for node in nodes:
        if not machine.exists(node):
            return _no_node(f"there is no device node {node}")
        if not machine.may_open(node):
            remedy = (
                f"join the group that may (ls -l {node}; often video or render), then log in again"
            )
            return Obstacle(f"this user may not open {node}", remedy)
    return None


def _no_node(missing: str) -> Obstacle:
    remedy = "in a container: start it with the GPU (docker run --gpus all); elsewhere: run nvidia-smi once as root"
    return Obstacle(missing, remedy)


def _nodes_alone(machine: Machine) -> Iterator[FoundDevice]:
    if not machine.exists(CONTROL):
        return
    for name in machine.names("/dev"):
        if re.fullmatch(r"nvidia\d{1,4}", name):
            yield FoundDevice(
                Device("NVIDIA GPU"), obstacle=node_obstacle(machine, (f"/dev/{name}", CONTROL))
            )


def _information(machine: Machine, address: str) -> dict[str, str]:
    """Read the lines of ``information``, such as ``Device Minor: <tab> 0``; none where the driver lacks the GPU."""
    lines = (machine.read(f"{DRIVER}/gpus/{address}/information") or "")[:4000].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _minor(information: Mapping[str, str]) -> int | None:
    minor = information.get("Device Minor", "")
    return int(minor) if re.fullmatch(r"[0-9]{1,4}", minor) else None
