"""AMD GPUs by the topology of the kernel's compute driver (KFD), and by PCI.

A file of the topology has lines of a key and a decimal number. ``location_id`` is the PCI address.
Newer kernels mix the number of the partition into the address. Source:
drivers/gpu/drm/amd/amdkfd/kfd_topology.c in Linux.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opgraft.machine.machine import Machine
from opgraft.platforms.pci import FOLDER, PciFunction, pci_functions

VENDOR = 0x1002
NODES = "/sys/class/kfd/kfd/topology/nodes"
_DISPLAY = 0x03
_PROCESSING = 0x12
_FRAME_BUFFER = (1, 2)
"""Values of ``heap_type`` for memory on the device: visible to the host, and not."""

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
"""PCI device id → name (https://pci-ids.ucw.cz), for cards without a name in a file."""


@dataclass(frozen=True)
class Node:
    """A GPU or a partition of a GPU in the topology.

    ``function`` is ``None`` if /sys has no PCI.
    """

    number: str
    properties: Mapping[str, int]
    memory: int | None
    function: PciFunction | None

    @property
    def target(self) -> str | None:
        """The LLVM target. 90402 is gfx942, and 90010 is gfx90a."""
        version = self.properties.get("gfx_target_version", 0)
        if not version:
            return None
        # Two decimal digits each for minor version and stepping.
        rest, stepping = divmod(version, 100)
        major, minor = divmod(rest, 100)
        return f"gfx{major}{minor:x}{stepping:x}"

    @property
    def render_node(self) -> str:
        return f"/dev/dri/renderD{self.properties.get('drm_render_minor', 0)}"

    @property
    def uuid(self) -> str | None:
        unique = self.properties.get("unique_id")
        # A kernel without the number writes 0.
        if not unique:
            return None
        return f"GPU-{unique:016x}"


def gpu_functions(machine: Machine) -> tuple[PciFunction, ...]:
    """Return the PCI functions of AMD GPUs.

    Cards for screens are display controllers. Cards for data centres are processing accelerators.
    """
    found = []
    for function in pci_functions(machine, VENDOR):
        if function.kind in (_DISPLAY, _PROCESSING):
            found.append(function)
    return tuple(found)


def gpu_nodes(machine: Machine) -> Iterator[Node]:
    """Yield the GPUs of the topology. A container can read the files of its own GPUs only."""
    functions = {function.address: function for function in gpu_functions(machine)}
    names = machine.names(NODES)
    numbers = [name for name in names if re.fullmatch(r"\d{1,4}", name)]
    for number in sorted(numbers, key=int):
        text = machine.read(f"{NODES}/{number}/properties")
        properties = _properties(text)
        # Another vendor may use AMD's driver.
        if properties.get("vendor_id") != VENDOR:
            continue
        # A CPU is a node, too, without SIMD units.
        if not properties.get("simd_count"):
            continue
        function = _function(properties, functions)
        # A sandbox without /sys/bus/pci shows no function of any node.
        if function or not machine.names(FOLDER):
            yield Node(number, properties, _memory(machine, number), function)


def refused(machine: Machine) -> list[str]:
    """Return the nodes with files that this process may not read."""
    unread = []
    for number in machine.names(NODES):
        if machine.read(f"{NODES}/{number}/gpu_id") is None:
            unread.append(number)
    return unread


def model(machine: Machine, device: int, function: PciFunction | None) -> str:
    """Return the name in the memory of the card, or else the name for the PCI id."""
    own = None
    if function:
        own = machine.read(f"{function.folder}/product_name")
    name = (own or "")[:64].strip()
    return name or MODELS.get(device, f"AMD GPU (1002:{device:04x})")


def _function(
    properties: Mapping[str, int], functions: Mapping[str, PciFunction]
) -> PciFunction | None:
    """Return the PCI function of a node. ``location_id`` has bus, device and function number."""
    domain = properties.get("domain", 0)
    location = properties.get("location_id", 0)
    bus = location >> 8 & 0xFF
    device = location >> 3 & 0x1F
    number = location & 7
    slot = f"{domain:04x}:{bus:02x}:{device:02x}"
    exact = functions.get(f"{slot}.{number}")
    # The number of a partition may stand in the place of the number of the function.
    return exact or functions.get(f"{slot}.0")


def _memory(machine: Machine, number: str) -> int | None:
    folder = f"{NODES}/{number}/mem_banks"
    total = 0
    for name in machine.names(folder)[:64]:
        text = machine.read(f"{folder}/{name}/properties")
        bank = _properties(text)
        if bank.get("heap_type") in _FRAME_BUFFER:
            total += bank.get("size_in_bytes", 0)
    return total or None


def _properties(text: str | None) -> dict[str, int]:
    """Return the lines of a file of the topology, such as ``simd_count 304``."""
    pattern = r"(?m)^(\w{1,40}) (\d{1,20})$"
    lines = re.findall(pattern, (text or "")[:8000])
    return {key: int(value) for key, value in lines}
