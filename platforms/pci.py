"""The PCI functions of a machine in /sys; shared by the probes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opgraft.machine.evidence import Evidence, Fact
from opgraft.machine.machine import Machine

FOLDER = "/sys/bus/pci/devices"
_KIND = ("device", "class")
"""The files with the model and the class of a function."""
_BUSES = "/sys/bus"
_PCI = "/sys/bus/pci"


@dataclass(frozen=True)
class PciFunction:
    """One PCI function.

    ``kind`` is the upper byte of the class code: 0x03 display, 0x12 processing accelerator.
    ``numa_node`` is ``None`` if the kernel does not know the node.
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
    """Return the functions of one vendor in the order of addresses, without damaged entries."""
    found = []
    for address in _by_vendor(machine).get(vendor, ()):
        function = _function(machine, vendor, address)
        if function is not None:
            found.append(function)
    return tuple(found)


def absence(machine: Machine, vendor: int, hardware: str, looked_for: str) -> Evidence:
    """Return the evidence of a probe without a PCI function: there is none, or it is unreadable.

    Args:
        machine: the machine.
        vendor: PCI vendor id.
        hardware: the missing hardware, such as ``NVIDIA GPU``.
        looked_for: the same in terms of PCI, such as ``display controller of vendor 10de``.
    """
    unread = _unread(machine, vendor)
    if unread is None:
        return Evidence(False, f"no {hardware}", facts=(Fact(FOLDER, f"no {looked_for}"),))
    failure = f"could not be read: {unread}"
    reason = f"no {hardware} found, as {FOLDER} {failure}"
    return Evidence(False, reason, facts=(Fact(FOLDER, failure),))


def _unread(machine: Machine, vendor: int) -> str | None:
    """Return the unreadable files of PCI functions, or ``None`` if none may be of the vendor."""
    vendors = _by_vendor(machine)
    # An empty folder may be one that this process cannot read.
    why = None if vendors else machine.unlisted(FOLDER)
    if why is None:
        # A function of an unknown vendor may be of this one.
        unknown = vendors.get(None, ())
        own = vendors.get(vendor, ())
        unread = [f"{address}/vendor" for address in unknown]
        files = [f"{address}/{file}" for address in own for file in _KIND]
        unread += [file for file in files if machine.read(f"{FOLDER}/{file}") is None]
        return ", ".join(unread) or None
    # A machine without a PCI bus has other buses.
    has_other_buses = machine.unlisted(_BUSES) is None and machine.names(_BUSES)
    return None if has_other_buses and not machine.exists(_PCI) else why


def _by_vendor(machine: Machine) -> dict[int | None, list[str]]:
    """Return the addresses of functions by vendor. The key ``None`` means an unreadable vendor."""
    vendors: dict[int | None, list[str]] | None = machine.memo.get("pci")
    if vendors is None:
        vendors = {}
        machine.memo["pci"] = vendors
        for address in machine.names(FOLDER):
            number = _hexadecimal(machine.read(f"{FOLDER}/{address}/vendor"))
            vendors.setdefault(number, []).append(address)
    return vendors


def _function(machine: Machine, vendor: int, address: str) -> PciFunction | None:
    folder = f"{FOLDER}/{address}"
    device = _hexadecimal(machine.read(f"{folder}/device"))
    code = _hexadecimal(machine.read(f"{folder}/class"))
    if device is None or code is None:
        return None
    node = (machine.read(f"{folder}/numa_node") or "").strip()
    # The kernel writes -1 for an unknown node.
    is_known = re.fullmatch(r"\d{1,4}", node)
    return PciFunction(
        address=address,
        vendor=vendor,
        device=device,
        kind=code >> 16,
        subsystem=_hexadecimal(machine.read(f"{folder}/subsystem_device")),
        numa_node=int(node) if is_known else None,
        driver=machine.link(f"{folder}/driver"),
    )


def _hexadecimal(text: str | None) -> int | None:
    """Return a hexadecimal number such as ``0x10de``, or ``None`` for another text."""
    try:
        return int((text or "").strip(), 16)
    except ValueError:
        return None
