"""The PCI functions of a machine, as /sys shows them; shared by the probes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opgraft.machine.evidence import Evidence, Fact
from opgraft.machine.machine import Machine

FOLDER = "/sys/bus/pci/devices"
_KIND = ("device", "class")
"""The files that tell what a function of a vendor is."""
_BUSES = "/sys/bus"
_PCI = "/sys/bus/pci"


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
    addresses = _by_vendor(machine).get(vendor, ())
    found = (_function(machine, vendor, address) for address in addresses)
    return tuple(function for function in found if function is not None)


def absence(machine: Machine, vendor: int, hardware: str, looked_for: str) -> Evidence:
    """Give the evidence of a probe that found no PCI function: there is none, or it could not be read.

    Args:
        machine: the machine.
        vendor: of the hardware.
        hardware: what was not found, such as ``NVIDIA GPU``.
        looked_for: the same in terms of PCI, such as ``display controller of vendor 10de``.
    """
    unread = _unread(machine, vendor)
    if unread is None:
        return Evidence(False, f"no {hardware}", facts=(Fact(FOLDER, f"no {looked_for}"),))
    fact = Fact(FOLDER, f"could not be read: {unread}")
    return Evidence(
        False, f"no {hardware} found, as {FOLDER} could not be read: {unread}", facts=(fact,)
    )


def _unread(machine: Machine, vendor: int) -> str | None:
    """Say what of the PCI functions could not be read, ``None`` if nothing of that vendor can be among it."""
    vendors = _by_vendor(machine)
    why = None if vendors else machine.unlisted(FOLDER)
    if why is None:
        unread = [f"{address}/vendor" for address in vendors.get(None, ())]
        own = [f"{address}/{file}" for address in vendors.get(vendor, ()) for file in _KIND]
        unread += [file for file in own if machine.read(f"{FOLDER}/{file}") is None]
        return ", ".join(unread) or None
    # A machine without a PCI bus has other buses.
    has_other_buses = machine.unlisted(_BUSES) is None and machine.names(_BUSES)
    return None if has_other_buses and not machine.exists(_PCI) else why


def _by_vendor(machine: Machine) -> dict[int | None, list[str]]:
    """Return the addresses of the functions by vendor; ``None`` stands for those whose vendor could not be read."""
    vendors: dict[int | None, list[str]] | None = machine.memo.get("pci")
    if vendors is None:
        vendors = machine.memo["pci"] = {}
        for address in machine.names(FOLDER):
            number = _number(machine.read(f"{FOLDER}/{address}/vendor"))
            vendors.setdefault(number, []).append(address)
    return vendors


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
