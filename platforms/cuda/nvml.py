"""Details from NVIDIA's management library, if the Python package of the library is installed.

No file has these details. The library creates no CUDA context. A driver in trouble makes the
library hang, so a child process with a time limit asks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from opgraft.errors import ChildError
from opgraft.machine.child import ask_child
from opgraft.machine.evidence import Device, Fact
from opgraft.machine.machine import Machine

PACKAGE = "nvidia-ml-py"
TIME_LIMIT = 3.0
"""Seconds."""

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
    except pynvml.NVMLError:  # a GPU without memory of its own has no answer
        memory = None
    rows.append([address, text(pynvml.nvmlDeviceGetName(handle)), "sm_%d%d" % tuple(level), memory])
with open(reply_to, "w") as reply:
    json.dump(rows, reply)
"""


def with_detail(machine: Machine, devices: list[Device]) -> tuple[list[Device], tuple[Fact, ...]]:
    """Return the devices with details, and a fact about the library.

    A recorded machine has no library, and gets no fact.
    """
    # The library answers for the machine of this process only.
    if machine.root != Path("/") or machine.version_of(PACKAGE) is None:
        return devices, ()
    try:
        rows = _ask()
    except (ChildError, ValueError, TypeError) as error:
        return devices, (Fact(PACKAGE, f"gave no answer: {error}"),)
    answered = (Fact(PACKAGE, "answered"),)
    has_addresses = any(device.pci_address for device in devices)
    # Under WSL the files show one device without an address. The library alone tells GPUs apart.
    if devices and rows and not has_addresses:
        driver = devices[0].driver
        return [replace(row, driver=driver) for row in rows], answered
    by_address = {row.pci_address: row for row in rows}
    merged = []
    for device in devices:
        detail = by_address.get(device.pci_address)
        merged.append(_merged(device, detail))
    return merged, answered


def _ask() -> list[Device]:
    rows = []
    for address, name, capability, memory in ask_child(_CHILD, time_limit=TIME_LIMIT):
        device = Device(
            name=str(name),
            capability=str(capability),
            memory=memory and int(memory),
            pci_address=_sysfs_address(str(address)),
        )
        rows.append(device)
    return rows


def _sysfs_address(address: str) -> str:
    """Return an address of NVML in the form of /sys: four digits of the domain, not eight."""
    domain, _, rest = address.partition(":")
    number = int(domain, 16)
    return f"{number:04x}:{rest}"


def _merged(device: Device, detail: Device | None) -> Device:
    """Return a device with details for everything that the files leave open."""
    if detail is None:
        return device
    return replace(
        device,
        capability=device.capability or detail.capability,
        memory=device.memory or detail.memory,
    )
