"""The PCI functions of a machine, as /sys shows them; shared by the probes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opgraft.machine.machine import Machine

FOLDER = "/sys/bus/pci/devices"


@dataclass(frozen=True)
class PciFunction:
    """One PCI function. ``kind`` is the class code's upper byte: 0x03 display, 0x12 processing accelerator.

    ``numa_node`` is ``None`` where the kernel does not know it.
    """

    address: str
    vendor: int
    device: int
    kind: int
    subsystem: int | None
    numa_node: int | None
    driver: str | None

    @property
    def folder(self) -> str:
        return f"{FOLDER}/{self.address}"


def pci_functions(machine: Machine, vendor: int) -> tuple[PciFunction, ...]:
    """Return the functions of one vendor, in the order of their addresses. Damaged entries are left out."""
    vendors: dict[int, list[str]] | None = machine.memo.get("pci")
    if vendors is None:
        vendors = machine.memo["pci"] = {}
        for address in machine.names(FOLDER):
            number = _number(machine.read(f"{FOLDER}/{address}/vendor"))
            if number is not None:
                vendors.setdefault(number, []).append(address)
    found = (_function(machine, vendor, address) for address in vendors.get(vendor, ()))
    return tuple(function for function in found if function is not None)


def _function(machine: Machine, vendor: int, address: str) -> PciFunction | None:
    folder = f"{FOLDER}/{address}"
    device, code = (
        _number(machine.read(f"{folder}/device")),
        _number(machine.read(f"{folder}/class")),
    )
    if device is None or code is None:
        return None
    node = (machine.read(f"{folder}/numa_node") or "").strip()
    return PciFunction(
        address=address,
        vendor=vendor,
        device=device,
        kind=code >> 16,
        subsystem=_number(machine.read(f"{folder}/subsystem_device")),
        numa_node=int(node)
        if re.fullmatch(r"\d{1,4}", node)
        else None,  # -1: unknown to the kernel
        driver=machine.link(f"{folder}/driver"),
    )


def _number(text: str | None) -> int | None:
    """Parse a hexadecimal number such as ``0x10de``; ``None`` for anything else."""
    try:
        return int((text or "").strip(), 16)
    except ValueError:
        return None
