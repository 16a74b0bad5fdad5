"""NVIDIA GPUs by the files of PCI and of NVIDIA's driver.

Sources: kernel-open/nvidia/nv-procfs.c of NVIDIA/open-gpu-kernel-modules for the files of the
driver, and the chapter "Device Nodes and Capabilities" of NVIDIA's MIG user guide for the folder
``capabilities``.
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
    "install it (https://docs.nvidia.com/datacenter/tesla/driver-installation-guide) and check "
    "with nvidia-smi",
)


def driver_version(machine: Machine) -> str | None:
    """Return a version such as 550.54.15, "" for an unknown one, or ``None`` without a driver."""
    text = machine.read(f"{DRIVER}/version")
    if text is None:
        return None
    pattern = r"Kernel Module[^\d\n]{0,20}(?:x86_64|aarch64)?[ ]{0,4}(\d[\d.]{2,20})"
    # The file of a recorded machine may have any length.
    found = re.search(pattern, text[:1000])
    return found.group(1) if found else ""


def gpus(machine: Machine) -> list[FoundDevice]:
    """Return the GPUs of the machine in the order of addresses."""
    version = driver_version(machine)
    if machine.names(FOLDER):
        functions = pci_functions(machine, VENDOR)
        displays = [function for function in functions if function.kind == DISPLAY]
        return [_gpu(machine, version, function.address, function) for function in displays]
    # A sandbox without /sys has the driver's files only. Nothing confirms them.
    if version is None:
        return list(_nodes_alone(machine))
    return [_gpu(machine, version, address, None) for address in machine.names(f"{DRIVER}/gpus")]


def partitions(machine: Machine, gpu: FoundDevice) -> list[FoundDevice]:
    """Return the MIG devices of a GPU, or the GPU itself. No file tells the memory of a part."""
    minor = _minor(_information(machine, gpu.device.pci_address or ""))
    if minor is None:
        return [gpu]
    folder = f"{DRIVER}/capabilities/gpu{minor}/mig"
    name = f"{gpu.device.name}{MIG}"
    device = replace(gpu.device, name=name, memory=None)
    parts = []
    # A GPU instance (gi) holds compute instances (ci). Each of these is a device.
    for gi in _numbered(machine, folder, "gi"):
        for ci in _numbered(machine, f"{folder}/gi{gi}", "ci"):
            names = [f"MIG-{uuid}/{gi}/{ci}" for uuid in gpu.identities]
            part = replace(gpu, device=device, identities=tuple(names))
            parts.append(part)
    return parts or [gpu]


def _numbered(machine: Machine, folder: str, prefix: str) -> list[int]:
    """Return the numbers of the entries with the name ``prefix`` and a number."""
    pattern = re.compile(rf"{prefix}(\d{{1,4}})")
    numbers = []
    for name in machine.names(folder):
        match = pattern.fullmatch(name)
        if match:
            numbers.append(int(match.group(1)))
    return sorted(numbers)


def _gpu(
    machine: Machine, version: str | None, address: str, function: PciFunction | None
) -> FoundDevice:
    """Return the GPU at an address. Without ``function``, only the files of the driver tell."""
    information = _information(machine, address)
    name, capability = chip(function.device) if function else ("NVIDIA GPU", None)
    uuid = information.get("GPU UUID", "")
    driver = f"nvidia {version}".strip() if version is not None else None
    if function and _has_other_driver(function):
        driver = function.driver
    device = Device(
        name=information.get("Model") or name,
        capability=capability,
        pci_address=address,
        numa_node=function.numa_node if function else None,
        driver=driver,
    )
    identities = (uuid,) if uuid else ()
    obstacle = _obstacle_of_gpu(machine, version, function, information)
    return FoundDevice(device, identities, obstacle)


def _has_other_driver(function: PciFunction) -> bool:
    return function.driver not in (None, "nvidia")


def _obstacle_of_gpu(
    machine: Machine,
    version: str | None,
    function: PciFunction | None,
    information: Mapping[str, str],
) -> Obstacle | None:
    """Return the first obstacle: the driver, an option of the driver, or a device node."""
    if function and _has_other_driver(function):
        missing = f"{function.address} is bound to the driver {function.driver}"
        return Obstacle(f"{missing}, not to NVIDIA's", _NO_DRIVER.remedy)
    if version is None:
        return _NO_DRIVER
    # The driver lists an excluded GPU, and gives it no device node.
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
    """Return the obstacle of the first device node that is missing or closed to this user."""
    for node in nodes:
        if not machine.exists(node):
            return _no_node(f"there is no device node {node}")
        if not machine.may_open(node):
            group = f"join the group that may (ls -l {node}; often video or render)"
            return Obstacle(f"this user may not open {node}", f"{group}, then log in again")
    return None


def _no_node(missing: str) -> Obstacle:
    in_container = "in a container: start it with the GPU (docker run --gpus all)"
    return Obstacle(missing, f"{in_container}; elsewhere: run nvidia-smi once as root")


def _nodes_alone(machine: Machine) -> Iterator[FoundDevice]:
    """Yield a GPU without details for each device node."""
    if not machine.exists(CONTROL):
        return
    for name in machine.names("/dev"):
        if re.fullmatch(r"nvidia\d{1,4}", name):
            obstacle = node_obstacle(machine, (f"/dev/{name}", CONTROL))
            yield FoundDevice(Device("NVIDIA GPU"), obstacle=obstacle)


def _information(machine: Machine, address: str) -> dict[str, str]:
    """Return the lines of ``information``, such as ``Device Minor: <tab> 0``.

    They are missing if the driver lacks the GPU.
    """
    text = machine.read(f"{DRIVER}/gpus/{address}/information") or ""
    information = {}
    for line in text[:4000].splitlines():
        key, _, value = line.partition(":")
        information[key.strip()] = value.strip()
    return information


def _minor(information: Mapping[str, str]) -> int | None:
    minor = information.get("Device Minor", "")
    if not re.fullmatch(r"[0-9]{1,4}", minor):
        return None
    return int(minor)
