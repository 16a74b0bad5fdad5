"""AMD GPUs by the topology that the kernel's compute driver (KFD) publishes, and by PCI.

The files are those of drivers/gpu/drm/amd/amdkfd/kfd_topology.c in Linux: lines of a key and a decimal number. Their
``location_id`` is the PCI address, into which newer kernels mix the number of the partition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opgraft.machine.machine import Machine
from opgraft.platforms.pci import FOLDER, PciFunction, pci_functions

VENDOR = 0x1002
NODES = "/sys/class/kfd/kfd/topology/nodes"
_DISPLAY, _PROCESSING = 0x03, 0x12
_FRAME_BUFFER = (1, 2)  # heap_type of memory on the device, visible to the host and not

MODELS = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
"""Names by PCI device id (https://pci-ids.ucw.cz), for cards that do not tell their own."""


@dataclass(frozen=True)
class Node:
    """One node of the topology that is a GPU, or a partition of one; ``function`` is ``None`` where /sys has no PCI."""

    number: str
    properties: Mapping[str, int]
    memory: int | None
    function: PciFunction | None

    @property
    def target(self) -> str | None:
        """The LLVM target: 90402 is gfx942 and 90010 gfx90a, two decimal digits each for minor version and stepping."""
        version = self.properties.get("gfx_target_version", 0)
        major, minor, stepping = version // 10000, version // 100 % 100, version % 100
        return f"gfx{major}{minor:x}{stepping:x}" if version else None

    @property
    def render_node(self) -> str:
        return f"/dev/dri/renderD{self.properties.get('drm_render_minor', 0)}"

    @property
    def uuid(self) -> str | None:
        unique = self.properties.get("unique_id")
        return f"GPU-{unique:016x}" if unique else None


def gpu_functions(machine: Machine) -> tuple[PciFunction, ...]:
    """Return the PCI functions that are AMD GPUs."""
    return tuple(f for f in pci_functions(machine, VENDOR) if f.kind in (_DISPLAY, _PROCESSING))


def gpu_nodes(machine: Machine) -> Iterator[Node]:
    """Yield the GPUs of the topology; a container is refused the files of those that it was not given."""
    functions = {function.address: function for function in gpu_functions(machine)}
    for number in sorted(
        (name for name in machine.names(NODES) if re.fullmatch(r"\d{1,4}", name)), key=int
    ):
        properties = _properties(machine.read(f"{NODES}/{number}/properties"))
        if properties.get("vendor_id") != VENDOR or not properties.get("simd_count"):
            continue  # a CPU; or the device of a vendor who took over AMD's driver
        function = _function(properties, functions)
        if function or not machine.names(FOLDER):
            yield Node(number, properties, _memory(machine, number), function)


def refused(machine: Machine) -> list[str]:
    """Return the nodes whose files this process may not read."""
    return [
        number
        for number in machine.names(NODES)
        if machine.read(f"{NODES}/{number}/gpu_id") is None
    ]


def model(machine: Machine, device: int, function: PciFunction | None) -> str:
    """Return what the card calls itself, where it has a memory for that, else what its PCI id stands for."""
    own = (machine.read(f"{function.folder}/product_name") or "")[:64].strip() if function else ""
    return own or MODELS.get(device, f"AMD GPU (1002:{device:04x})")


def _function(
    properties: Mapping[str, int], functions: Mapping[str, PciFunction]
) -> PciFunction | None:
    location = properties.get("location_id", 0)
    slot = (
        f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    )
    # The number of a partition may stand where that of the function does.
    return functions.get(f"{slot}.{location & 7}") or functions.get(f"{slot}.0")


def _memory(machine: Machine, number: str) -> int | None:
    folder = f"{NODES}/{number}/mem_banks"
    banks = [
        _properties(machine.read(f"{folder}/{bank}/properties"))
        for bank in machine.names(folder)[:64]
    ]
    return (
        sum(
            bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _FRAME_BUFFER
        )
        or None
    )


def _properties(text: str | None) -> dict[str, int]:
    return {
        key: int(value)
        for key, value in re.findall(r"(?m)^(\w{1,40}) (\d{1,20})$", (text or "")[:8000])
    }
