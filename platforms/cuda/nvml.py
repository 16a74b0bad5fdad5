"""Detail that no file has, from NVIDIA's management library where its Python package is installed.

The library creates no CUDA context. It is asked in a child process with a time limit all the same: a driver in trouble
makes it hang.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opgraft.errors import ChildError
from opgraft.machine.child import ask_child
from opgraft.machine.evidence import Device, Fact
from opgraft.machine.machine import Machine

PACKAGE = "nvidia-ml-py"
TIME_LIMIT = 3.0  # seconds

_CHILD = """
import pynvml
pynvml.nvmlInit()
text = lambda value: value.decode() if isinstance(value, bytes) else value
rows = []
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    address = text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    level = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except pynvml.NVMLError:  # a GPU that shares the memory of the machine has no answer
        memory = None
    rows.append([address, text(pynvml.nvmlDeviceGetName(handle)), "sm_%d%d" % tuple(level), memory])
with open(reply_to, "w") as reply:
    json.dump(rows, reply)
"""


def with_detail(machine: Machine, devices: list[Device]) -> tuple[list[Device], tuple[Fact, ...]]:
    """Return the devices with what the library adds to the files, and a fact that says what came of asking it.

    Only the live machine is asked, and only where its package is installed.
    """
    if machine.root != Path("/") or machine.version_of(PACKAGE) is None:
        return devices, ()
    try:
        rows = _ask()
    except (ChildError, ValueError, TypeError) as error:
        return devices, (Fact(PACKAGE, f"gave no answer: {error}"),)
    by_address = {device.pci_address: device for device in rows}
    # Under WSL the library alone tells them apart.
    if devices and not any(device.pci_address for device in devices):
        return [replace(row, driver=devices[0].driver) for row in rows] or devices, (
            Fact(PACKAGE, "answered"),
        )
    return [_merged(device, by_address.get(device.pci_address)) for device in devices], (
        Fact(PACKAGE, "answered"),
    )


def _ask() -> list[Device]:
    return [
        Device(str(name), str(capability), memory and int(memory), _sysfs_address(str(address)))
        for address, name, capability, memory in ask_child(_CHILD, time_limit=TIME_LIMIT)
    ]


def _sysfs_address(address: str) -> str:
    """Shorten the domain, which NVML writes with eight digits and /sys with four."""
    domain, _, rest = address.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _merged(device: Device, detail: Device | None) -> Device:
    """Merge; files come first, and the library fills what they leave open."""
    if detail is None:
        return device
    return replace(
        device,
        capability=device.capability or detail.capability,
        memory=device.memory or detail.memory,
    )
