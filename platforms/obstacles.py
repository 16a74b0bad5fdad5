"""Devices that were found, and what stands in the way of using them; shared by the probes of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opgraft.machine.evidence import Device, Evidence, Fact
from opgraft.machine.machine import UNREAD, Machine


@dataclass(frozen=True)
class Obstacle:
    """A thing that is missing, and the next step."""

    missing: str
    remedy: str


@dataclass(frozen=True)
class FoundDevice:
    """A device, the UUIDs that variables may name it by, and what stands in its way."""

    device: Device
    identities: tuple[str, ...] = ()
    obstacle: Obstacle | None = None


def usable(found: Sequence[FoundDevice]) -> list[FoundDevice]:
    """Return those that nothing stands in the way of; where there are none, all."""
    return [one for one in found if not one.obstacle] or list(found)


def hide(devices: Sequence[Device], visible: Sequence[int]) -> tuple[Device, ...]:
    """Mark the devices that are not among the visible positions as hidden."""
    return tuple(
        replace(device, hidden=index not in visible) for index, device in enumerate(devices)
    )


def torch_obstacle(machine: Machine, backend: str, remedy: str) -> Obstacle | None:
    """Return an obstacle with ``remedy`` where the installed torch was not built for ``backend``."""
    build = machine.torch_build()
    if build is not None and backend in build.backends:
        return None
    if build is not None and build.version == UNREAD:
        return Obstacle("what the installed torch is built for could not be read", remedy)
    missing = (
        f"the installed torch {build.version} is built without {backend}"
        if build
        else "torch is not installed"
    )
    return Obstacle(missing, remedy)


def verdict(
    found: str,
    devices: Sequence[Device],
    obstacles: Sequence[Obstacle | None],
    facts: Sequence[Fact],
) -> Evidence:
    """Call devices available where nothing stands in the way; else say everything that does."""
    visible = sum(not device.hidden for device in devices)
    found = f"{found}, {visible} visible" if 0 < visible < len(devices) else found
    real = [obstacle for obstacle in obstacles if obstacle]
    if not real:
        return Evidence(True, found, tuple(devices), tuple(facts))
    missing = "; ".join(obstacle.missing for obstacle in real)
    remedy = "; ".join(obstacle.remedy for obstacle in real)
    return Evidence(False, f"{found}, but {missing}", tuple(devices), tuple(facts), remedy)


def counted(number: int, noun: str) -> str:
    """Count in words, such as "1 GPU" or "8 GPUs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
