"""Found devices, and the obstacles to their use; shared by the probes of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import UNREAD, Machine


@dataclass(frozen=True)
class Obstacle:
    """A missing thing, and the next step."""

    missing: str
    remedy: str


@dataclass(frozen=True)
class FoundDevice:
    """A device, the UUIDs in variables that name the device, and the obstacle to its use."""

    device: Device
    identities: tuple[str, ...] = ()
    obstacle: Obstacle | None = None


def usable(found: Sequence[FoundDevice]) -> list[FoundDevice]:
    """Return the devices without an obstacle. If there are none, return all devices."""
    free = [one for one in found if not one.obstacle]
    # Without a free device, the evidence shows all of them with the obstacles.
    return free or list(found)


def counted_usable(
    within_reach: Sequence[FoundDevice], found: Sequence[FoundDevice], noun: str
) -> str:
    """Return the number of devices in words, such as "8 GPUs" or "2 of 8 GPUs within reach"."""
    if len(within_reach) < len(found):
        return f"{len(within_reach)} of {len(found)} {noun}s within reach"
    # Under WSL more devices may be within reach than files show.
    return counted(len(within_reach), noun)


def obstacle_facts(found: Sequence[FoundDevice]) -> list[Fact]:
    """Return a fact for each device with an obstacle."""
    facts = []
    for one in found:
        if one.obstacle:
            source = one.device.pci_address or one.device.name
            facts.append(Fact(source, one.obstacle.missing))
    return facts


def hide(devices: Sequence[Device], visible: Sequence[int]) -> tuple[Device, ...]:
    """Return the devices, marked as hidden outside of the visible positions."""
    return tuple(
        replace(device, hidden=index not in visible) for index, device in enumerate(devices)
    )


def torch_obstacle(machine: Machine, backend: str, remedy: str) -> Obstacle | None:
    """Return an obstacle with ``remedy`` if the installed torch was not built for ``backend``."""
    build = machine.torch_build()
    if build is None:
        return Obstacle("torch is not installed", remedy)
    if backend in build.backends:
        return None
    if build.version == UNREAD:
        return Obstacle("what the installed torch is built for could not be read", remedy)
    return Obstacle(f"the installed torch {build.version} is built without {backend}", remedy)


def verdict(
    found: str,
    devices: Sequence[Device],
    obstacles: Sequence[Obstacle | None],
    facts: Sequence[Fact],
) -> Evidence:
    """Return the evidence about devices. They are available if there is no obstacle."""
    visible = [device for device in devices if not device.hidden]
    # If all are hidden, an obstacle says so.
    if 0 < len(visible) < len(devices):
        found = f"{found}, {len(visible)} visible"
    real = [obstacle for obstacle in obstacles if obstacle]
    missing = "; ".join(obstacle.missing for obstacle in real)
    remedy = "; ".join(obstacle.remedy for obstacle in real)
    return Evidence(
        available=not real,
        reason=f"{found}, but {missing}" if real else found,
        devices=tuple(devices),
        facts=tuple(facts),
        remedy=remedy,
    )


def counted(number: int, noun: str) -> str:
    """Return a number in words, such as "1 GPU" or "8 GPUs"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
