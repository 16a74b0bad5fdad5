"""Hardware that is there although no installed platform serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opgraft.decision import Decision
from opgraft.evidence import Sighting
from opgraft.machine import Machine
from opgraft.plugins.discovery import HARDWARE_GROUP, discover


def unclaimed_hardware(machine: Machine, decision: Decision) -> list[Sighting]:
    """What the built-in tables recognise and no platform of the decision has among its devices."""
    evidence = [candidate.evidence for candidate in decision.candidates if candidate.evidence]
    claimed = {device.pci_address for found in evidence for device in found.devices}
    sightings = [sighting for look in _tables() for sighting in look(machine)]
    return [s for s in sightings if not s.addresses or not claimed.issuperset(s.addresses)]


def _tables() -> Iterable[Callable[[Machine], Iterable[Sighting]]]:
    """The tables that opgraft itself ships; a vendor's plugin brings a probe instead."""
    return [offer.load() for offer in discover().of_group(HARDWARE_GROUP) if offer.built_in]
