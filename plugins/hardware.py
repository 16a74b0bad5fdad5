"""Hardware without an installed platform."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from opgraft.machine.evidence import Sighting
from opgraft.machine.machine import Machine
from opgraft.platform import PlatformSpec
from opgraft.plugins.discovery import HOST_DISTRIBUTION, PLATFORM_GROUP, discover
from opgraft.registry.decision import Candidate, Decision


def unclaimed_hardware(machine: Machine, decision: Decision) -> list[Sighting]:
    """Return devices of the built-in tables, without those of platforms in the decision."""
    if any(_may_claim_all(candidate) for candidate in decision.candidates):
        return []
    evidence = [candidate.evidence for candidate in decision.candidates if candidate.evidence]
    claimed = {device.pci_address for found in evidence for device in found.devices}
    sightings = [sighting for look in _tables() for sighting in look(machine)]
    return [s for s in sightings if not s.addresses or not claimed.issuperset(s.addresses)]


def _may_claim_all(candidate: Candidate) -> bool:
    """Return True for a plugin's platform without an answer, or with devices without address."""
    if candidate.provider is None or candidate.provider.name == HOST_DISTRIBUTION:
        return False
    evidence = candidate.evidence
    return evidence is None or any(device.pci_address is None for device in evidence.devices)


def _tables() -> Iterator[Callable[[Machine], Iterable[Sighting]]]:
    """Yield the tables of the built-in platforms; a vendor's plugin brings a probe instead."""
    for offer in discover().of_group(PLATFORM_GROUP):
        if offer.built_in:
            spec: PlatformSpec = offer.load()
            if spec.sightings is not None:
                yield spec.sightings
