"""Hardware that is there although no installed platform serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from opgraft.decision import Decision
from opgraft.machine import Machine
from opgraft.plugins.discovery import HARDWARE_GROUP, discover


@dataclass(frozen=True)
class Sighting:
    """Accelerators of one kind that a table of PCI ids or device nodes recognises.

    Attributes:
        kind: what they are, such as "Ascend NPU".
        count: how many.
        source: where they were seen, a folder or a device node.
        addresses: their PCI addresses, where known.
        remedy: what usually serves them.
    """

    kind: str
    count: int
    source: str
    addresses: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        found = f"{self.count} x {self.kind} ({self.source})"
        return f"hardware found, no plugin installed: {found}\n  to use it: {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def unclaimed_hardware(machine: Machine, decision: Decision) -> list[Sighting]:
    """What the built-in tables recognise and no platform of the decision has among its devices."""
    evidence = [candidate.evidence for candidate in decision.candidates if candidate.evidence]
    claimed = {device.pci_address for found in evidence for device in found.devices}
    sightings = [sighting for look in _tables() for sighting in look(machine)]
    return [s for s in sightings if not s.addresses or not claimed.issuperset(s.addresses)]


def _tables() -> Iterable[Callable[[Machine], Iterable[Sighting]]]:
    """The tables that opgraft itself ships; a vendor's plugin brings a probe instead."""
    return [offer.load() for offer in discover().of_group(HARDWARE_GROUP) if offer.built_in]
